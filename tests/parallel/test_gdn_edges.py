"""What a rank does while states travel changes no bit, and no byte on the wire."""

import itertools

import pytest
import torch
import torch.distributed as dist

import automodel_c as amc
from automodel_c.parallel import ContextParallel, gdn, gdn_edges, wire
from automodel_c.parallel.plan import ContextPlan, make_pack
from automodel_c.parallel.recompute import checkpoint_context_fn, selective_context_fn
from tests.parallel.gdn_worker import PACKS, inputs, local_shards

EDGES = ("straddling", "goes-on-into-padding", "gaps", "chunks", "padding-only-ranks", "shorter-than-the-width")


def results(function, local):
    *leaves, dout = (x.detach().clone() for x in local)
    leaves = [x.requires_grad_() for x in leaves]
    before = wire.sent, wire.exchanges
    out = function(*leaves)
    out.backward(dout)
    return [out.detach(), *(x.grad for x in leaves)], (wire.sent - before[0], wire.exchanges - before[1])


def same(a, b):
    return all(torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in zip(a, b, strict=True))


def both_ways(ids, layout, early, dtype):
    """Whether states in turn and states ahead give the same bits and move the same; whether this pack has edges."""
    cp = ContextParallel(dist.group.WORLD)
    plan = cp.plan(doc_ids=ids, tokens=len(ids), layout=layout)
    if plan.straddles.through.any() or not plan.straddles.any:
        return None
    local, _ = local_shards(cp, plan, inputs(len(ids), dtype), ids, poison=True)
    options = {"scale": None, "qk_l2norm": True}
    in_turn = results(lambda *x: gdn._across_ranks(x, plan, options), local)
    with pytest.MonkeyPatch.context() as patch:
        if early:
            patch.setattr(gdn_edges, "can_be_early", lambda *_: True)
            patch.setattr(gdn_edges, "sends_early", lambda *_: True)
        ahead = results(lambda *x: gdn_edges.across(x, plan, **options), local)
    return same(in_turn[0], ahead[0]) and in_turn[1] == ahead[1]


@pytest.mark.parametrize("early", [False, True], ids=["whole", "early"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("layout", ["contiguous", "round_robin"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_states_ahead_are_those_in_turn(rank_pools, world, layout, dtype, early):
    found = [rank_pools(world).run(both_ways, PACKS[name], layout, early, dtype) for name in EDGES]
    assert all(len(set(ranks)) == 1 for ranks in found), "all ranks take the same way"
    kinds = {ranks[0] for ranks in found}
    assert False not in kinds
    assert True in kinds, "some pack has documents that end on the next span"


def test_one_rank_of_one_document(rank_pools):
    for ranks in rank_pools(2).run(both_ways, [1] * 300, "contiguous", True, torch.float32):
        assert ranks


def checkpointed(ids, context_fn):
    cp = ContextParallel(dist.group.WORLD)
    plan = cp.plan(doc_ids=ids, tokens=len(ids))
    local, _ = local_shards(cp, plan, inputs(len(ids)), ids, poison=False)

    def plain(*x):
        return amc.parallel.gated_delta_rule(*x, plan) * 2

    def again(*x):
        return torch.utils.checkpoint.checkpoint(plain, *x, use_reentrant=False, context_fn=context_fn)

    alone, kept = results(plain, local), results(again, local)
    return same(alone[0], kept[0]) and alone[1] == kept[1]


@pytest.mark.parametrize("context_fn", [checkpoint_context_fn, selective_context_fn])
def test_recomputation_moves_no_states(rank_pools, context_fn):
    assert all(rank_pools(2).run(checkpointed, PACKS["chunks"], context_fn))


def test_only_some_inputs_need_gradients(rank_pools):
    assert all(rank_pools(2).run(some_gradients, PACKS["straddling"]))


def some_gradients(ids):
    cp = ContextParallel(dist.group.WORLD)
    plan = cp.plan(doc_ids=ids, tokens=len(ids))
    local, _ = local_shards(cp, plan, inputs(len(ids)), ids, poison=False)
    *leaves, dout = local
    whole = results(lambda *x: amc.parallel.gated_delta_rule(*x, plan), local)[0]
    leaves[2].requires_grad_()
    amc.parallel.gated_delta_rule(*leaves, plan).backward(dout)
    with torch.no_grad():
        out = amc.parallel.gated_delta_rule(*leaves, plan)
    return torch.equal(leaves[2].grad, whole[3]) and torch.equal(out, whole[0]) and leaves[0].grad is None


def a_plan(lengths, ranks, rank):
    pack, tokens = make_pack([0, *itertools.accumulate(lengths)], None, None)
    return ContextPlan(pack, tokens, ranks=ranks, rank=rank)


@pytest.mark.parametrize(
    "lengths, early",
    [([2048], True), ([900, 248, 900], False), ([100, 1848, 100], True), ([1024, 1024], False)],
    ids=["one", "short", "long", "none"],
)
def test_a_state_is_sent_early_where_the_rank_before_would_wait(lengths, early):
    assert gdn_edges.sends_early(a_plan(lengths, 2, 1).straddles, 1) is early
    assert gdn_edges.sends_early(a_plan(lengths, 2, 0).straddles, 0) is False


def test_rows_of_edges():
    straddles = a_plan([900, 248, 900], 2, 0).straddles
    assert [list(x) for x in straddles.edge_rows] == [[0, 124], [124, 0]]
