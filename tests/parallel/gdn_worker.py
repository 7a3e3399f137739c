"""What a rank does in the tests of the gated delta rule and the convolution over ranks, and their packs."""

import torch
import torch.distributed as dist

import automodel_c as amc
from automodel_c.parallel import ContextParallel, wire
from tests.ranks import here

# name -> documents as ids, for any number of ranks
PACKS = {
    "inside": [1] * 8 + [2] * 8 + [3] * 8 + [4] * 8 + [5] * 8 + [6] * 8,
    "straddling": [1] * 6 + [2] * 6 + [3] * 4 + [4] * 17 + [5] * 3,
    "one": [1] * 41,
    "on-edges": [1] * 12 + [2] * 8 + [3] * 4 + [4] * 24,  # ends on an edge for 2, 3 and 4 ranks
    "shorter-than-the-width": [1, 2, 2, 3, 3, 3, 4, 5, 5, 6, 6, 6, 6, 7, 7, 7],
    "one-or-two-rows-a-rank": [1] * 2 + [2] * 3,
    "padding-only-ranks": [1] * 5 + [2] * 2 + [0] * 41,
    "goes-on-into-padding": [1] * 22 + [0] * 50,
    "gaps": [0] * 3 + [1] * 20 + [0] * 2 + [1] * 13 + [7] * 1 + [0] * 2,
    "chunks": [1] * 5 + [2] * 300 + [3] * 70 + [4] * 137,
    "odd": [1] * 127,
    "one-token": [1],
    "only-padding": [0] * 7,
    "empty": [],
}
HEADS, DIMS = (2, 4), (16, 24)


def inputs(tokens, dtype=torch.float32, heads=HEADS, dims=DIMS, seed=0, gate=1.0, key=1.0, beta_dtype=None):
    """q, k, v, g, beta, dout of the whole pack, the same on every rank.

    ``gate``: the strongest decay of a token. ``key``: the size of a key's elements.
    """
    generator = torch.Generator().manual_seed(seed)
    (hk, hv), (dk, dv) = heads, dims

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    q, k, v, dout = (normal(tokens, h, d).to(dtype) for h, d in ((hk, dk), (hk, dk), (hv, dv), (hv, dv)))
    k = k * key
    g = -gate * torch.rand(tokens, hv, generator=generator) * torch.rand(hv, generator=generator)
    beta = torch.rand(tokens, hv, generator=generator).to(beta_dtype or dtype)
    return [q, k, v, g, beta, dout]


def local_shards(cp, plan, whole, ids, poison):
    """This rank's shards; with ``poison`` padding rows hold NaN. And which rows are padding."""
    local = [cp.shard(x.to(here()), plan) for x in whole]
    padding = cp.shard(torch.tensor([i == 0 for i in ids], dtype=torch.bool, device=here()), plan, fill=True)
    if poison:
        for x in local:
            x[padding] = float("nan")
    return local, padding


def counted(before):
    now = wire.sent, wire.received, wire.messages
    return tuple(b - a for a, b in zip(before, now, strict=True))


def said(traffic, rank):
    return tuple(int(traffic[key][rank]) for key in ("sent", "received", "messages"))


def run(ids, dtype=torch.float32, heads=HEADS, dims=DIMS, layout="contiguous", poison=True, options=None, **drawn):
    """(o, dq, dk, dv, dg, dbeta) of the whole pack; what went over the wire: forward, in all, as planned."""
    cp = ContextParallel(dist.group.WORLD)
    plan = cp.plan(doc_ids=ids, tokens=len(ids), layout=layout)
    local, padding = local_shards(cp, plan, inputs(len(ids), dtype, heads, dims, **drawn), ids, poison)
    *leaves, dout = local
    leaves = [x.requires_grad_() for x in leaves]
    before = wire.sent, wire.received, wire.messages
    out = amc.parallel.gated_delta_rule(*leaves, plan, **(options or {}))
    forward = counted(before)
    out.backward(dout)
    total = counted(before)
    results = [out.detach(), *(x.grad for x in leaves)]
    assert all(bool((x[padding] == 0).all()) for x in results), "padding rows of out and of the gradients are 0"
    planned = said(plan.straddles.states(*dims).traffic(heads[1]), plan.rank)
    return [cp.gather(x, plan) for x in results], forward, total, planned
