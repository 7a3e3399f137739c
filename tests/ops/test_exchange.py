"""Planning and moving rows: the planner by its laws, the movers against the reference."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from automodel_c import _amcore, docs_from_ids
from automodel_c.reference import exchange as reference
from tests.numerics import assert_as_good_as
from tests.strategies import doc_ids, with_layout

PRICES = [1e-6, 1e-4, 1e-5, 1e-4]
LAYOUTS = {"contiguous": lambda r: list(range(r)), "round_robin": lambda r: [*range(r), *reversed(range(r))]}


def plan_of(docs, ranks, layout="contiguous", scheme="auto", causal=True, prices=PRICES, tokens=None, heads=(1, 1)):
    """(docs [N, 2], owners, padded tokens, tasks, keys, queries, tried, chosen)"""
    docs = np.asarray(docs, dtype=np.int64).reshape(-1, 2)
    tokens = int(docs[-1, 1]) if tokens is None and len(docs) else tokens or 0
    padded, owners = -(-tokens // (2 * ranks)) * 2 * ranks, LAYOUTS[layout](ranks)
    options = {"tokens": padded, "ranks": ranks, "prices": prices, "scheme": scheme, "causal": causal}
    options |= {"heads": heads[0], "kv_heads": heads[1]}
    return docs, owners, padded, *_amcore.exchange_plan(docs.flatten(), owners, **options)


def places(rows, head, some, of):
    return [row * of + h for row in rows for h in range(head, head + some)]


def check_laws(docs, owners, padded, tasks, keys, queries, ranks, causal, heads=(1, 1)):
    """A head of a real row is computed once; every task finds its queries and keys in place; nothing comes twice."""
    (n, n_kv), shards = heads, reference.rows_of_ranks(owners, padded, ranks)
    computed = sorted(at for t in tasks for at in places(range(t[2], t[3]), t[8], t[9], n))
    assert computed == [at for start, stop in docs for at in places(range(start, stop), 0, n, n)]
    order = tasks[:, [0, 2, 8]].tolist()
    assert order == sorted(order)
    needed = [reference.needed_keys(docs, tasks, r, causal, n, n_kv) for r in range(ranks)]
    key_rows = reference.deliver(shards, keys, [len(some) for some in needed], n_kv)
    sizes = [sum(int((t[3] - t[2]) * t[9]) for t in tasks if t[0] == r) for r in range(ranks)]
    query_rows = reference.deliver(shards, queries, sizes, n)
    for task in tasks:
        rank, doc, begin, end, _, query_at, key_at, n_keys, head, some = task
        start, stop = docs[doc]
        assert start <= begin < end <= stop and n_keys == (end if causal else stop) - start
        assert some == n or (begin, end) == (start, stop), "a group of heads has all rows"
        want = places(range(begin, end), head, some, n)
        assert query_rows[rank][query_at : query_at + len(want)].tolist() == want
        read = reference.key_heads(task, n, n_kv)
        assert len(read) == 1 or (head % (n // n_kv) == 0 and some == len(read) * (n // n_kv))
        want = places(range(start, start + n_keys), read[0], len(read), n_kv)
        assert key_rows[rank][key_at : key_at + len(want)].tolist() == want
    assert all(set(rows.tolist()) == some for rows, some in zip(key_rows, needed, strict=True))
    rounds = [tuple(t[[0, 1, 4, 8]]) for t in tasks]
    assert len(set(rounds)) == len(rounds), "a document comes once in a part"
    for r in range(ranks):
        order = sorted((t for t in tasks if t[0] == r), key=lambda t: t[5])
        parts = [(t[9] < n, t[4], t[8], t[9]) for t in order]
        assert [p[:2] for p in parts] == sorted(p[:2] for p in parts), "query rows lie by round, groups behind"
        changes = [p for p, before in zip(parts, [None, *parts], strict=False) if p != before]
        assert len(changes) == len(set(changes)), "the tasks of a part lie together"


@given(
    ids=doc_ids(120),
    ranks=st.integers(1, 6),
    layout=st.sampled_from(list(LAYOUTS)),
    scheme=st.sampled_from(["home", "balanced", "heads", "auto"]),
    causal=st.booleans(),
    prices=st.sampled_from([PRICES, [0.0] * 4, [1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 1.0], [1.0, 0.0, 1.0, 0.0]]),
    heads=st.sampled_from([(1, 1), (4, 4), (6, 2), (8, 1), (7, 7), (12, 3)]),
)
def test_laws(ids, ranks, layout, scheme, causal, prices, heads):
    docs, owners, padded, tasks, keys, queries, tried, chosen = plan_of(
        docs_from_ids(ids), ranks, layout, scheme, causal, prices, len(ids), heads
    )
    check_laws(docs, owners, padded, tasks, keys, queries, ranks, causal, heads)
    split = set(tasks[tasks[:, 9] < heads[0]][:, 1].tolist())
    assert len(split) <= tried[chosen][2] and (tried[chosen][2] == 0 or scheme in ("heads", "auto"))
    assert all(len(holders(docs[doc], owners, padded)) > 1 for doc in split), "what lies on one rank stays there"
    if scheme != "heads":
        assert tried[chosen][1] == min(seconds for _, seconds, _ in tried)
    if scheme == "home":
        assert (queries[:, 0] == queries[:, 1]).all() and tried == ((math.inf, tried[0][1], 0),)


def holders(doc, owners, padded):
    chunk = padded // len(owners)
    return {owners[row // chunk] for row in range(*doc)}


def costs_of(docs, tasks, ranks, causal=True, heads=1):
    start, stop = docs[tasks[:, 1]].T
    rows = tasks[:, 3] - tasks[:, 2]
    scores = rows * ((tasks[:, 2] + tasks[:, 3] + 1) / 2 - start) if causal else rows * (stop - start)
    return np.bincount(tasks[:, 0], scores * tasks[:, 9] / heads, minlength=ranks)


def ends(lengths):
    stop = np.cumsum(np.asarray(lengths, dtype=np.int64))
    return np.stack([stop - lengths, stop], axis=1)


def heavy_tail(rng):
    return np.minimum(rng.pareto(1.1, 600) * 100 + 16, 60_000).astype(np.int64)


LARGE = {
    "one-128k": lambda rng: np.array([131_072]),
    "four-32k": lambda rng: np.array([32_768] * 4),
    "heavy-tail": heavy_tail,
    "thousand-short": lambda rng: rng.integers(16, 260, 1000),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("name", LARGE)
def test_balanced_is_within_five_percent_of_the_mean(rng, name, causal, layout):
    docs = ends(LARGE[name](rng))
    for ranks in range(2, 33):
        _, _, _, tasks, keys, *_ = plan_of(docs, ranks, layout, "balanced", causal)
        costs = costs_of(docs, tasks, ranks, causal)
        assert costs.max() <= 1.05 * costs.mean(), f"{ranks} ranks: {costs.max() / costs.mean()}"
        lengths = docs[:, 1] - docs[:, 0]
        whole = (lengths * (lengths + 1) / 2 if causal else lengths * lengths).sum()
        assert costs.sum() == whole
        assert tasks[:, 4].max() < 8, "few passes over a document's keys"
        pairs = keys[keys[:, 0] != keys[:, 1]]
        assert pairs[:, 4].sum() <= (ranks - 1) * docs[-1, 1], "never more than everything to everyone"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("heads", [(32, 2), (24, 4), (6, 6)], ids=str)
@pytest.mark.parametrize("name", LARGE)
def test_heads_are_as_even_as_heads_can_be(rng, name, heads, causal, layout):
    """Within 5 % of the mean, or what is above it is less than one head of one document."""
    docs = ends(LARGE[name](rng))
    lengths = docs[:, 1] - docs[:, 0]
    whole = lengths * (lengths + 1) / 2 if causal else lengths * lengths
    for ranks in (*range(2, 13), 16, 24, 31, 32):
        _, _, _, tasks, keys, *_ = plan_of(docs, ranks, layout, "heads", causal, heads=heads)
        costs = costs_of(docs, tasks, ranks, causal, heads[0])
        assert costs.sum() == pytest.approx(whole.sum(), rel=1e-12)
        split = np.unique(tasks[tasks[:, 9] < heads[0]][:, 1])
        one_head = whole[split].max(initial=0) / heads[0]
        assert costs.max() <= max(1.05 * costs.mean(), costs.mean() + one_head), f"{ranks} ranks"
        if name == "one-128k":
            assert costs.max() == pytest.approx(-(-heads[0] // ranks) * whole[0] / heads[0])
        pairs = keys[keys[:, 0] != keys[:, 1]]
        assert (pairs[:, 4] * pairs[:, 6]).sum() <= (ranks - 1) * docs[-1, 1] * heads[1]


def test_key_heads_go_to_the_ranks_that_read_them():
    """Four ranks, two of them to a key head: each gets one head of the rows that it lacks."""
    _, _, _, tasks, keys, queries, *_ = plan_of(ends([64]), 4, scheme="heads", heads=(8, 2))
    assert tasks[:, [0, 2, 3, 8, 9]].tolist() == [[r, 0, 64, 2 * r, 2] for r in range(4)]
    assert sorted(keys[:, [0, 1, 4, 5, 6]].tolist()) == [[s, d, 16, d // 2, 1] for s in range(4) for d in range(4)]
    assert sorted(queries[:, [0, 1, 4, 5, 6]].tolist()) == [[s, d, 16, 2 * d, 2] for s in range(4) for d in range(4)]


def test_heads_stay_with_the_ranks_that_hold_the_document():
    """Two documents on two ranks each: nothing crosses from one pair to the other."""
    _, _, _, tasks, keys, queries, *_ = plan_of(ends([64, 64]), 4, scheme="heads", heads=(8, 2))
    assert tasks[:, [0, 1, 9]].tolist() == [[0, 0, 4], [1, 0, 4], [2, 1, 4], [3, 1, 4]]
    for moves in (keys, queries):
        assert (moves[:, 0] // 2 == moves[:, 1] // 2).all()


def test_short_documents_stay_home_beside_split_ones():
    docs = ends([512, *[8] * 64])
    *_, tasks, keys, queries, tried, chosen = plan_of(docs, 4, scheme="heads", heads=(8, 8))
    assert tried[chosen][2] == 1 and set(tasks[tasks[:, 9] < 8][:, 1]) == {0}
    whole = tasks[tasks[:, 9] == 8]
    assert (whole[:, 0] == docs[whole[:, 1], 0] // 256).all(), "a rank holds 256 rows"
    away = queries[(queries[:, 0] != queries[:, 1])]
    assert (away[:, 6] < 8).all() and (keys[keys[:, 0] != keys[:, 1]][:, 6] < 8).all()


def test_costs_of_the_reference():
    docs = np.array([[2, 9]])
    task = np.array([[0, 0, 4, 7, 0, 0, 0, 5, 0, 1]])
    for causal in (True, False):
        assert costs_of(docs, task, 1, causal)[0] == reference.scores(docs, 0, 4, 7, causal)


def test_home_of_one_document_is_nearly_twice_the_mean():
    docs = ends([131_072])
    *_, tasks, _, _, _, _ = plan_of(docs, 32, scheme="home")
    costs = costs_of(docs, tasks, 32)
    assert costs.max() / costs.mean() == pytest.approx(2 - 1 / 32, rel=1e-3)


def test_short_documents_move_nothing():
    """Documents that end on edges: no row crosses, under every scheme."""
    for scheme in ("home", "balanced", "heads", "auto"):
        *_, keys, queries, _, _ = plan_of(ends([64] * 32), 8, scheme=scheme, heads=(8, 2))
        assert (keys[:, 0] == keys[:, 1]).all() and (queries[:, 0] == queries[:, 1]).all()


def test_auto_weighs_the_time_saved_against_the_traffic():
    docs = ends([4096])
    rows_cost = {}
    for wire in (1e-9, 1e-2):
        *_, queries, tried, chosen = plan_of(docs, 4, prices=[1e-6, wire, wire, wire])
        rows_cost[wire] = queries[queries[:, 0] != queries[:, 1]][:, 4].sum(), tried[chosen][0]
    assert rows_cost[1e-9][0] > 0 and rows_cost[1e-9][1] == pytest.approx(1.02)
    assert rows_cost[1e-2] == (0, math.inf)


@pytest.mark.parametrize(
    ("prices", "split"),
    [
        ([1e-6, 1e-7, 1e-3, 0.0], True),  # keys are dear: only the key heads that a rank reads travel
        ([1e-6, 1e-3, 1e-7, 0.0], False),  # queries are dear: of those fewer migrate than all but 1 / ranks
        ([1e-6, 1e-9, 1e-9, 10.0], False),  # everybody has a message for everybody
    ],
    ids=["keys-dear", "queries-dear", "messages-dear"],
)
def test_auto_weighs_heads_against_rows(prices, split):
    *_, tasks, _, _, tried, chosen = plan_of(ends([4096]), 4, prices=prices, heads=(8, 4))
    assert bool(tried[chosen][2]) == split == bool((tasks[:, 9] < 8).any())
    assert {n for *_, n in tried} == {0, 1}


def test_predicted_seconds():
    """By the formula of exchange.h, with the heads' share of a row."""
    prices = [1e-3, 5.0, 7.0, 11.0]
    *_, tried, chosen = plan_of(ends([64]), 4, scheme="heads", heads=(8, 2), prices=prices)
    scores, rows = 64 * 65 / 2 / 4, 3 * 16
    traffic = 2 * (5.0 * rows * 2 / 8 + 7.0 * rows * 1 / 2 + 2 * 3 * 11.0)
    assert tried[chosen][1] == pytest.approx(1e-3 * scores + traffic, rel=1e-12)


