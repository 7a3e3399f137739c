"""What activation checkpointing keeps, so that recomputation moves no rows and repeats no attention and no choice of
experts on other ranks; selective checkpointing keeps more."""

import threading

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from automodel_c.ops import _experts  # noqa: F401  registers their operators
from automodel_c.parallel import exchange as _exchange  # noqa: F401  registers its operator

_thread = threading.local()

KEPT = {
    getattr(torch.ops.automodel_c, name).default
    for name in ("exchange_rows", "exchange_rows_backward", "attention_forward", "moe_route")
}


def checkpoint_context_fn():
    """For ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=checkpoint_context_fn)``.

    The rows that came in, the outputs of attention and the choice of experts on other ranks, with where its rows go,
    are kept; everything else is computed again.
    """
    return _contexts(KEPT, lambda ctx, op, *args, **kwargs: CheckpointPolicy.MUST_SAVE)


def selective_context_fn():
    """As `checkpoint_context_fn`, but that the outputs of the gated delta rule and of every second product of matrices
    are kept too: more memory, fewer products made again."""
    seen = {False: 0, True: 0}  # products of the forward, and of the one in backward

    def policy(ctx, op, *args, **kwargs):
        if op not in _PRODUCTS:
            return CheckpointPolicy.MUST_SAVE
        seen[ctx.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if seen[ctx.is_recompute] % 2 else CheckpointPolicy.MUST_RECOMPUTE

    return _contexts(KEPT | _PRODUCTS | {torch.ops.automodel_c.gated_delta_rule_forward.default}, policy)


_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


def _contexts(shown, policy):
    modes, notes = (_ShownAlone(mode, shown) for mode in create_selective_checkpoint_contexts(policy)), []
    return tuple(_Noting(mode, notes, again) for mode, again in zip(modes, (False, True), strict=True))


class _ShownAlone(TorchDispatchMode):
    """Shows one of torch's modes the operators `shown` and no other: torch counts every operator, and an FSDP2 unit
    inside the region does not gather the second time what it still holds."""

    def __init__(self, mode, shown):
        super().__init__()
        self.mode, self.shown = mode, shown

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in self.shown:
            return self.mode.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


class _Noting:
    """A context beside which a forward notes what it finds out on the host, and a second one of the same module reads
    it; the second is entered anew by every backward."""

    def __init__(self, context, notes, again):
        self.context, self.notes, self.again, self.before = context, notes, again, []

    def __enter__(self):
        self.before.append(getattr(_thread, "noting", None))
        _thread.noting, self.at = self, 0
        if not self.again:
            self.notes.clear()
        return self.context.__enter__()

    def __exit__(self, *raised):
        _thread.noting = self.before.pop()
        return self.context.__exit__(*raised)


def noted():
    """The next thing that the first forward noted, in a second one; else None."""
    noting = getattr(_thread, "noting", None)
    if noting is None or not noting.again:
        return None
    noting.at += 1
    return noting.notes[noting.at - 1]


def note(value):
    """``value``, which a second forward gets from `noted` in this place."""
    noting = getattr(_thread, "noting", None)
    if noting is not None and not noting.again:
        noting.notes.append(value)
    return value
