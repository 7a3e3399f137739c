"""Where outputs and scratch of the operators come from: torch's allocator.

Call through the module (`_alloc.empty(...)`), so that the tests can hand out poisoned, guarded memory instead.
"""

import torch


def empty(shape, dtype, device):
    """An uninitialised contiguous tensor."""
    return torch.empty(shape, dtype=dtype, device=device)


def workspace(nbytes, device):
    """`nbytes` of scratch as a uint8 tensor."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device)