def ids_of(*runs):
    return [number for number, length in runs for _ in range(length)]


@pytest.mark.parametrize(
    ("ids", "ranks", "rank", "queries", "keys"),
    [
        (ids_of((1, 6), (2, 5), (0, 1)), 3, 0, [4], [4]),
        (ids_of((1, 6), (2, 5), (0, 1)), 3, 1, [2, 2], [6, 2]),
        (ids_of((1, 6), (2, 5), (0, 1)), 3, 2, [3], [5]),
        (ids_of((1, 16)), 4, 3, [4], [16]),
        ([1, 2, 3, 4, 5, 6, 7, 8], 2, 1, [1, 1, 1, 1], [1, 1, 1, 1]),
        (ids_of((1, 5), (2, 3), (0, 8)), 2, 1, [], []),
        (ids_of((1, 4), (2, 4)), 2, 1, [4], [4]),
    ],
)
def test_known_segments(ids, ranks, rank, queries, keys):
    *_, tasks, _, _, _, _ = plan_of(docs_from_ids(ids), ranks, scheme="home", tokens=len(ids))
    mine = tasks[tasks[:, 0] == rank]
    assert (mine[:, 3] - mine[:, 2]).tolist() == queries and mine[:, 7].tolist() == keys


@pytest.mark.parametrize(
    ("ids", "received", "sent"),
    [
        (ids_of((1, 6), (2, 6), (3, 4)), [0, 4, 2, 0], [4, 2, 0, 0]),
        (ids_of((1, 16)), [0, 4, 8, 12], [12, 8, 4, 0]),
    ],
)
def test_known_traffic(ids, received, sent):
    *_, keys, _, _, _ = plan_of(docs_from_ids(ids), 4, scheme="home")
    wire = keys[keys[:, 0] != keys[:, 1]]
    assert np.bincount(wire[:, 1], wire[:, 4], minlength=4).tolist() == received
    assert np.bincount(wire[:, 0], wire[:, 4], minlength=4).tolist() == sent


