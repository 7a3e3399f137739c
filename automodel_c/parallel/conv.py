"""The short causal convolution over one pack whose tokens lie on several ranks."""

import torch

from automodel_c import ops

from .exchange import exchange
from .plan import in_use


def causal_conv1d(x, weight, plan, *, bias=None, activation="silu"):
    """`ops.causal_conv1d` inside every document of the whole pack, from local shards to a local shard.

    Where a document goes on to another rank, its last W - 1 rows before the edge go there too, in one exchange and from
    as many ranks as hold them. Their gradients take the way back.

    Args:
        x: [local, C] float32 or bfloat16, last axis contiguous; this rank's shard.
        weight: [C, W]. bias: [C] or None. Whole on every rank; each rank gets its own rows' part of their gradient.
        plan: from `ContextParallel.plan`; the same on every rank, as are the other arguments' shapes, dtypes and
            requires_grad.
        activation: "silu" or None.

    Returns:
        y [local, C] in x's dtype. Padding rows, whatever they hold, have output and gradient 0.

    Raises as `ops.causal_conv1d`; what one rank raises before an exchange, every rank of the group raises within
    seconds, naming it.
    """
    with in_use(plan, "parallel.causal_conv1d"):
        _check(x, weight, plan)
        options = {"bias": bias, "activation": activation}
        straddles, width = plan.straddles, weight.shape[1]
        if width > 1 and straddles.any:
            with torch.no_grad():
                ops.causal_conv1d(x[:0], weight, **options)  # what is wrong is said before rows move
            options["initial_state"] = _states(exchange(x, straddles.halo(width).route, plan.group), straddles, width)
        return ops.causal_conv1d(x, weight, pack=straddles.pack(x.shape[0], x.device), **options)[0]


def _states(halo, straddles, width):
    """[N, C, W - 1]: the halo rows where a piece came in, 0 for the documents that start here."""
    docs, came = straddles.pieces
    states = halo.new_zeros(len(docs), halo.shape[1], width - 1)
    rows = halo.unflatten(0, (len(came), width - 1)).transpose(1, 2)
    return states.index_copy(0, straddles.came_on(halo.device), rows)


def _check(x, weight, plan):
    for name, value in (("x", x), ("weight", weight)):
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"parallel.causal_conv1d: {name} must be a torch tensor, not {type(value).__name__}")
        if value.ndim != 2:
            raise ValueError(f"parallel.causal_conv1d: {name} has {value.ndim} axes, 2 are needed")
    if weight.shape[1] == 0:
        raise ValueError("parallel.causal_conv1d: weight has width 0, 1 at least is needed")
    if x.shape[0] != plan.local and not (plan.ranks == 1 and x.shape[0] == plan.tokens):
        raise ValueError(f"parallel.causal_conv1d: x has {x.shape[0]} rows, a rank holds {plan.local}")
