"""What activation checkpointing keeps, so that recomputation moves no rows and repeats no attention and no choice of
experts on other ranks."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from automodel_c.ops import _experts  # noqa: F401  registers their operators
from automodel_c.parallel import exchange as _exchange  # noqa: F401  registers its operator

KEPT = {
    getattr(torch.ops.automodel_c, name).default
    for name in ("exchange_rows", "exchange_rows_backward", "attention_forward", "moe_route")
}


def checkpoint_context_fn():
    """For ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=checkpoint_context_fn)``.

    The rows that came in, the outputs of attention and the choice of experts on other ranks are kept; everything else
    is computed again.
    """
    return tuple(_KeptAlone(mode) for mode in create_selective_checkpoint_contexts(_policy))


class _KeptAlone(TorchDispatchMode):
    """Shows one of torch's modes the operators of `KEPT` and no other: torch counts every operator, and an FSDP2 unit
    inside the region does not gather the second time what it still holds."""

    def __init__(self, mode):
        super().__init__()
        self.mode = mode

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in KEPT:
            return self.mode.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def _policy(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE
