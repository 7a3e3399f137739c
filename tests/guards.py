"""Poisoned memory with canaries: what an operator did not write shows as NaN, what it should not write is caught."""

import math

import torch

CANARY_BYTES = 64
_CANARY = 0xA5


class Guards:
    """Hands out tensors filled with NaN (integers 0x7f.., bool True) between two runs of canary bytes."""

    def __init__(self):
        self._given = []

    def __call__(self, shape, dtype=torch.float32, device="cpu"):
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = math.prod(shape) * dtype.itemsize
        block = torch.full((2 * CANARY_BYTES + nbytes,), _CANARY, dtype=torch.uint8, device=device)
        body = block[CANARY_BYTES : CANARY_BYTES + nbytes]
        body.fill_(1 if dtype == torch.bool else 0x7F)
        out = body.view(dtype).view(shape) if nbytes else torch.empty(shape, dtype=dtype, device=device)
        if dtype.is_floating_point:
            out.fill_(math.nan)
        self._given.append((block, tuple(shape), dtype))
        return out

    def workspace(self, nbytes, device="cpu"):
        return self(nbytes, torch.uint8, device)

    def check(self):
        """AssertionError naming the tensor beside which something was written."""
        for block, shape, dtype in self._given:
            for side, canary in (("before", block[:CANARY_BYTES]), ("after", block[block.numel() - CANARY_BYTES :])):
                hurt = (canary != _CANARY).nonzero().flatten().tolist()
                assert not hurt, f"bytes {hurt} of the {CANARY_BYTES} {side} a {dtype} tensor of shape {shape} changed"


class CheckedAllocator:
    """Stands in for automodel_c.ops._alloc: every allocation first checks all that went before."""

    def __init__(self, guards):
        self.guards = guards

    def empty(self, shape, dtype, device):
        self.guards.check()
        return self.guards(shape, dtype, device)

    def workspace(self, nbytes, device):
        self.guards.check()
        return self.guards.workspace(nbytes, device)
