"""More ranks than this machine would run: every rank's part in one process, the exchange done by hand."""

import pytest
import torch

import automodel_c as amc
from automodel_c import _amcore
from automodel_c.ops.attention import attend
from automodel_c.parallel.plan import ContextPlan, make_pack
from tests.parallel import context_worker as worker

PACKS = {
    "one": [1] * 413,
    "heavy-tail": [1] * 300 + [2] * 40 + [0] * 7 + [3] * 3 + [4] * 60 + [n for n in range(5, 30) for _ in range(3)],
    "short": [n for n in range(1, 60) for _ in range(1 + n % 9)],
}


def move(xs, routes):
    """What `exchange` gives every rank."""
    packed = [x.new_empty((sum(r.send_rows), *x.shape[1:])) for x, r in zip(xs, routes, strict=True)]
    for buffer, x, route in zip(packed, xs, routes, strict=True):
        _amcore.exchange_copy(buffer, x, route.sends, reverse=False)
    outs = []
    for rank, (x, route) in enumerate(zip(xs, routes, strict=True)):
        parts = [p.split(r.send_rows)[rank] for p, r in zip(packed, routes, strict=True)]
        assert [len(part) for part in parts] == list(route.receive_rows)
        out = x.new_zeros((route.rows_out, *x.shape[1:]))
        _amcore.exchange_copy(out, torch.cat(parts), route.receipts, reverse=False)
        _amcore.exchange_copy(out, x, route.own, reverse=False)
        outs.append(out)
    return outs


def back(douts, routes):
    """The gradient of `move`: every row's gradients, added by the rank that holds it."""
    packed = [d.new_empty((sum(r.receive_rows), *d.shape[1:])) for d, r in zip(douts, routes, strict=True)]
    for buffer, dout, route in zip(packed, douts, routes, strict=True):
        _amcore.exchange_copy(buffer, dout, route.receipts, reverse=True)
    grads = []
    for rank, (dout, route) in enumerate(zip(douts, routes, strict=True)):
        arrived = torch.cat([p.split(r.receive_rows)[rank] for p, r in zip(packed, routes, strict=True)])
        dx = dout.new_empty((route.rows_in, *dout.shape[1:]))
        own = {"own_after": route.own_after, "reverse": True}
        _amcore.exchange_sum(dx, arrived, dout, route.sends, route.own, **own)
        grads.append(dx)
    return grads


CASES = [
    ("one", 16, "contiguous", True),
    ("one", 5, "round_robin", False),
    ("heavy-tail", 12, "contiguous", True),
    ("heavy-tail", 7, "round_robin", True),
    ("short", 8, "contiguous", False),
]


@pytest.mark.parametrize("scheme", ["home", "balanced"])
@pytest.mark.parametrize(("name", "ranks", "layout", "causal"), CASES)
def test_every_rank_together_makes_the_whole(name, ranks, layout, scheme, causal):
    ids = PACKS[name]
    pack, tokens = make_pack(None, ids, None)
    plans = [ContextPlan(pack, tokens, ranks=ranks, rank=r, layout=layout, scheme=scheme) for r in range(ranks)]
    works = [p.attention(4, 2, 16, torch.float32, causal=causal) for p in plans]
    whole = [torch.cat([x, x.new_zeros(plans[0].padded - tokens, *x.shape[1:])]) for x in worker.inputs(tokens)]
    rows = [torch.cat([torch.arange(b, e) for b, e in p.chunks_of(p.rank)]) for p in plans]
    q, k, v, dout = ([x[mine] for mine in rows] for x in whole)
    queries, keys, outputs = ([getattr(w, way) for w in works] for way in ("queries", "keys", "outputs"))
    if works[0].stays:
        queries = outputs = None
    qs = move(q, queries) if queries else q
    ks, vs = (move(x, keys) if not works[0].apart else x for x in (k, v))
    leaves = [[t.requires_grad_() for t in three] for three in zip(qs, ks, vs, strict=True)]
    outs = []
    for (a, b, c), work in zip(leaves, works, strict=True):
        parts = a.split([n for n, _, _ in work.rounds])
        done = [attend(p, b, c, d, e, causal=causal)[0] for p, (_, d, e) in zip(parts, work.rounds, strict=True)]
        outs.append(torch.cat(done))
    home = move([o.detach() for o in outs], outputs) if outputs else [o.detach() for o in outs]
    for out, upstream in zip(outs, back(dout, outputs) if outputs else dout, strict=True):
        out.backward(upstream)
    dq, dk, dv = ([leaf[i].grad for leaf in leaves] for i in range(3))
    dq = back(dq, queries) if queries else dq
    dk, dv = (back(x, keys) if not works[0].apart else x for x in (dk, dv))

    alone = [x[:tokens].clone().requires_grad_() for x in whole[:3]]
    want = amc.ops.attention(*alone, doc_ids=ids, causal=causal)
    want.backward(whole[3][:tokens])
    order = torch.cat(rows).argsort()
    for found, expected in zip((home, dq, dk, dv), (want.detach(), *(x.grad for x in alone)), strict=True):
        found = torch.cat(found)[order]
        assert not found[tokens:].any()
        torch.testing.assert_close(found[:tokens], expected, rtol=1e-4, atol=1e-5)