PLAN = {"tokens": 8, "ranks": 2, "heads": 4, "kv_heads": 2, "prices": PRICES, "scheme": "auto", "causal": True}


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"docs": [0, 3, 4]}, ValueError, "docs has 3 elements"),
        ({"docs": [0, 3, 2, 8]}, ValueError, r"docs\[2\] is 2, after 3"),
        ({"docs": [-1, 3]}, ValueError, r"docs\[0\] is -1"),
        ({"docs": [0, 9]}, ValueError, "docs ends at 9, tokens is 8"),
        ({"ranks": 0}, ValueError, "ranks is 0"),
        ({"owners": []}, ValueError, "multiple of the 0 owners"),
        ({"owners": [0, 1, 1]}, ValueError, "multiple of the 3 owners"),
        ({"owners": [0, 2]}, ValueError, r"owners\[1\] is 2, it lies in \[0, 2\)"),
        ({"prices": [1.0]}, ValueError, "prices has 1 numbers"),
        ({"prices": [1.0, -1.0, 0.0, 0.0]}, ValueError, r"prices\[1\] is -1"),
        ({"prices": [1.0, math.inf, 0.0, 0.0]}, ValueError, r"prices\[1\] is inf"),
        ({"scheme": "ring"}, ValueError, "scheme is 'ring', one of home, balanced, heads, auto"),
        ({"heads": 3}, ValueError, "3 query heads are not a multiple of 2 key heads"),
        ({"heads": 0}, ValueError, "0 query heads"),
        ({"kv_heads": 0}, ValueError, "0 key heads"),
        ({"heads": 2**61}, ValueError, "beyond 2\\^63"),
        ({"tokens": -8, "docs": []}, ValueError, "tokens is -8"),
        ({"scheme": 3}, TypeError, "scheme"),
        ({"docs": [0.5]}, TypeError, "docs"),
    ],
)
def test_plan_refuses(changes, error, words):
    arguments = {"docs": [0, 3, 3, 8], "owners": [0, 1], **PLAN, **changes}
    with pytest.raises(error, match=words):
        _amcore.exchange_plan(arguments.pop("docs"), arguments.pop("owners"), **arguments)


def test_plan_of_many_documents():
    docs = ends(np.random.default_rng(0).integers(0, 40, 100_000))
    *_, tasks, _, _, _, _ = plan_of(docs, 8, scheme="balanced")
    assert (tasks[:, 3] - tasks[:, 2]).sum() == docs[-1, 1]


ALL = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
       torch.float32, torch.float64]  # fmt: skip
MOVES = [(3, 0, 2), (9, 4, 0), (0, 5, 3), (7, 9, 1), (6, 2, 1)]


def flat(moves, reverse=False, runs=False):
    return [n for a, b, rows in moves for n in ((b, a, rows) if reverse else (a, b, rows))]


def values(rows, width, dtype):
    x = torch.randint(0, 2 if dtype == torch.bool else 100, (rows, width))
    return x.to(dtype)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("width", [1, 15, 16, 17, 0])
def test_copy(guarded, seed, dtype, width, reverse):
    x, out = values(10, width, dtype), guarded((12, width), dtype)
    want = reference.copy(out, x, MOVES)
    _amcore.exchange_copy(out, x, flat(MOVES, reverse), reverse=reverse, runs=False)
    assert torch.equal(out.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("layout", ["rows", "offset"])
def test_copy_layouts(guarded, seed, layout):
    x = with_layout(torch.randn(10, 6), layout)
    wide = guarded((12, 9))
    want = reference.copy(wide[:, :6], x, MOVES)
    _amcore.exchange_copy(wide[:, :6], x, flat(MOVES), reverse=False, runs=False)
    assert torch.equal(wide[:, :6].nan_to_num(7), want.nan_to_num(7)) and wide[:, 6:].isnan().all()


def test_copy_of_many_rows(guarded, seed, threads):
    """Longer than a parallel piece, several axes."""
    x = torch.randn(3000, 2, 64)
    out = guarded((3000, 2, 64))
    _amcore.exchange_copy(out, x, [1000, 0, 2000, 0, 2000, 1000], reverse=False, runs=False)
    assert torch.equal(out, torch.cat([x[1000:], x[:1000]]))


RUNS = [(3, 0, 2, 3, 5, 4), (9, 2, 1, 1, 0, 0), (0, 20, 3, 2, 8, 3), (7, 9, 1, 0, 9, 9), (29, 13, 0, 2, 1, 1)]


def flat_runs(moves, reverse=False):
    swapped = [(b, a, rows, runs, d, c) for a, b, rows, runs, c, d in moves]
    return [n for move in (swapped if reverse else moves) for n in move]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "rows"])
