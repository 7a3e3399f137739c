"""The gated delta rule over ranks beyond one pass: shapes, gates, many ranks, recomputation, odd losses, failures."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import automodel_c as amc
from automodel_c.parallel import ContextParallel, RankFailure, checkpoint_context_fn, wire
from automodel_c.reference.gdn import gated_delta_rule as reference
from tests.numerics import assert_as_good_as
from tests.parallel import gdn_worker as worker
from tests.parallel.context_worker import groups
from tests.parallel.gdn_worker import PACKS
from tests.parallel.test_context_gdn import BF16, F32, NAMES, check, check_bytes

LAYOUTS = ("contiguous", "round_robin")
SHAPES = {
    "fp32-three-to-one": {"heads": (2, 6), "dims": (32, 8)},
    "fp32-two-heads": {"heads": (2, 2), "dims": (16, 16)},
    "bf16-beta-fp32": {"dtype": BF16, "beta_dtype": F32},
    "bf16-128": {"dtype": BF16, "heads": (1, 2), "dims": (128, 128)},
    "two-calls": {"heads": (1, 2), "dims": (136, 128)},
    "gates-of-50": {"gate": 50.0},
    "gates-of-90-bf16": {"dtype": BF16, "gate": 90.0},
    "slow-gates": {"gate": 0.01},
    "plain-keys": {"key": 0.2, "options": {"scale": 0.3, "qk_l2norm": False}},
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shapes_and_gates(rank_pools, layout, name):
    ids = [1] * 5 + [2] * 100 + [3] * 5
    results = rank_pools(3).run(worker.run, ids, layout=layout, seed=5, **SHAPES[name])
    check(results, ids, seed=5, **SHAPES[name])
    check_bytes(results)


def test_two_ranks_with_many_heads(ranks):
    """32 tokens in documents of 7, 11 and 14, the layer's own heads."""
    ids, options = [1] * 7 + [2] * 11 + [3] * 14, {"dtype": BF16, "heads": (16, 32), "dims": (128, 128)}
    results = ranks.run(worker.run, ids, **options)
    check(results, ids, **options)
    check_bytes(results)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_eight_ranks(rank_pools, layout):
    """One document goes through up to fourteen spans; its state is put together of all before."""
    ids = [1] * 3 + [2] * 200 + [3] * 3
    results = rank_pools(8).run(worker.run, ids, layout=layout, gate=0.05)
    rank_pools(8).close()
    check(results, ids, gate=0.05)
    check_bytes(results)


@pytest.mark.parametrize("through", [1, 4])
def test_reference_states_compose(seed, through):
    """What a rank sends, in float64: transition and own state of each part give the state of the whole."""
    inputs = [x.double() for x in worker.inputs(30 * (through + 2), heads=(1, 2), dims=(8, 16))[:5]]
    start = torch.eye(8, dtype=torch.float64).expand(1, 2, 8, 8)
    total = torch.zeros(2, 8, 16, dtype=torch.float64)
    for part in range(through + 2):
        q, k, v, g, beta = (x[30 * part : 30 * part + 30] for x in inputs)
        state = reference(q, k, v, g, beta, [(0, 30)])[1][0]
        transition = reference(q, k, torch.zeros_like(k).repeat(1, 2, 1), g, beta, [(0, 30)], initial_state=start)[1][0]
        total = transition @ total + state
    whole = reference(*inputs, [(0, len(inputs[0]))])[1][0]
    assert (total - whole).abs().max() < 1e-14


def forward(seed, ids, layout="contiguous", group=None):
    cp = ContextParallel(group or dist.group.WORLD)
    plan = cp.plan(doc_ids=ids, tokens=len(ids), layout=layout)
    *leaves, dout = (cp.shard(x, plan) for x in worker.inputs(len(ids), seed=seed))
    leaves = [x.requires_grad_() for x in leaves]
    return cp, plan, leaves, dout, amc.parallel.gated_delta_rule(*leaves, plan)


def two_forwards(first, second):
    """Two plans alive at once, backwards in the other order than autograd's own."""
    made = [forward(seed, ids) for seed, ids in enumerate((first, second))]
    for _, _, _, dout, out in made:
        out.backward(dout)
    return [[cp.gather(x, plan) for x in (out.detach(), *(t.grad for t in leaves))]
            for cp, plan, leaves, _, out in made]  # fmt: skip


def test_two_forwards_before_a_backward(rank_pools):
    packs = PACKS["straddling"], PACKS["one"]
    results = rank_pools(3).run(two_forwards, *packs)
    for seed, ids in enumerate(packs):
        check([(r[seed],) for r in results], ids, seed=seed)


