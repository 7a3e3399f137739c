"""Where outputs and scratch of the operators come from: torch's allocator.

Call through the module (`_alloc.empty(...)`), so that the tests can hand out poisoned, guarded memory instead.
"""

import torch


class OutOfMemory(MemoryError, torch.OutOfMemoryError):
    """A MemoryError, which who waits for torch's hears as well."""


def empty(shape, dtype, device):
    """An uninitialised contiguous tensor."""
    return _allocated(shape, dtype, device)


def workspace(nbytes, device):
    """`nbytes` of scratch as a uint8 tensor."""
    return _allocated((nbytes,), torch.uint8, device)


def _allocated(shape, dtype, device):
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except RuntimeError as error:
        told = _told(error, shape, dtype, device)
        if told is error:
            raise
        raise told from error


def _told(error, shape, dtype, device):
    if not isinstance(error, torch.OutOfMemoryError) and "alloc" not in str(error):
        return error
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    name = str(dtype).removeprefix("torch.")
    return OutOfMemory(f"no memory on {device} for {list(shape)} of {name}, {size / 2**30:,.1f} GiB")
