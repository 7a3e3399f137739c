"""Context parallelism beyond one pass: dtypes and head shapes, meshes, two forwards, recomputation, and failures."""

import time

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import automodel_c as amc
from automodel_c.parallel import ContextParallel, RankFailure, checkpoint_context_fn, faults, wire
from automodel_c.parallel import attention as cp_attention
from tests.parallel import context_worker as worker
from tests.parallel.context_worker import PACKS
from tests.parallel.test_context_parallel import check, check_bytes

SHAPES = [
    pytest.param(torch.float32, (6, 2), 32, id="fp32-three-to-one"),
    pytest.param(torch.bfloat16, (4, 4), 64, id="bf16-equal-heads"),
    pytest.param(torch.bfloat16, (8, 1), 16, id="bf16-one-key-head"),
]
GROUPS = [
    *SHAPES,
    pytest.param(torch.float32, (8, 4), 16, id="fp32-a-key-head-a-rank"),
    pytest.param(torch.bfloat16, (16, 2), 32, id="bf16-two-ranks-a-key-head"),
    pytest.param(torch.float32, (9, 3), 16, id="fp32-groups-across-key-heads"),
    pytest.param(torch.float32, (3, 3), 16, id="fp32-less-heads-than-ranks"),
    pytest.param(torch.float32, (1, 1), 16, id="fp32-one-head"),
]


@pytest.mark.parametrize("layout", ["contiguous", "round_robin"])
@pytest.mark.parametrize(("dtype", "heads", "dim"), GROUPS)
def test_groups_of_heads_over_four_ranks(rank_pools, dtype, heads, dim, layout):
    """Heads a multiple of the ranks or not, key heads more than ranks or less."""
    for name in ("one", "uneven"):
        options = {"heads": heads, "dim": dim, "seed": 5}
        results = rank_pools(4).run(
            worker.run, PACKS[name], dtype, scheme="heads", layout=layout, poison=True, **options
        )
        check(results, PACKS[name], dtype, **options)
        check_bytes(results)
        assert results[0][4] > 0, "heads were split"


def group_bytes(ids, heads):
    """Bytes sent forward under either scheme, as counted."""
    return [worker.run(ids, torch.float32, scheme=scheme, heads=heads)[1][0] for scheme in ("heads", "balanced")]


def test_bytes_of_groups_of_heads(rank_pools):
    """64 rows a rank, 8 heads over 2: a rank sends 6 query heads, 3 times keys and values of one head, and 6 heads of
    outputs; where there are as many key heads, less than rows that migrate."""
    found = rank_pools(4).run(group_bytes, [1] * 256, (8, 2))
    row = 64 * worker.DIM * 4
    assert [heads for heads, _ in found] == [row * (6 + 2 * 3 + 6)] * 4
    found = rank_pools(4).run(group_bytes, [1] * 256, (8, 8))
    assert sum(heads for heads, _ in found) < sum(balanced for _, balanced in found)


@pytest.mark.parametrize(("dtype", "heads", "dim"), SHAPES)
def test_dtypes_and_heads(ranks, dtype, heads, dim):
    for scheme in ("home", "balanced", "heads"):
        options = {"heads": heads, "dim": dim, "seed": 3}
        results = ranks.run(worker.run, PACKS["uneven"], dtype, scheme=scheme, poison=True, **options)
        check(results, PACKS["uneven"], dtype, **options)
        check_bytes(results)


def packed(*lengths, padding=0):
    return [n for n, length in enumerate(lengths, 1) for _ in range(length)] + [0] * padding


PUBLISHED = {
    "three-and-padding": (2, packed(100, 80, 44, padding=32), (8, 4), 64),
    "one-and-padding": (2, packed(120, padding=136), (8, 4), 64),
    "one": (2, packed(256), (8, 4), 64),
    "equal-heads": (4, packed(40, 30, 25, padding=33), (8, 8), 16),
    "no-padding": (4, packed(50, 40, 38), (8, 2), 16),
    "groups": (4, packed(50, 40, 20, padding=18), (8, 2), 16),
    "long-first": (4, packed(70, 20, 20, padding=18), (8, 8), 16),
    "large-heads": (4, packed(20, 10, padding=34), (16, 2), 256),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_packs_of_another_implementation(rank_pools, name):
    world, ids, heads, dim = PUBLISHED[name]
    results = rank_pools(world).run(worker.run, ids, heads=heads, dim=dim, poison=True)
    check(results, ids, heads=heads, dim=dim)
    check_bytes(results)


LONG = [1] * 200 + [2] * 3  # every rank needs keys of all before it
EIGHT = [
    *((scheme, ids, (4, 2)) for scheme in ("home", "balanced", "heads", "auto") for ids in (LONG, PACKS["uneven"])),
    *(("heads", LONG, heads) for heads in ((8, 2), (16, 8), (9, 3), (24, 4))),
    ("heads", PACKS["padding-only-ranks"], (8, 4)),
    ("heads", PACKS["inside"], (8, 4)),
]


@pytest.mark.parametrize("layout", ["contiguous", "round_robin"])
def test_eight_ranks(rank_pools, layout):
    """Rows migrate, or heads do: as many as ranks, more, less, and numbers that ranks do not divide."""
    for scheme, ids, heads in EIGHT:
        for causal in (True, False):
            results = rank_pools(8).run(
                worker.run, ids, scheme=scheme, layout=layout, heads=heads, causal=causal, poison=True
            )
            check(results, ids, heads=heads, causal=causal)
            check_bytes(results)
            if ids is LONG and scheme in ("balanced", "heads"):
                assert results[0][4] > 0 or (scheme, layout) == ("balanced", "round_robin") or not causal
    rank_pools(8).close()


@pytest.mark.parametrize("scheme", ["balanced", "heads"])
@pytest.mark.parametrize("name", ["straddling", "uneven"])
def test_mesh_of_two_by_two(rank_pools, name, scheme):
    """The group given is the group used: each half of four ranks holds the whole pack."""
    results = rank_pools(4).run(worker.run, PACKS[name], group="cp", scheme=scheme)
    check(results, PACKS[name])
    check_bytes(results[:2])
    check_bytes(results[2:])


def ids_of_the_group():
    cp, world = ContextParallel(worker.groups("cp")), ContextParallel(dist.group.WORLD)
    alone = ContextParallel(), ContextParallel(None)
    return cp.ranks, cp.rank, world.ranks, [a.ranks for a in alone]


def test_none_is_one_rank_never_the_world(rank_pools):
    assert rank_pools(4).run(ids_of_the_group) == [(2, r % 2, 4, [1, 1]) for r in range(4)]


def two_forwards(first, second, scheme):
    """Two plans alive at once, backwards in the other order than the forwards."""
    cp = ContextParallel(dist.group.WORLD)
    outs, leaves, plans, upstream = [], [], [], []
    for seed, ids in enumerate((first, second)):
        plan = cp.plan(doc_ids=ids, scheme=scheme)
        local = [cp.shard(x, plan) for x in worker.inputs(len(ids), seed=seed)]
        leaf = [x.requires_grad_() for x in local[:3]]
        outs.append(cp_attention(*leaf, plan))
        leaves.append(leaf)
        plans.append(plan)
        upstream.append(local[3])
    outs[0].backward(upstream[0])
    outs[1].backward(upstream[1])
    return [[cp.gather(x, p) for x in (o.detach(), *(t.grad for t in leaf))]
            for o, leaf, p in zip(outs, leaves, plans, strict=True)]  # fmt: skip


@pytest.mark.parametrize("scheme", ["balanced", "heads"])
def test_two_forwards_before_a_backward(ranks, scheme):
    packs = PACKS["uneven"], PACKS["straddling"]
    results = ranks.run(two_forwards, *packs, scheme)
    for seed, ids in enumerate(packs):
        check([(r[seed],) for r in results], ids, seed=seed)


def recomputed(ids, scheme):
    """out, gradient, bytes and exchanges of two layers: plain, checkpointed with what came in kept, and without."""
    cp = ContextParallel(dist.group.WORLD)
    plan = cp.plan(doc_ids=ids, scheme=scheme)
    x, _, _, dout = (cp.shard(t, plan) for t in worker.inputs(len(ids), heads=(4, 4)))
    weights = [torch.randn(16, 16, generator=torch.Generator().manual_seed(i)) / 4 for i in range(3)]
    projections = []

    def layer(x):
        projections.append(None)
        q, k, v = (torch.tanh(x @ w) for w in weights)
        return x + cp_attention(q, k, v, plan)

    def kept(x):
        return checkpoint(layer, x, use_reentrant=False, context_fn=checkpoint_context_fn)

    def dropped(x):
        return checkpoint(layer, x, use_reentrant=False)

    found = []
    for run in (layer, kept, dropped):
        before = wire.sent, wire.exchanges
        leaf = x.clone().requires_grad_()
        out = run(run(leaf))
        out.backward(dout)
        found.append((out.detach(), leaf.grad, wire.sent - before[0], wire.exchanges - before[1]))
    return found, len(projections)


@pytest.mark.parametrize("scheme", ["balanced", "heads"])
def test_recomputation_moves_no_rows(ranks, scheme):
    for found, layers in ranks.run(recomputed, PACKS["uneven"], scheme):
        (out, grad, sent, exchanges), *others = found
        for other in others:
            assert torch.equal(out, other[0]) and torch.equal(grad, other[1])
        kept, dropped = others
        assert kept[2:] == (sent, exchanges) and sent > 0 and exchanges == 2 * 2 * 3
        assert dropped[3] == exchanges + 2 * 3, "the plain checkpoint asks for the rows again"
        assert layers == 2 + 4 + 4, "both checkpoints did recompute"


def repeated(ids, scheme):
    """The bits of two runs, with one thread of the extension and with three."""
    found = []
    for threads in (1, 3):
        amc._amcore.set_num_threads(threads)
        found.append(worker.run(ids, torch.bfloat16, scheme=scheme)[0])
    amc._amcore.set_num_threads(1)
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("scheme", ["balanced", "heads"])
def test_same_bits_for_any_thread_count(rank_pools, scheme):
    assert all(rank_pools(3).run(repeated, PACKS["uneven"], scheme))


def losses(ids, ranks, scheme):
    """One layer's gradient of a replicated weight, summed over the ranks; the loss as parts that sum (C1)."""
    cp = ContextParallel(dist.group.WORLD if ranks > 1 else None)
    plan = cp.plan(doc_ids=ids, scheme=scheme)
    x = cp.shard(worker.inputs(len(ids), heads=(4, 4))[0].double().float(), plan)
    weight = torch.eye(16).mul(0.5).requires_grad_()
    y = cp_attention(x @ weight, x, x, plan)
    loss = (y.square().sum(-1) * cp.shard(torch.ones(len(ids), 1), plan)).sum() / len(ids)
    loss.backward()
    parts = torch.cat([loss.detach().reshape(1), weight.grad.flatten()])
    if ranks > 1:
        dist.all_reduce(parts)
    return parts


@pytest.mark.parametrize("scheme", ["balanced", "heads"])
def test_losses_and_gradients_do_not_scale_with_the_ranks(ranks, scheme):
    alone = losses(PACKS["straddling"], 1, scheme)
    for parts in ranks.run(losses, PACKS["straddling"], 2, scheme):
        torch.testing.assert_close(parts, alone, rtol=1e-5, atol=1e-6)


BAD = {
    "rows": (lambda q, k, v: (q, k[1:], v), "ValueError: parallel.attention: k has 11 rows, a rank holds 12"),
    "dtype": (lambda q, k, v: (q, k, v.double()), "TypeError: parallel.attention: v is torch.float64"),
    "dim": (lambda q, k, v: (q, k[..., :8], v[..., :8]), "ValueError: parallel.attention: v is [12, 2, 8]"),
    "kind": (lambda q, k, v: (q, None, v), "TypeError: parallel.attention: k must be a torch tensor, not NoneType"),
    "plan": (None, "ValueError: plan: doc_ids has "),
    "shard": (None, "ValueError: shard: x has 23 rows, the plan has "),
}


def bad_on_one(culprit, case, guarded, scheme="balanced"):
    """What each rank raised, after how long; one has the bad argument, after a call that went well."""
    world = dist.get_world_size()
    cp, tokens = ContextParallel(dist.new_group(list(range(world)))), 12 * world
    plan = cp.plan(tokens=tokens, scheme=scheme)
    q, k, v = (cp.shard(x, plan) for x in worker.inputs(tokens)[:3])
    cp_attention(q, k, v, plan)
    began = time.monotonic()

    def body():
        if dist.get_rank() == culprit:
            if case == "plan":
                cp.plan(doc_ids=[1] * (tokens - 1), tokens=tokens)
            if case == "shard":
                cp.shard(torch.zeros(tokens - 1), plan)
            cp_attention(*BAD[case][0](q, k, v), plan)
        cp_attention(q, k, v, plan)

    try:
        if guarded:
            with faults.guard():
                body()
        else:
            body()
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "rank", None), time.monotonic() - began
    return None


