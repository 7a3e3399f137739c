"""Attention in halves around what travels: outputs, and gradients of queries, to the bit those of one call through
buffers; the same bytes on the wire, none of them twice under recomputation."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from automodel_c.ops.attention import attend
from automodel_c.parallel import ContextParallel, wire
from automodel_c.parallel.attention_ahead import attention_ahead
from automodel_c.parallel.exchange import exchange
from automodel_c.parallel.plan import ContextPlan, make_pack
from automodel_c.parallel.recompute import checkpoint_context_fn

PACKS = {
    "heavy-tailed": [3, 40, 7, 12, 290, 5, 5, 30, 18, 9, 120, 4, 33, 60, 8, 21],
    "one": [500], "long last": [20, 400, 30, 5], "two long": [300, 10, 10, 300, 7],
}  # fmt: skip


def through_buffers(q, k, v, work, causal):
    arrived = exchange(torch.stack((k, v), dim=2), work.keys, work.plan.group)
    sections = [part.unbind(2) for part in arrived.split([rows for rows, _ in work.sections])]
    parts = exchange(q, work.queries, work.plan.group).split([part.rows for part in work.parts])
    outs = [
        attend(x, *sections[part.section], part.docs, part.docs_k, causal=causal)[0]
        for x, part in zip(parts, work.parts, strict=True)
    ]
    return exchange(torch.cat(outs), work.outputs, work.plan.group)


def results(function, local):
    leaves = [x.clone().requires_grad_() for x in local[:3]]
    before = wire.sent, wire.received, wire.messages, wire.exchanges
    out = function(*leaves)
    out.backward(local[3])
    now = wire.sent, wire.received, wire.messages, wire.exchanges
    return [out.detach(), *(x.grad for x in leaves)], [b - a for a, b in zip(before, now, strict=True)]


def both_ways(lengths, layout, causal, padding):
    """Whether all holds; None where no rows migrate."""
    cp, tokens = ContextParallel(dist.group.WORLD), sum(lengths) + padding
    offsets = [0, *itertools.accumulate(lengths)]
    plan = cp.plan(cu_seqlens=offsets, tokens=tokens, layout=layout, scheme="balanced")
    work = plan.attention(4, 2, 16, torch.float32, causal=causal)
    if work.stays:
        return None
    generator = torch.Generator().manual_seed(3)
    local = [cp.shard(torch.randn(tokens, heads, 16, generator=generator), plan) for heads in (4, 2, 2, 4)]

    def ahead(*x):
        return attention_ahead(*x, work, causal, None)

    def again(*x):
        return checkpoint(ahead, *x, use_reentrant=False, context_fn=checkpoint_context_fn)

    (found, moved), (kept, moved_kept) = results(ahead, local), results(again, local)
    expected, needed = results(lambda *x: through_buffers(*x, work, causal), local)
    assert moved == needed == moved_kept
    assert all(torch.equal(a, b) for a, b in zip(found, kept, strict=True))
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    for a, b in zip(found[2:], expected[2:], strict=True):  # added in another order
        assert float((a - b).norm()) <= 1e-6 * float(b.norm())
    assert narrow(local, plan, causal) <= 1.5
    return len(work.halves.away), [len(docs) // 2 for docs, _ in work.halves.home]


def narrow(local, plan, causal):
    """In bfloat16: the error of the keys' and values' gradients over that through buffers, truth is float32's."""
    local = [x.bfloat16() for x in local]
    work, exact_work = (plan.attention(4, 2, 16, dtype, causal=causal) for dtype in (torch.bfloat16, torch.float32))
    found = results(lambda *x: attention_ahead(*x, work, causal, None), local)[0][2:]
    naive = results(lambda *x: through_buffers(*x, work, causal), local)[0][2:]
    exact = results(lambda *x: through_buffers(*x, exact_work, causal), [x.float() for x in local])[0][2:]
    errors = [
        sum(float((a.float() - c).square().sum()) for a, c in zip(some, exact, strict=True)) for some in (found, naive)
    ]
    return (errors[0] / max(errors[1], 1e-30)) ** 0.5 if errors[0] else 0.0


@pytest.mark.parametrize("padding", [0, 13])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "whole"])
@pytest.mark.parametrize("layout", ["contiguous", "round_robin"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_halves_are_the_whole(rank_pools, world, layout, causal, padding):
    found = [rank_pools(world).run(both_ways, lengths, layout, causal, padding) for lengths in PACKS.values()]
    assert any(ranks[0] for ranks in found), "rows migrate in some pack"


def test_some_rank_has_both_halves_and_rows_of_others(rank_pools):
    found = rank_pools(2).run(both_ways, PACKS["heavy-tailed"], "contiguous", True, 0)
    assert any(away and min(home) for away, home in found)


@pytest.mark.parametrize("name, pays", [("heavy-tailed", True), ("one", False), ("long last", False)])
def test_halves_are_taken_where_every_rank_has_enough_at_home(name, pays):
    pack, tokens = make_pack([0, *itertools.accumulate(PACKS[name])], None, None)
    plans = [ContextPlan(pack, tokens, ranks=2, rank=rank, scheme="balanced") for rank in range(2)]
    works = [plan.attention(4, 2, 16, torch.float32) for plan in plans]
    assert [work.halves.pays for work in works] == [pays] * 2