def test_copy_of_runs(guarded, seed, dtype, layout, reverse):
    x, wide = values(30, 7, dtype), guarded((26, 9), dtype)
    x = with_layout(x, layout)
    out = wide[:, :7] if layout == "rows" else guarded((26, 7), dtype)
    want = reference.copy(out, x, reference.single(RUNS))
    _amcore.exchange_copy(out, x, flat_runs(RUNS, reverse), reverse=reverse, runs=True)
    assert torch.equal(out.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


def test_copy_of_many_runs(guarded, seed, threads):
    """Three of eight heads of every row, there and back."""
    x, some, out = torch.randn(4000, 8, 64), guarded((12000, 64)), torch.zeros(32000, 64)
    move = [2, 0, 3, 4000, 8, 3]
    _amcore.exchange_copy(some, x.flatten(0, 1), move, reverse=False, runs=True)
    assert torch.equal(some.unflatten(0, (4000, 3)), x[:, 2:5])
    _amcore.exchange_copy(out, some, move, reverse=True, runs=True)
    assert torch.equal(out.unflatten(0, (4000, 8))[:, 2:5], x[:, 2:5]) and out.count_nonzero() == some.count_nonzero()


def test_copy_of_nothing(guarded):
    _amcore.exchange_copy(guarded((0, 4)), torch.empty(0, 4), [], reverse=False, runs=False)
    _amcore.exchange_copy(guarded(5), torch.empty(0), [5, 0, 0], reverse=True, runs=False)


def random_moves(rng, n, rows_from, rows_to):
    moves = []
    for _ in range(n):
        rows = int(rng.integers(0, min(rows_from, rows_to) + 1))
        moves.append((int(rng.integers(0, rows_from - rows + 1)), int(rng.integers(0, rows_to - rows + 1)), rows))
    return moves


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (15, 255), (16, 256), (17, 257), (40, 3)])
def test_sum(isa, guarded, seed, rng, dtype, rows, width):
    x, own = (torch.randn(n, width).to(dtype) for n in (29, 23))
    moves, own_moves = random_moves(rng, 7, 29, rows), random_moves(rng, 2, 23, rows)
    out = guarded((rows, width), dtype)
    _amcore.exchange_sum(out, x, own, flat(moves), flat(own_moves), own_after=3, reverse=False, runs=False)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = torch.zeros(rows, width, dtype=wide)
    for source, part in ((x, moves[:3]), (own, own_moves), (x, moves[3:])):
        for begin, to, n in part:
            total[to : to + n] += source[begin : begin + n].to(wide)
    assert torch.equal(out, total.to(dtype)), "the order of the additions is part of the contract"
    truth = reference.add(rows, [(x, moves), (own, own_moves)])
    assert_as_good_as(out, total.to(dtype), truth, name="sum")
    again = guarded((rows, width), dtype)
    backward = flat(moves, True), flat(own_moves, True)
    _amcore.exchange_sum(again, x, own, *backward, own_after=3, reverse=True, runs=False)
    assert torch.equal(out, again)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("reverse", [False, True])
def test_sum_of_runs(isa, guarded, seed, rng, dtype, reverse):
    """Of runs that meet and cross, in the order of the moves, across the edges of tiles."""
    x, own = (torch.randn(n, 33).to(dtype) for n in (200, 90))
    moves = [(4, 3, 2, 20, 9, 4), (0, 0, 5, 7, 5, 10), (11, 70, 9, 1, 0, 0), (2, 15, 3, 4, 0, 16), (5, 8, 1, 0, 3, 3)]
    own_moves = [(1, 1, 3, 9, 7, 8), (80, 60, 4, 2, 1, 5)]
    out = guarded((90, 33), dtype)
    lists = flat_runs(moves, reverse), flat_runs(own_moves, reverse)
    _amcore.exchange_sum(out, x, own, *lists, own_after=2, reverse=reverse, runs=True)
    plain = guarded((90, 33), dtype)
    first, last, owned = (reference.single(some) for some in (moves[:2], moves[2:], own_moves))
    single = flat(first + last), flat(owned)
    _amcore.exchange_sum(plain, x, own, *single, own_after=len(first), reverse=False, runs=False)
    assert torch.equal(out, plain)
    truth = reference.add(90, [(x, first + last), (own, owned)])
    assert_as_good_as(out, plain, truth, name="sum of runs")


def test_sum_threads_layouts_and_gaps(guarded, seed, threads):
    """Rows that nothing reaches are 0; NaN that no move names stays where it is; sources may have gaps between rows."""
    x, own = torch.randn(500, 40)[:, 3:35], torch.randn(500, 32)
    x[200:], own[:100] = float("nan"), float("nan")
    out = guarded((700, 32))
    _amcore.exchange_sum(out, x, own, [0, 100, 200], [100, 200, 400], own_after=1, reverse=False, runs=False)
    want = torch.zeros(700, 32)
    want[100:300] += x[:200]
    want[200:600] += own[100:]
    assert torch.equal(out, want)
    empty = guarded((0, 32))
    _amcore.exchange_sum(empty, x, own, [], [], own_after=0, reverse=False, runs=False)
    nothing = guarded((3, 32))
    _amcore.exchange_sum(nothing, x[:0], own[:0], [], [], own_after=0, reverse=False, runs=False)
    assert not nothing.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("times", [1, 2, 3, 4, 16, 1024])
def test_sum_of_short_rows(isa, guarded, seed, rng, dtype, times):
    """Rows that always come `times` together are added as one; the bits are those of rows with gaps, which are not."""
    x, own = (torch.randn(n * times, 8).to(dtype) for n in (29, 23))
    groups = [random_moves(rng, n, rows, 17) for n, rows in ((7, 29), (2, 23))]
    moves, own_moves = (flat([[times * number for number in move] for move in some]) for some in groups)
    out, plain = guarded((17 * times, 8), dtype), guarded((17 * times, 8), dtype)
    _amcore.exchange_sum(out, x, own, moves, own_moves, own_after=3, reverse=False, runs=False)
    apart = torch.cat([x, x], dim=1)[:, :8]
    _amcore.exchange_sum(plain, apart, own, moves, own_moves, own_after=3, reverse=False, runs=False)
    assert torch.equal(out, plain)
    lists = [[tuple(times * number for number in move) for move in some] for some in groups]
    truth = reference.add(17 * times, [(x, lists[0]), (own, lists[1])])
    assert_as_good_as(out, plain, truth, name="short rows")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("width", "offset"), [(4096, 0), (4099, 1), (33000, 7)])