def summed_losses(first, second):
    """One backward through two forwards: the collectives of both come in one order on all ranks."""
    made = [forward(seed, ids, layout) for seed, (ids, layout) in enumerate(zip((first, second), LAYOUTS, strict=True))]
    torch.autograd.backward([out for *_, out in made], [dout for *_, dout, _ in made])
    return [[cp.gather(x, plan) for x in (out.detach(), *(t.grad for t in leaves))]
            for cp, plan, leaves, _, out in made]  # fmt: skip


def test_one_backward_of_two_forwards(rank_pools):
    packs = PACKS["goes-on-into-padding"], PACKS["straddling"]
    results = rank_pools(4).run(summed_losses, *packs)
    for seed, ids in enumerate(packs):
        check([(r[seed],) for r in results], ids, seed=seed)


def one_rank_reads(ids, reader):
    """The loss is of one rank's rows; the others' losses read none of theirs, and their backward runs all the same."""
    cp, plan, leaves, dout, out = forward(2, ids)
    mine = dist.get_rank() == reader
    ((out * dout).sum() if mine else out[:0].sum()).backward()
    return [cp.gather(x, plan) for x in (out.detach(), *(t.grad for t in leaves))]


@pytest.mark.parametrize("reader", [0, 2, 3])
def test_a_loss_of_one_ranks_rows(rank_pools, reader):
    ids = PACKS["one"] + [2] * 6
    results = rank_pools(4).run(one_rank_reads, ids, reader)
    local = (len(ids) + 7) // 8 * 2
    rows = slice(reader * local, (reader + 1) * local)
    docs, (*leaves, dout) = [(0, 41), (41, 47)], worker.inputs(len(ids), seed=2)
    read = torch.zeros_like(dout)
    read[rows] = dout[rows]
    wide = [x.double().requires_grad_() for x in leaves]
    truth = torch.autograd.grad(reference(*wide, docs)[0], wide, read.double(), allow_unused=True)
    narrow = [x.requires_grad_() for x in leaves]
    alone = torch.autograd.grad(reference(*narrow, docs)[0], narrow, read, allow_unused=True)
    for found in results:
        for name, ours, naive, true in zip(NAMES[1:], found[1:], alone, truth, strict=True):
            assert_as_good_as(ours, naive, true, name=name)


def recomputed(ids, layout):
    """(out, gradient, bytes, exchanges) of two layers, plain and with each checkpointed; how often a layer ran."""
    cp = ContextParallel(dist.group.WORLD)
    plan = cp.plan(doc_ids=ids, tokens=len(ids), layout=layout)
    _, _, x, g, beta, dout = (cp.shard(t, plan) for t in worker.inputs(len(ids), heads=(4, 4), dims=(16, 16)))
    weights = [torch.randn(16, 16, generator=torch.Generator().manual_seed(i)) / 4 for i in range(3)]
    calls = []

    def layer(x):
        calls.append(None)
        q, k, v = (torch.tanh(x @ w) for w in weights)
        return x + amc.parallel.gated_delta_rule(q, k, v, g, beta, plan)

    def kept(x):
        return checkpoint(layer, x, use_reentrant=False, context_fn=checkpoint_context_fn)

    found = []
    for run in (layer, kept):
        before = wire.sent, wire.exchanges
        leaf = x.clone().requires_grad_()
        out = run(run(leaf))
        out.backward(dout)
        found.append((out.detach(), leaf.grad, wire.sent - before[0], wire.exchanges - before[1]))
    return found, len(calls)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_recomputation_moves_no_states(rank_pools, layout):
    results = rank_pools(3).run(recomputed, PACKS["straddling"], layout)
    for found, layers in results:
        (out, grad, sent, exchanges), (out_again, grad_again, sent_again, exchanges_again) = found
        assert torch.equal(out, out_again) and torch.equal(grad, grad_again)
        assert sent == sent_again and exchanges == exchanges_again == 2 * 2
        assert layers == 2 + 2 + 2  # plain, checkpointed, and again in its backward: it did recompute
    assert sum(found[0][2] for found, _ in results) > 0


def exchanges_of(ids, layout):
    before = wire.exchanges
    *_, dout, out = forward(0, ids, layout)
    out.backward(dout)
    return wire.exchanges - before


def test_nothing_is_sent_when_no_document_straddles(ranks):
    inside = [1] * 12 + [2] * 12 + [3] * 12 + [4] * 12
    for layout in LAYOUTS:
        assert ranks.run(exchanges_of, inside, layout) == [0, 0]
        assert ranks.run(exchanges_of, PACKS["one"], layout) == [2, 2]


def in_a_mesh(ids):
    cp, plan, leaves, dout, out = forward(0, ids, group=groups("cp"))
    out.backward(dout)
    return [cp.gather(x, plan) for x in (out.detach(), *(t.grad for t in leaves))]


