"""Attention of one pack whose tokens lie on several ranks."""

import torch

from automodel_c.ops.attention import attend

from .exchange import exchange
from .plan import in_use


def attention(q, k, v, plan, *, causal=True, scale=None):
    """`ops.attention` inside every document of the whole pack, from local shards to a local shard.

    Keys and values that a rank's tasks need come in one exchange; query rows of overloaded ranks migrate and their
    outputs come home (`ContextParallel.plan`, ``scheme``). Gradients take the same ways back.

    Args:
        q: [local, Hq, D] float32 or bfloat16, last axis contiguous; this rank's shard.
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
    if not work.apart:
        k, v = exchange(torch.stack((k, v), dim=1), work.keys, plan.group).unbind(1)
    if work.stays:
        ((_, docs, docs_k),) = work.rounds
        return attend(q, k, v, docs, docs_k, causal=causal, scale=scale)[0]
    parts = exchange(q, work.queries, plan.group).split([rows for rows, _, _ in work.rounds])
    outs = [
        attend(part, k, v, docs, docs_k, causal=causal, scale=scale)[0]
        for part, (_, docs, docs_k) in zip(parts, work.rounds, strict=True)
    ]
    return exchange(torch.cat(outs) if len(outs) > 1 else outs[0], work.outputs, plan.group)


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
