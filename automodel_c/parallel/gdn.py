"""The gated delta rule over one pack whose tokens lie on several ranks."""

import torch

from automodel_c import ops

from . import gdn_edges
from .exchange import exchange
from .plan import in_use


def gated_delta_rule(q, k, v, g, beta, plan, *, scale=None, qk_l2norm=True):
    """`ops.gated_delta_rule` inside every document of the whole pack, from local shards to a local shard.

    States travel, and only where a document goes on to another rank: one exchange of float32 rows before the ranks that
    it goes on to run. Gradients of states take the way back.

    Args:
        q, k: [local, Hk, Dk] float32 or bfloat16, last axis contiguous; this rank's shards.
        v: [local, Hv, Dv] in q's dtype.
        g: [local, Hv] float32. beta: [local, Hv] in q's dtype or float32.
        plan: from `ContextParallel.plan`; the same on every rank, as are the other arguments' shapes, dtypes and
            requires_grad.
        scale, qk_l2norm: as in `ops.gated_delta_rule`.

    Returns:
        o [local, Hv, Dv] in q's dtype. Padding rows, whatever they hold, have output and gradients 0.

    Raises as `ops.gated_delta_rule`; what one rank raises before an exchange, every rank of the group raises within
    seconds, naming it.

    The recurrence is linear in the state, so a rank that a document goes through sends what it does to a state, a
    transition M and the state S that it adds, without waiting for the ranks before it:
    S_n <- M_n S_(n-1) + S_n. It then runs its rows from the state that the ranks before it add up to. Where no rank is
    one that a document goes through, `gdn_edges` says what each does while states travel.

    Against float64, errors are about those of one rank: measured with 2 to 8 spans, gates from 0.001 to 8 a token and
    Dk 16 to 128, of dg 0.6 to 1.3 of it. Gradients of A_log and dt_bias are sums of dg over rows, one number a head,
    whose terms cancel twofold to tenfold: of 96 such numbers the error is 1.02 of one rank's in the median, more than
    twice it for 24 % and less than half of it for 20 %. Products with decays in float64 change neither.
    """
    with in_use(plan, "parallel.gated_delta_rule"):
        tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
        _check(tensors, plan)
        options = {"scale": scale, "qk_l2norm": qk_l2norm}
        if plan.straddles.any and not plan.straddles.through.any():
            return gdn_edges.across(tuple(tensors.values()), plan, **options)
        if plan.straddles.any:
            return _across_ranks(tuple(tensors.values()), plan, options)
        return ops.gated_delta_rule(*tensors.values(), pack=plan.straddles.pack(q.shape[0], q.device), **options)[0]


def _across_ranks(tensors, plan, options):
    """Every rank comes here when some document goes through a whole span, and runs one exchange."""
    parts, states = plan.straddles.parts, plan.straddles.states(tensors[0].shape[2], tensors[2].shape[2])
    pieces = list(zip(*(x.split([part.rows for part in parts]) for x in tensors), strict=True))
    packs = [part.pack_on(tensors[0].device) for part in parts]
    outs, sent = [None] * len(parts), []
    for i, (part, pack, piece) in enumerate(zip(parts, packs, pieces, strict=True)):
        if part.goes and part.came:
            sent.append(_columns(_effect(*piece[1:], pack, options["qk_l2norm"])))
        elif part.goes:
            outs[i], last = ops.gated_delta_rule(*piece, pack=pack, output_final_state=True, **options)
            sent.append(_columns(last))
    arrived = exchange(torch.cat(sent), states.route, plan.group)
    blocks = arrived.split(states.sizes) if states.sizes else (arrived,)
    for i, (part, pack, piece) in enumerate(zip(parts, packs, pieces, strict=True)):
        if outs[i] is None:
            first = _first_state(part, states, blocks, tensors[2].shape[2]) if part.came else None
            outs[i] = ops.gated_delta_rule(*piece, pack=pack, initial_state=first, **options)[0]
    return torch.cat(outs)


def _effect(k, v, g, beta, pack, qk_l2norm):
    """[N, Hv, Dk, Dv + Dk] of the N <= 1 documents: the state that they leave after none, and their transition.

    A transition is what becomes of the identity where every value is 0. All its rows decay alike, so that decay is left
    out of the recurrence and multiplied in at the end: inside, the identity would fade into subnormal numbers, which
    are slow. Keys of any length may need it inside, to stay finite.
    """
    (heads, _), dim, queries = v.shape[1:], k.shape[2], k.detach()
    options = {"pack": pack, "qk_l2norm": qk_l2norm, "output_final_state": True}
    state = ops.gated_delta_rule(queries, k, v, g, beta, **options)[1]
    nothing, identity = v.new_zeros((v.shape[0], heads, dim)), torch.eye(dim, device=v.device)
    start = identity.expand(len(pack), heads, dim, dim)
    gates = torch.zeros_like(g) if qk_l2norm else g
    transition = ops.gated_delta_rule(queries, k, nothing, gates, beta, initial_state=start, **options)[1]
    return torch.cat((state, transition * _decay(g) if qk_l2norm else transition), 3)


def _decay(g):
    """[Hv, 1, 1]: exp(sum of g), and 0 below e^-60, which is beyond what a float32 sum can hold."""
    total = g.sum(0, dtype=torch.float64)
    return torch.where(total < -60.0, -torch.inf, total).exp().float()[:, None, None]


def _first_state(part, states, blocks, width):
    """[N, Hv, Dk, Dv]: what the spans before the part add up to, one after another."""
    if not part.sources:
        return blocks[0].unflatten(0, (0, width)).permute(0, 2, 3, 1)  # the anchor: no document and no rows
    total = None
    with torch.autocast(blocks[0].device.type, enabled=False):  # a product of transitions needs float32
        for span in part.sources:
            state, transition = (None if n is None else blocks[n].permute(1, 2, 0) for n in states.blocks[span])
            total = state if total is None else torch.baddbmm(state, transition, total)
    return total.contiguous()[None]


def _columns(states):
    """[N, Hv, Dk, n] -> [N n, Hv, Dk]."""
    return states.permute(0, 3, 1, 2).flatten(0, 1)


def _check(tensors, plan):
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"parallel.gated_delta_rule: {name} must be a torch tensor, not {type(x).__name__}")
        axes = 2 if name in ("g", "beta") else 3
        if x.ndim != axes:
            raise ValueError(f"parallel.gated_delta_rule: {name} has {x.ndim} axes, {axes} are needed")
        if x.shape[0] != plan.local and not (plan.ranks == 1 and x.shape[0] == plan.tokens):
            raise ValueError(f"parallel.gated_delta_rule: {name} has {x.shape[0]} rows, a rank holds {plan.local}")
