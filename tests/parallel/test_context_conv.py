"""The causal convolution of a pack over gloo ranks: out and every gradient are those of one rank.

The plain twin is transformers' eager code, document by document; the truth is the formula in float64.
"""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import automodel_c as amc
from automodel_c import docs_from_ids
from automodel_c.parallel import ContextParallel, RankFailure, checkpoint_context_fn, wire
from automodel_c.reference.conv import causal_conv1d as reference
from tests.numerics import assert_as_good_as
from tests.ops.test_conv import naive
from tests.parallel.gdn_worker import PACKS, counted, local_shards, said
from tests.parallel.test_context_gdn import check_bytes
from tests.ranks import here

LAYOUTS = ("contiguous", "round_robin")
CHANNELS = 24
NAMES = ("y", "dx", "dweight", "dbias")


def inputs(tokens, dtype=torch.float32, width=4, channels=CHANNELS, seed=0):
    """x, weight, bias, dy of the whole pack, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (tokens, channels), (channels, width), (channels,), (tokens, channels)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def run(ids, layout="contiguous", silu=True, with_bias=True, **drawn):
    """(y, dx) of the whole pack and (dweight, dbias) summed over ranks; the wire: forward, in all, as planned."""
    cp = ContextParallel(dist.group.WORLD)
    plan = cp.plan(doc_ids=ids, tokens=len(ids), layout=layout)
    x, weight, bias, dy = (t.to(here()) for t in inputs(len(ids), **drawn))
    (x, dy), padding = local_shards(cp, plan, [x, dy], ids, poison=True)
    leaves = [t.requires_grad_() for t in ([x, weight, bias] if with_bias else [x, weight])]
    before = wire.sent, wire.received, wire.messages
    out = amc.parallel.causal_conv1d(
        x, weight, plan, bias=bias if with_bias else None, activation="silu" if silu else None
    )
    forward = counted(before)
    out.backward(dy)
    total = counted(before)
    assert not out[padding].any() and not x.grad[padding].any()
    parts = [t.grad.double() for t in leaves[1:]]
    for part in parts:
        dist.all_reduce(part)
    planned = said(plan.straddles.halo(weight.shape[1]).traffic(x.shape[1], x.dtype), plan.rank)
    shards = [cp.gather(t, plan) for t in (out.detach(), x.grad)]
    return [*shards, *(part.to(weight.dtype) for part in parts)], forward, total, planned


@functools.cache
def expected(ids, silu, with_bias, drawn):
    docs = docs_from_ids(list(ids))

    def one(function, leaves, dy):
        leaves = [t.requires_grad_() for t in leaves]
        options = {"bias": leaves[2]} if with_bias else {}
        out = function(*leaves[:2], docs, silu=silu, **options)[0]
        return [out.detach(), *torch.autograd.grad(out, leaves, dy)]

    x, weight, bias, dy = inputs(len(ids), **dict(drawn))
    leaves = [x, weight, bias] if with_bias else [x, weight]
    return one(naive, leaves, dy), one(reference, [t.detach().double() for t in leaves], dy.double())


def check(results, ids, silu=True, with_bias=True, **drawn):
    """The error rule for what `run` gave, and that every rank has the same bits."""
    first = results[0][0]
    for other, *_ in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    if not any(ids):
        assert all(not t.any() for t in first)
        return
    twin, truth = expected(tuple(ids), silu, with_bias, tuple(drawn.items()))
    for name, ours, plain, true in zip(NAMES, first, twin, truth, strict=False):
        assert_as_good_as(ours, plain, true, name=name)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", PACKS)
def test_convolution_is_that_of_one_rank(rank_pools, name, world, layout):
    results = rank_pools(world).run(run, PACKS[name], layout=layout)
    check(results, PACKS[name])
    check_bytes(results)


OPTIONS = {
    "bf16": {"dtype": torch.bfloat16},
    "wide": {"width": 8},
    "two": {"width": 2, "with_bias": False},
    "one": {"width": 1},
    "linear": {"silu": False, "dtype": torch.bfloat16, "with_bias": False},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPTIONS)
def test_dtypes_and_widths(rank_pools, name, layout):
    for pack in ("straddling", "shorter-than-the-width"):
        results = rank_pools(3).run(run, PACKS[pack], layout=layout, seed=4, **OPTIONS[name])
        check(results, PACKS[pack], seed=4, **OPTIONS[name])
        check_bytes(results)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_eight_ranks_with_fewer_rows_than_the_width(rank_pools, layout):
    """Two rows a rank: what stands before a piece comes from up to four ranks."""
    ids = [1] * 3 + [2] * 12 + [3]
    results = rank_pools(8).run(run, ids, layout=layout, width=8)
    rank_pools(8).close()
    check(results, ids, width=8)
    check_bytes(results)


def exact(ids):
    """Float32 rows of small integers and no SiLU: nothing rounds, so nothing may differ."""
    cp = ContextParallel(dist.group.WORLD)
    plan = cp.plan(doc_ids=ids, tokens=len(ids))
    x, weight, bias, dy = (t.mul(4).round() for t in inputs(len(ids)))
    alone = x.clone().requires_grad_()
    whole = amc.ops.causal_conv1d(alone, weight, bias=bias, activation=None, doc_ids=torch.tensor(ids))[0]
    whole.backward(dy)
    local = cp.shard(x, plan).requires_grad_()
    out = amc.parallel.causal_conv1d(local, weight, plan, bias=bias, activation=None)
    out.backward(cp.shard(dy, plan))
    return torch.equal(cp.gather(out, plan), whole) and torch.equal(cp.gather(local.grad, plan), alone.grad)


def test_one_to_three_tokens_a_rank_are_exact(rank_pools):
    for ids in ([1] * 8, [1] * 3 + [2] * 5, [1, 2, 3, 3, 4, 4, 4]):
        assert all(rank_pools(4).run(exact, ids))


def recomputed(ids):
    """(out, gradients, exchanges) of a checkpointed convolution and of a plain one."""
    cp = ContextParallel(dist.group.WORLD)
    plan = cp.plan(doc_ids=ids, tokens=len(ids))
    x, weight, bias, dy = inputs(len(ids))
    local, found = cp.shard(x, plan), []
    for context in (None, checkpoint_context_fn):
        before = wire.exchanges
        leaf, w = local.clone().requires_grad_(), weight.clone().requires_grad_()

        def layer(x, w=w):
            return amc.parallel.causal_conv1d(torch.sin(x), w, plan, bias=bias)

        out = layer(leaf) if context is None else checkpoint(layer, leaf, use_reentrant=False, context_fn=context)
        out.backward(cp.shard(dy, plan))
        found.append((out.detach(), leaf.grad, w.grad, wire.exchanges - before))
    return found


def test_recomputation_moves_no_rows(ranks):
    for plain, again in ranks.run(recomputed, PACKS["straddling"]):
        assert all(torch.equal(a, b) for a, b in zip(plain[:3], again[:3], strict=True))
        assert plain[3] == again[3] == 2


def exchanges_of(ids, layout):
    cp = ContextParallel(dist.group.WORLD)
    plan = cp.plan(doc_ids=ids, tokens=len(ids), layout=layout)
    x, weight, bias, _ = inputs(len(ids))
    before = wire.exchanges
    amc.parallel.causal_conv1d(cp.shard(x, plan).requires_grad_(), weight, plan, bias=bias).sum().backward()
    return wire.exchanges - before


def test_nothing_is_sent_when_no_document_straddles(ranks):
    inside = [1] * 12 + [2] * 12 + [3] * 12 + [4] * 12
    for layout in LAYOUTS:
        assert ranks.run(exchanges_of, inside, layout) == [0, 0]
        assert ranks.run(exchanges_of, PACKS["one"], layout) == [2, 2]


def layer_of_a_net(ids, layout):
    """Convolution and delta rule as in a layer, with gradients of replicated weights summed over the ranks."""
    cp = ContextParallel(dist.group.WORLD if layout else None)
    plan = cp.plan(doc_ids=ids, tokens=len(ids), layout=layout or "contiguous")
    x, weight, _, _ = inputs(len(ids), channels=64)
    leaves = [cp.shard(x, plan).requires_grad_(), weight.requires_grad_(), (torch.eye(64) / 2).requires_grad_()]
    mixed = amc.parallel.causal_conv1d(leaves[0] @ leaves[2], leaves[1], plan)
    q, k, v = (part.unflatten(1, (-1, 16)) for part in mixed.split((16, 16, 32), dim=1))
    g, beta = -v.square().sum(2), torch.sigmoid(v.sum(2))
    o = amc.parallel.gated_delta_rule(q, k, v, g, beta, plan)
    loss = (o.square().sum((1, 2)) * cp.shard(torch.ones(len(ids)), plan)).sum() / len(ids)
    loss.backward()
    parts = torch.cat([loss.detach().reshape(1), *(t.grad.flatten() for t in leaves[1:])])
    if layout:
        dist.all_reduce(parts)
    return cp.gather(o.detach(), plan), cp.gather(leaves[0].grad, plan), parts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_over_ranks_is_the_layer_on_one(rank_pools, layout):
    alone = layer_of_a_net(PACKS["straddling"], None)
    for found in rank_pools(3).run(layer_of_a_net, PACKS["straddling"], layout):
        for ours, one in zip(found, alone, strict=True):
            torch.testing.assert_close(ours, one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_rank_is_the_operator(layout):
    ids = PACKS["gaps"]
    cp = ContextParallel()
    plan = cp.plan(doc_ids=ids, layout=layout)
    x, weight, bias, _ = inputs(len(ids))
    bits = amc.ops.causal_conv1d(x, weight, bias=bias, doc_ids=torch.tensor(ids))[0]
    assert torch.equal(amc.parallel.causal_conv1d(x, weight, plan, bias=bias), bits)
    assert torch.equal(amc.parallel.causal_conv1d(cp.shard(x, plan), weight, plan, bias=bias)[: len(ids)], bits)


BAD = {
    "rows": (
        lambda x, w, b: (x[1:], w, b, "silu"),
        "ValueError: parallel.causal_conv1d: x has 11 rows, a rank holds 12",
    ),
    "kind": (lambda x, w, b: (x, None, b, "silu"), "TypeError: parallel.causal_conv1d: weight must be a torch tensor"),
    "axes": (
        lambda x, w, b: (x, w[0], b, "silu"),
        "ValueError: parallel.causal_conv1d: weight has 1 axes, 2 are needed",
    ),
    "empty": (lambda x, w, b: (x, w[:, :0], b, "silu"), "ValueError: parallel.causal_conv1d: weight has width 0"),
    "dtype": (lambda x, w, b: (x, w.double(), b, "silu"), "TypeError: causal_conv1d: weight is float64"),
    "bias": (lambda x, w, b: (x, w, b[1:], "silu"), "ValueError: causal_conv1d: bias has "),
    "activation": (lambda x, w, b: (x, w, b, "relu"), "ValueError: causal_conv1d: activation is 'relu'"),
}


def bad_arguments(ranks_with_it, cases):
    """What each case raised on this rank; the group still works where all failed alike."""
    world = dist.get_world_size()
    cp, tokens = ContextParallel(dist.new_group(list(range(world)))), 12 * world
    plan = cp.plan(tokens=tokens)
    x, weight, bias, _ = inputs(tokens)
    good, found = (cp.shard(x, plan), weight, bias), []
    for case in cases:
        x, w, b, activation = BAD[case][0](*good) if dist.get_rank() in ranks_with_it else (*good, "silu")
        try:
            amc.parallel.causal_conv1d(x, w, plan, bias=b, activation=activation)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    if len(ranks_with_it) == world:
        amc.parallel.causal_conv1d(good[0], weight, plan, bias=bias)
    return found


@pytest.mark.parametrize("case", ["rows", "bias"])
def test_a_bad_argument_on_one_rank_raises_on_all(rank_pools, case):
    found = rank_pools(3).run(bad_arguments, [1], [case])
    rank_pools(3).close()
    words = BAD[case][1]
    for rank, (text,) in enumerate(found):
        assert text.startswith(words) if rank == 1 else text.startswith(RankFailure.__name__) and words in text


def test_bad_arguments_on_every_rank(ranks):
    for found in ranks.run(bad_arguments, [0, 1], list(BAD)):
        for text, (_, words) in zip(found, BAD.values(), strict=True):
            assert text.startswith(words)


def test_the_plan_must_be_one():
    with pytest.raises(TypeError, match="not list"):
        amc.parallel.causal_conv1d(torch.zeros(4, 8), torch.zeros(8, 4), [0, 4])
