"""Attention of one pack whose tokens lie on several ranks."""

import torch

from automodel_c.ops.attention import attend

from .attention_ahead import attention_ahead
from .exchange import exchange
from .plan import in_use


def attention(q, k, v, plan, *, causal=True, scale=None):
    """`ops.attention` inside every document of the whole pack, from local shards to a local shard.

    Keys and values that a rank's tasks need come in one exchange; query rows of overloaded ranks migrate, or heads of
    long documents are split over ranks, and outputs come home (`ContextParallel.plan`, ``scheme``). Gradients take the
    same ways back.

    Args:
        q: [local, Hq, D] float32 or bfloat16, last axis contiguous; this rank's shard, on the CPU or on its GPU.
        k, v: [local, Hk, D] in q's dtype.
        plan: from `ContextParallel.plan`; the same on every rank, as are the other arguments' shapes and dtypes.
        causal, scale: as in `ops.attention`.

    Returns:
        out [local, Hq, D]. Padding rows, whatever they hold, have output and gradients 0.

    Raises as `ops.attention`; what one rank raises before an exchange, every rank of the group raises within seconds,
    naming it.
    """
    with in_use(plan, "parallel.attention"):
        _check(q, k, v, plan)
        return _attention(q, k, v, plan, bool(causal), scale)


def _attention(q, k, v, plan, causal, scale):
    heads, dim = q.shape[1:]
    work = plan.attention(heads, k.shape[1], dim, q.dtype, causal=causal)
    if not work.stays and not work.split and work.halves.pays:
        return attention_ahead(q, k, v, work, causal, scale)
    if work.apart:
        sections = [(k, v)]
    else:
        arrived = exchange(_rows(torch.stack((k, v), dim=2), work), work.keys, plan.group)
        sections = [pair.unbind(2) for pair in _cut(arrived, work.sections, work)]
    if work.stays:
        parts = [q]
    else:
        arrived = exchange(_rows(q, work), work.queries, plan.group)
        parts = _cut(arrived, [(part.rows, part.heads) for part in work.parts], work)
    outs = [
        attend(x, *sections[part.section], part.docs, part.docs_k, beside, causal=causal, scale=scale)[0]
        for x, part, beside in zip(parts, work.parts, work.on_device(q.device), strict=True)
    ]
    if work.stays:
        return outs[0]
    outs = [_rows(out, work) for out in outs]
    home = exchange(torch.cat(outs) if len(outs) > 1 else outs[0], work.outputs, plan.group)
    return home.unflatten(0, (-1, heads)) if work.split else home


def _rows(x, work):
    """[T, heads, ..] as the plan's routes take it: [T heads, ..] where groups of heads travel."""
    return x.flatten(0, 1) if work.split else x


def _cut(x, shapes, work):
    """A buffer as its parts [rows, heads, ..], of all (rows, heads)."""
    if not work.split:
        return x.split([rows for rows, _ in shapes])
    parts = x.split([rows * heads for rows, heads in shapes])
    return [part.unflatten(0, shape) for part, shape in zip(parts, shapes, strict=True)]


def _check(q, k, v, plan):
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"parallel.attention: {name} must be a torch tensor, not {type(x).__name__}")
        if x.ndim != 3:
            raise ValueError(f"parallel.attention: {name} has {x.ndim} axes, [tokens, heads, dim] is needed")
        if x.shape[0] != plan.local and not (plan.ranks == 1 and x.shape[0] == plan.tokens):
            raise ValueError(f"parallel.attention: {name} has {x.shape[0]} rows, a rank holds {plan.local}")
        if x.dtype != q.dtype or q.dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(f"parallel.attention: {name} is {x.dtype}, q {q.dtype}: float32 or bfloat16 is needed")
        if x.device != q.device:
            raise ValueError(f"parallel.attention: {name} is on {x.device}, q on {q.device}")
    if v.shape != k.shape or k.shape[2] != q.shape[2]:
        raise ValueError(f"parallel.attention: v is {list(v.shape)}, k {list(k.shape)}, q {list(q.shape)}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"parallel.attention: {q.shape[1]} query heads are not a multiple of {k.shape[1]} key heads")