@pytest.mark.parametrize("guarded", [False, True], ids=["bare", "guarded"])
@pytest.mark.parametrize(
    ("culprit", "case", "scheme"), [(1, "rows", "balanced"), (0, "plan", "balanced"), (2, "dtype", "heads")]
)
def test_a_bad_argument_on_one_rank_raises_on_all(rank_pools, culprit, case, scheme, guarded):
    found = rank_pools(3).run(bad_on_one, culprit, case, guarded, scheme)
    rank_pools(3).close()
    for rank, (name, text, named, took) in enumerate(found):
        assert took < 30
        if rank == culprit:
            assert f"{name}: {text}".startswith(BAD[case][1])
        else:
            assert (name, named) == (RankFailure.__name__, culprit) and BAD[case][1] in text


def bad_on_every_rank():
    """All fail alike, and the group still works."""
    cp = ContextParallel(dist.group.WORLD)
    plan = cp.plan(tokens=24)
    q, k, v = (cp.shard(x, plan) for x in worker.inputs(24)[:3])
    found = []
    for case, (change, words) in BAD.items():
        try:
            if case == "plan":
                cp.plan(doc_ids=[1] * 23, tokens=24)
            elif case == "shard":
                cp.shard(torch.zeros(23), plan)
            else:
                cp_attention(*change(q, k, v), plan)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}".startswith(words))
        time.sleep(0.8 * dist.get_rank())  # long enough for the other rank to look for a note
        cp_attention(q, k, v, plan)
    return found


def test_errors_alike_on_all_ranks_leave_the_group_usable(ranks):
    assert ranks.run(bad_on_every_rank) == [[True] * len(BAD)] * 2