def test_large_outputs(guarded, seed, dtype, width, offset):
    """Of 16 MiB and more, which are written past the caches: rows alone, rows that are summed, rows of nothing."""
    rows = 4 * -(-(1 << 24) // (4 * width * dtype.itemsize))
    x = torch.randn(rows * width + offset).to(dtype)[offset:].view(rows, width)
    half, out = rows // 2, guarded((rows, width), dtype)
    _amcore.exchange_copy(out, x, [0, half, half, half, 0, half], reverse=False, runs=False)
    assert torch.equal(out, torch.cat([x[half:], x[:half]]))
    out = guarded((rows, width), dtype)
    every_other = [0, half, 1, half, 1, 1, half, 0, 1, half, 1, 1]
    _amcore.exchange_copy(out, x, every_other, reverse=False, runs=True)
    assert torch.equal(out, torch.cat([x[half:], x[:half]]))
    out = guarded((rows, width), dtype)
    moves = [0, 0, half, 0, half - 1, half]
    _amcore.exchange_sum(out, x, x, moves, [1, half, 1], own_after=1, reverse=False, runs=False)
    want = torch.zeros(rows, width, dtype=torch.promote_types(dtype, torch.float32))
    want[:half] += x[:half]
    want[half] += x[1]
    want[half - 1 : 2 * half - 1] += x[:half]
    assert torch.equal(out, want.to(dtype))


def test_moves_of_no_rows_that_come_often():
    """Nothing, however often."""
    out = torch.full((4, 2), 7.0)
    _amcore.exchange_copy(out, X, [0, 0, 0, 2**62, 0, 0], reverse=False, runs=True)
    assert (out == 7).all()
    _amcore.exchange_sum(out, X, X, [0, 0, 0, 2**62, 0, 0], [], own_after=0, reverse=False, runs=True)
    assert not out.any()


X = torch.ones(4, 2)
REFUSED = {
    "dtype": ({"x": X.double()}, TypeError, "x is float64, out is float32"),
    "axes": ({"x": X[0]}, ValueError, "x has 1 axes, out has 2"),
    "width": ({"x": torch.ones(4, 3)}, ValueError, "axis 1 of x has 3 elements, out has 2"),
    "gaps": ({"x": torch.ones(4, 4)[:, ::2]}, ValueError, "axis 1 of x has stride 2, 1 is needed"),
    "triples": ({"moves": [0, 0]}, ValueError, "moves has 2 numbers"),
    "from": ({"moves": [3, 0, 2]}, ValueError, r"moves\[0\] takes 2 rows from 3, there are 4"),
    "to": ({"moves": [0, 0, 0, 0, 5, 2]}, ValueError, r"moves\[1\] puts 2 rows at 5, there are 6"),
    "negative": ({"moves": [0, 0, -1]}, ValueError, r"moves\[0\] takes -1 rows"),
    "huge": ({"moves": [0, 0, 2**62]}, ValueError, "takes"),
}
RUNS_REFUSED = {
    "sixes": ([0, 0, 1], "moves has 3 numbers, a multiple of 6"),
    "from": ([0, 0, 1, 3, 2, 1], r"moves\[0\] comes 3 times in steps of 2 and 1, beyond 4 or 6 rows"),
    "to": ([0, 0, 1, 3, 1, 3], "beyond 4 or 6 rows"),
    "times": ([0, 0, 1, -1, 0, 0], "comes -1 times"),
    "back": ([3, 5, 1, 2, -1, -1], "none may be negative"),
    "huge": ([0, 0, 1, 2**62, 2**62, 2**62], "beyond"),
    "first": ([0, 6, 1, 1, 0, 0], r"moves\[0\] puts 1 rows at 6"),
}
SUM_REFUSED = {
    "own-width": ({"own": torch.ones(4, 3)}, ValueError, "axis 1 of own has 3 elements"),
    "own-moves": ({"own_moves": [4, 0, 1]}, ValueError, r"own_moves\[0\] takes 1 rows from 4, there are 4"),
    "own-after": ({"own_after": 2}, ValueError, "own_after is 2, there are 1 moves"),
    "half": ({"out": torch.ones(6, 2).half(), "x": X.half(), "own": X.half()}, TypeError, "out is float16"),
}


def arguments_of(changes):
    arguments = {"out": torch.full((6, 2), 7.0), "x": X.clone(), "own": X.clone(), "own_after": 0}
    return {**arguments, "moves": [0, 0, 2], "own_moves": [0, 2, 2], **changes}


@pytest.mark.parametrize(("changes", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_movers_refuse(changes, error, words):
    a = arguments_of(changes)
    kept = a["out"].clone()
    with pytest.raises(error, match=words):
        _amcore.exchange_copy(a["out"], a["x"], a["moves"], reverse=False, runs=False)
    test_sum_refuses(changes, error, words)
    assert torch.equal(a["out"], kept)


@pytest.mark.parametrize(("changes", "error", "words"), SUM_REFUSED.values(), ids=SUM_REFUSED)
def test_sum_refuses(changes, error, words):
    a = arguments_of(changes)
    kept = a["out"].clone()
    with pytest.raises(error, match=words):
        _amcore.exchange_sum(
            a["out"], a["x"], a["own"], a["moves"], a["own_moves"], own_after=a["own_after"], reverse=False, runs=False
        )
    assert torch.equal(a["out"], kept)


@pytest.mark.parametrize(("moves", "words"), RUNS_REFUSED.values(), ids=RUNS_REFUSED)
def test_movers_of_runs_refuse(moves, words):
    out = torch.full((6, 2), 7.0)
    with pytest.raises(ValueError, match=words):
        _amcore.exchange_copy(out, X, moves, reverse=False, runs=True)
    with pytest.raises(ValueError, match=words):
        _amcore.exchange_sum(out, X, X, moves, [], own_after=0, reverse=False, runs=True)
    assert (out == 7).all()


def test_movers_refuse_shared_memory():
    x = torch.zeros(8, 2)
    with pytest.raises(ValueError, match="share memory"):
        _amcore.exchange_copy(x[:4], x[3:], [0, 0, 1], reverse=False, runs=False)
    with pytest.raises(ValueError, match="out and own share memory"):
        _amcore.exchange_sum(x[:4], X, x, [], [], own_after=0, reverse=False, runs=False)


def copy_by(out, x, moves, reverse=False, runs=False):
    """exchange_copy by way of a table."""
    options = {"reverse": reverse, "runs": runs}
    table = _amcore.exchange_table(moves, rows_x=len(x), rows_out=len(out), **options)
    _amcore.exchange_copy_by(out, x, torch.from_numpy(table).to(out.device), rows=int(table[-1, 0]))


def sum_by(out, x, own, moves, own_moves, own_after, reverse=False, runs=False):
    """exchange_sum by way of an index."""
    sizes = {"rows_x": len(x), "rows_own": len(own), "rows_out": len(out)}
    index = _amcore.exchange_index(moves, own_moves, own_after=own_after, reverse=reverse, runs=runs, **sizes)
    _amcore.exchange_sum_by(out, x, own, torch.from_numpy(index).to(out.device))


def test_table():
    made = _amcore.exchange_table([0, 5, 2, 7, 7, 0, 3, 1, 1], rows_x=7, rows_out=7, reverse=False, runs=False)
    assert made.tolist() == [[0, 0, 5, 2, 1, 0, 0], [2, 3, 1, 1, 1, 0, 0], [3, 0, 0, 0, 0, 0, 0]]
    made = _amcore.exchange_table([5, 0, 2, 3, 7, 4], rows_x=20, rows_out=30, reverse=True, runs=True)
    assert made.tolist() == [[0, 0, 5, 2, 3, 4, 7], [6, 0, 0, 0, 0, 0, 0]]


def test_index():
    sizes = {"rows_x": 10, "rows_own": 3, "rows_out": 4, "reverse": False, "runs": False}
    made = _amcore.exchange_index([0, 1, 2, 3, 1, 1], [0, 1, 2], own_after=1, **sizes)
    assert made.tolist() == [5, 5, 8, 10, 10, 0, -1, 3, 1, -2]
    assert _amcore.exchange_index([], [], own_after=0, **sizes | {"rows_out": 0}).tolist() == [1]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("width", [1, 15, 16, 17, 0])
def test_copy_by_a_table(guarded, seed, dtype, width, reverse):
    x, out = values(10, width, dtype), guarded((12, width), dtype)
    want = reference.copy(out, x, MOVES)
    copy_by(out, x, flat(MOVES, reverse), reverse=reverse)
    assert torch.equal(out.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "rows"])
def test_copy_of_runs_by_a_table(guarded, seed, layout, reverse):
    x, wide = with_layout(values(30, 7, torch.float32), layout), guarded((26, 9))
    out = wide[:, :7] if layout == "rows" else guarded((26, 7))
    want = reference.copy(out, x, reference.single(RUNS))
    copy_by(out, x, flat_runs(RUNS, reverse), reverse, runs=True)
    assert torch.equal(out.nan_to_num(7), want.nan_to_num(7))


def test_copy_of_many_rows_by_a_table(guarded, seed, rng, threads):
    """Moves of one row and of many, across the edges of the pieces of a parallel loop."""
    order, x, out = rng.permutation(3000), torch.randn(3000, 3, 5), guarded((3000, 3, 5))
    starts = np.unique(np.append(0, rng.integers(0, 3000, 900)))
    moves = np.stack([starts, starts, np.diff(np.append(starts, 3000))], 1)
    copy_by(out, x, rng.permutation(moves).flatten().tolist())
    assert torch.equal(out, x)
    copy_by(out, x, np.stack([order, np.arange(3000), np.ones(3000, np.int64)], 1).flatten().tolist())
    assert torch.equal(out, x[torch.from_numpy(order)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_sum_by_an_index_has_the_bits_of_the_sum(guarded, seed, rng, dtype, runs, reverse):
    x, own = (torch.randn(n, 33).to(dtype) for n in (200, 90))
    if runs:
        moves = [(4, 3, 2, 20, 9, 4), (0, 0, 5, 7, 5, 10), (11, 70, 9, 1, 0, 0), (2, 15, 3, 4, 0, 16)]
        lists = flat_runs(moves, reverse), flat_runs([(1, 1, 3, 9, 7, 8), (80, 60, 4, 2, 1, 5)], reverse)
    else:
        lists = flat(random_moves(rng, 7, 200, 90), reverse), flat(random_moves(rng, 2, 90, 90), reverse)
    plain, out = guarded((90, 33), dtype), guarded((90, 33), dtype)
    _amcore.exchange_sum(plain, x, own, *lists, own_after=3, reverse=reverse, runs=runs)
    sum_by(out, x, own, *lists, 3, reverse, runs)
    assert torch.equal(out, plain)


def test_sum_by_an_index_of_nothing(guarded):
    sum_by(guarded((0, 32)), X[:, :1].expand(4, 32).contiguous(), torch.zeros(2, 32), [], [], 0)
    nothing = guarded((3, 2))
    sum_by(nothing, X[:0], X[:0], [], [], 0)
    assert not nothing.any()


@pytest.mark.parametrize(("moves", "words"), RUNS_REFUSED.values(), ids=RUNS_REFUSED)
def test_tables_of_runs_refuse(moves, words):
    with pytest.raises(ValueError, match=words):
        _amcore.exchange_table(moves, rows_x=4, rows_out=6, reverse=False, runs=True)
    with pytest.raises(ValueError, match=words):
        _amcore.exchange_index(
            moves, [], own_after=0, rows_x=4, rows_own=4, rows_out=6, reverse=False, runs=True
        )  # fmt: skip


def test_tables_refuse():
    table, index = ({"rows_x": 4, "rows_out": 6, "reverse": False, "runs": False} for _ in range(2))
    index |= {"rows_own": 4, "own_after": 0}
    with pytest.raises(ValueError, match="more rows than 2"):
        _amcore.exchange_table([0, 0, 1, 2**60, 0, 0], **table | {"runs": True})
    for changes, words in (
        ({"own_after": 1}, "own_after is 1, there are 0 moves"),
        ({"rows_out": -1}, "rows_out is -1"),
        ({"rows_out": 2**60}, "too many"),
    ):
        with pytest.raises(ValueError, match=words):
            _amcore.exchange_index([], [], **index | changes)


BY_REFUSED = {
    "copy: dtype": ({"x": X.double()}, TypeError, "x is float64, out is float32"),
    "copy: table's dtype": ({"table": torch.zeros(2, 7)}, TypeError, "table is float32, int64 is needed"),
    "copy: table": ({"table": torch.zeros(2, 6, dtype=torch.int64)}, ValueError, r"\[n \+ 1, 7\] is needed"),
    "copy: strided": ({"table": torch.zeros(2, 8, dtype=torch.int64)[:, :7]}, ValueError, "table is not contiguous"),
    "copy: rows": ({"rows": -1}, ValueError, "rows is -1"),
    "copy: more rows": ({"rows": 2**62}, ValueError, "the table ends at 0"),
    "copy: no moves": ({"table": torch.zeros(1, 7, dtype=torch.int64)}, ValueError, "a table without moves"),
    "sum: half": ({"out": X.half(), "x": X.half(), "own": X.half()}, TypeError, "out is float16"),
    "sum: own": ({"own": torch.ones(4, 3)}, ValueError, "axis 1 of own has 3 elements"),
    "sum: index": ({"index": torch.zeros(6, dtype=torch.int64)}, ValueError, "6 numbers, out has 6 rows"),
}


@pytest.mark.parametrize("name", BY_REFUSED)
def test_movers_by_tables_refuse(name):
    changes, error, words = BY_REFUSED[name]
    a = {"out": torch.full((6, 2), 7.0), "x": X.clone(), "own": X.clone(), "rows": 1}
    a |= {"table": torch.zeros(2, 7, dtype=torch.int64), "index": torch.full((7,), 7), **changes}
    kept = a["out"].clone()
    with pytest.raises(error, match=words):
        if name.startswith("copy"):
            _amcore.exchange_copy_by(a["out"], a["x"], a["table"], rows=a["rows"])
        else:
            _amcore.exchange_sum_by(a["out"], a["x"], a["own"], a["index"])
    assert torch.equal(a["out"], kept)


def test_rows_that_a_table_does_not_have_are_not_waited_for():
    """The fuzzer's: 2^63 - 1 of them once took centuries, without the lock."""
    table = torch.tensor([[0, 0, 1, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0, 0]])
    out = torch.zeros(2, 4)
    with pytest.raises(ValueError, match="the table ends at 1"):
        _amcore.exchange_copy_by(out, torch.ones(2, 4), table, rows=2**63 - 1)
    assert not out.any()
    _amcore.exchange_copy_by(out, torch.ones(2, 4), table, rows=1)
    assert out.tolist() == [[0] * 4, [1] * 4]


def test_numbers_of_a_table_that_are_out_of_reach_are_left_out(guarded):
    out, x = torch.zeros(3, 2), torch.ones(3, 2)
    far = [[0, -1, 0, 1, 1, 0, 0], [1, 0, 3, 1, 1, 0, 0], [2, 2**62, 2**62, 2, 1, 2**62, 2**62], [4, 0, 0, 0, 0, 0, 0]]
    _amcore.exchange_copy_by(out, x, torch.tensor(far), rows=4)
    assert not out.any()
    _amcore.exchange_sum_by(out, x, x, torch.tensor([4, 5, 6, 90, 3, -4, 0]))
    assert out.tolist() == [[0, 0], [0, 0], [1, 1]]


@pytest.mark.cuda
def test_movers_on_cuda():
    with pytest.raises(NotImplementedError, match="on CUDA, where exchange_copy_by takes a table"):
        _amcore.exchange_copy(X.cuda(), X.cuda(), [], reverse=False, runs=False)
