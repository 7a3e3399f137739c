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
        _amcore.exchange_copy(buffer, x, route.sends, reverse=False, runs=route.runs)
    outs = []
    for rank, (x, route) in enumerate(zip(xs, routes, strict=True)):
        parts = [p.split(r.send_rows)[rank] for p, r in zip(packed, routes, strict=True)]
        assert [len(part) for part in parts] == list(route.receive_rows)
        out = x.new_zeros((route.rows_out, *x.shape[1:]))
        _amcore.exchange_copy(out, torch.cat(parts), route.receipts, reverse=False, runs=route.runs)
        _amcore.exchange_copy(out, x, route.own, reverse=False, runs=route.runs)
        outs.append(out)
    return outs


def back(douts, routes):
    """The gradient of `move`: every row's gradients, added by the rank that holds it."""
    packed = [d.new_empty((sum(r.receive_rows), *d.shape[1:])) for d, r in zip(douts, routes, strict=True)]
    for buffer, dout, route in zip(packed, douts, routes, strict=True):
        _amcore.exchange_copy(buffer, dout, route.receipts, reverse=True, runs=route.runs)
    grads = []
    for rank, (dout, route) in enumerate(zip(douts, routes, strict=True)):
        arrived = torch.cat([p.split(r.receive_rows)[rank] for p, r in zip(packed, routes, strict=True)])
        dx = dout.new_empty((route.rows_in, *dout.shape[1:]))
        own = {"own_after": route.own_after, "reverse": True, "runs": route.runs}
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


def rows(x, work):
    """As the plan's routes take it."""
    return x.flatten(0, 1) if work.split else x


def parts_of(x, shapes, work):
    if not work.split:
        return x.split([n for n, _ in shapes])
    return [p.unflatten(0, s) for p, s in zip(x.split([n * heads for n, heads in shapes]), shapes, strict=True)]


def compute(work, q, k, v, causal):
    """One rank's outputs, from its buffers."""
    queries = [q] if work.stays else parts_of(q, [(p.rows, p.heads) for p in work.parts], work)
    keys, values = ([x] if work.apart else parts_of(x, work.sections, work) for x in (k, v))
    outs = [
        attend(x, keys[p.section], values[p.section], p.docs, p.docs_k, causal=causal)[0]
        for x, p in zip(queries, work.parts, strict=True)
    ]
    return torch.cat([rows(out, work) for out in outs])


SCHEMES = [("home", (4, 2)), ("balanced", (4, 2)), ("heads", (4, 2)), ("heads", (6, 6)), ("heads", (9, 3))]


@pytest.mark.parametrize(("scheme", "heads"), SCHEMES)
@pytest.mark.parametrize(("name", "ranks", "layout", "causal"), CASES)
def test_every_rank_together_makes_the_whole(name, ranks, layout, scheme, causal, heads):
    ids = PACKS[name]
    pack, tokens = make_pack(None, ids, None)
    plans = [ContextPlan(pack, tokens, ranks=ranks, rank=r, layout=layout, scheme=scheme) for r in range(ranks)]
    works = [p.attention(*heads, 16, torch.float32, causal=causal) for p in plans]
    whole = worker.inputs(tokens, heads=heads)
    whole = [torch.cat([x, x.new_zeros(plans[0].padded - tokens, *x.shape[1:])]) for x in whole]
    mine = [torch.cat([torch.arange(b, e) for b, e in p.chunks_of(p.rank)]) for p in plans]
    q, k, v, dout = ([rows(x[some], works[0]) for some in mine] for x in whole)
    queries, keys, outputs = ([getattr(w, way) for w in works] for way in ("queries", "keys", "outputs"))
    if works[0].stays:
        queries = outputs = None
    qs = move(q, queries) if queries else q
    ks, vs = (move(x, keys) if not works[0].apart else x for x in (k, v))
    leaves = [[t.requires_grad_() for t in three] for three in zip(qs, ks, vs, strict=True)]
    outs = [compute(work, *three, causal) for three, work in zip(leaves, works, strict=True)]
    home = move([o.detach() for o in outs], outputs) if outputs else [o.detach() for o in outs]
    for out, upstream in zip(outs, back(dout, outputs) if outputs else dout, strict=True):
        out.backward(upstream)
    dq, dk, dv = ([leaf[i].grad for leaf in leaves] for i in range(3))
    dq = back(dq, queries) if queries else dq
    dk, dv = (back(x, keys) if not works[0].apart else x for x in (dk, dv))

    alone = [x[:tokens].clone().requires_grad_() for x in whole[:3]]
    want = amc.ops.attention(*alone, doc_ids=ids, causal=causal)
    want.backward(whole[3][:tokens])
    order = torch.cat(mine).argsort()
    for found, expected in zip((home, dq, dk, dv), (want.detach(), *(x.grad for x in alone)), strict=True):
        found = torch.cat(found).view(len(order), *expected.shape[1:])[order]
        assert not found[tokens:].any()
        torch.testing.assert_close(found[:tokens], expected, rtol=1e-4, atol=1e-5)
    if scheme == "heads":
        assert works[0].split