def test_mesh_of_two_by_two(rank_pools):
    check([(r,) for r in rank_pools(4).run(in_a_mesh, PACKS["straddling"])], PACKS["straddling"])


def repeated(ids):
    """The bits of two runs, with one thread of the extension and with three."""
    found = []
    for threads in (1, 3):
        amc._amcore.set_num_threads(threads)
        found.append(worker.run(ids, BF16)[0])
    amc._amcore.set_num_threads(1)
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_same_bits_for_any_thread_count(rank_pools):
    assert all(rank_pools(3).run(repeated, PACKS["chunks"]))


def under_autocast(ids):
    """Whether autocast leaves every bit alone."""
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            _, _, leaves, dout, out = forward(0, ids)
        out.backward(dout)
        found.append([out.detach(), *(x.grad for x in leaves)])
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_autocast_does_not_round_states(rank_pools):
    assert all(rank_pools(4).run(under_autocast, PACKS["one"]))


def other_contents(ids, changed):
    """Whether the rows of all documents but one keep their bits when that one's contents change."""
    cp = ContextParallel(dist.group.WORLD)
    plan = cp.plan(doc_ids=ids, tokens=len(ids))
    mask = torch.tensor(ids) == changed
    found = []
    for seed in (0, 1):
        whole, other = worker.inputs(len(ids), seed=0), worker.inputs(len(ids), seed=seed)
        for x, y in zip(whole, other, strict=True):
            x[mask] = y[mask]
        *leaves, dout = (cp.shard(x, plan) for x in whole)
        leaves = [x.requires_grad_() for x in leaves]
        out = amc.parallel.gated_delta_rule(*leaves, plan)
        out.backward(dout)
        found.append([cp.gather(x, plan) for x in (out.detach(), *(t.grad for t in leaves))])
    return all(torch.equal(a[~mask], b[~mask]) and not torch.equal(a[mask], b[mask])
               for a, b in zip(*found, strict=True))  # fmt: skip


def test_documents_do_not_leak(rank_pools):
    for changed in (2, 4):
        assert all(rank_pools(3).run(other_contents, PACKS["straddling"], changed))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_rank_is_the_operator(layout):
    ids = PACKS["gaps"]
    cp = ContextParallel()
    plan = cp.plan(doc_ids=ids, layout=layout)
    whole = worker.inputs(len(ids))[:5]
    expected_bits = amc.ops.gated_delta_rule(*whole, doc_ids=torch.tensor(ids))[0]
    assert torch.equal(amc.parallel.gated_delta_rule(*whole, plan), expected_bits)
    local = [cp.shard(x, plan) for x in whole]
    assert torch.equal(amc.parallel.gated_delta_rule(*local, plan)[: len(ids)], expected_bits)


BAD = {
    "rows": (lambda q, k, v, g, b: (q, k[1:], v, g, b), "ValueError: parallel.gated_delta_rule: k has 11 rows, a rank"),
    "kind": (
        lambda q, k, v, g, b: (q, k, v, g, None),
        "TypeError: parallel.gated_delta_rule: beta must be a torch ten",
    ),
    "axes": (lambda q, k, v, g, b: (q, k, v, g[0], b), "ValueError: parallel.gated_delta_rule: g has 1 axes, 2 are"),
    "dtype": (lambda q, k, v, g, b: (q, k, v, g.bfloat16(), b), "TypeError: gated_delta_rule: g is bfloat16, float32"),
    "heads": (
        lambda q, k, v, g, b: (q, k, v[:, :3], g[:, :3], b[:, :3]),
        "ValueError: gated_delta_rule: 3 value heads",
    ),
    "dim": (
        lambda q, k, v, g, b: (q[..., :12], k[..., :12], v, g, b),
        "NotImplementedError: gated_delta_rule: key dim",
    ),
}


def bad_arguments(ranks_with_it, cases):
    """What each case raised on this rank, and whether the group still works at the end (where all failed alike)."""
    world = dist.get_world_size()
    cp, tokens = ContextParallel(dist.new_group(list(range(world)))), 12 * world
    plan = cp.plan(tokens=tokens)
    tensors = [cp.shard(x, plan) for x in worker.inputs(tokens)[:5]]
    found = []
    for case in cases:
        bad = BAD[case][0](*tensors) if dist.get_rank() in ranks_with_it else tensors
        try:
            amc.parallel.gated_delta_rule(*bad, plan)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    if len(ranks_with_it) == world:
        amc.parallel.gated_delta_rule(*tensors, plan)
    return found


@pytest.mark.parametrize("case", ["rows", "dtype"])
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
        amc.parallel.gated_delta_rule(*worker.inputs(4)[:5], [0, 4])
