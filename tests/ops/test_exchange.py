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


def plan_of(docs, ranks, layout="contiguous", scheme="auto", causal=True, prices=PRICES, tokens=None):
    """(docs [N, 2], owners, padded tokens, tasks, keys, queries, tried, chosen)"""
    docs = np.asarray(docs, dtype=np.int64).reshape(-1, 2)
    tokens = int(docs[-1, 1]) if tokens is None and len(docs) else tokens or 0
    padded, owners = -(-tokens // (2 * ranks)) * 2 * ranks, LAYOUTS[layout](ranks)
    options = {"tokens": padded, "ranks": ranks, "prices": prices, "scheme": scheme, "causal": causal}
    return docs, owners, padded, *_amcore.exchange_plan(docs.flatten(), owners, **options)


def check_laws(docs, owners, padded, tasks, keys, queries, ranks, causal):
    """Every real row is computed once; every task finds its queries and keys in place; nothing is sent twice."""
    shards = reference.rows_of_ranks(owners, padded, ranks)
    computed = sorted(row for t in tasks for row in range(t[2], t[3]))
    assert computed == [row for start, stop in docs for row in range(start, stop)]
    assert tasks[:, :3].tolist() == sorted(tasks[:, :3].tolist(), key=lambda t: (t[0], t[2]))
    needed = [reference.needed_keys(docs, tasks, r, causal) for r in range(ranks)]
    key_rows = reference.deliver(shards, keys, [len(n) for n in needed])
    sizes = [sum(int(t[3] - t[2]) for t in tasks if t[0] == r) for r in range(ranks)]
    query_rows = reference.deliver(shards, queries, sizes)
    for rank, doc, begin, end, _, query_at, key_at, n_keys in tasks:
        start, stop = docs[doc]
        assert start <= begin < end <= stop and n_keys == (end if causal else stop) - start
        assert query_rows[rank][query_at : query_at + end - begin].tolist() == list(range(begin, end))
        assert key_rows[rank][key_at : key_at + n_keys].tolist() == list(range(start, start + n_keys))
    assert all(set(rows.tolist()) == n for rows, n in zip(key_rows, needed, strict=True))
    rounds = [tuple(t[[0, 1, 4]]) for t in tasks]
    assert len(set(rounds)) == len(rounds), "a document comes once in a round"
    for r in range(ranks):
        order = [t for t in tasks if t[0] == r]
        order.sort(key=lambda t: t[5])
        assert [t[4] for t in order] == sorted(t[4] for t in order), "query rows lie by round"


@given(
    ids=doc_ids(120),
    ranks=st.integers(1, 6),
    layout=st.sampled_from(list(LAYOUTS)),
    scheme=st.sampled_from(["home", "balanced", "auto"]),
    causal=st.booleans(),
    prices=st.sampled_from([PRICES, [0.0] * 4, [1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 1.0]]),
)
def test_laws(ids, ranks, layout, scheme, causal, prices):
    docs, owners, padded, tasks, keys, queries, tried, chosen = plan_of(
        docs_from_ids(ids), ranks, layout, scheme, causal, prices, tokens=len(ids)
    )
    check_laws(docs, owners, padded, tasks, keys, queries, ranks, causal)
    assert tried[chosen][1] == min(seconds for _, seconds in tried)
    if scheme == "home":
        assert (queries[:, 0] == queries[:, 1]).all() and tried == ((math.inf, tried[0][1]),)


def costs_of(docs, tasks, ranks, causal=True):
    start, stop = docs[tasks[:, 1]].T
    rows = tasks[:, 3] - tasks[:, 2]
    scores = rows * ((tasks[:, 2] + tasks[:, 3] + 1) / 2 - start) if causal else rows * (stop - start)
    return np.bincount(tasks[:, 0], scores, minlength=ranks)


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


def test_costs_of_the_reference():
    docs = np.array([[2, 9]])
    task = np.array([[0, 0, 4, 7, 0, 0, 0, 5]])
    for causal in (True, False):
        assert costs_of(docs, task, 1, causal)[0] == reference.scores(docs, 0, 4, 7, causal)


def test_home_of_one_document_is_nearly_twice_the_mean():
    docs = ends([131_072])
    *_, tasks, _, _, _, _ = plan_of(docs, 32, scheme="home")
    costs = costs_of(docs, tasks, 32)
    assert costs.max() / costs.mean() == pytest.approx(2 - 1 / 32, rel=1e-3)


def test_short_documents_move_nothing():
    """Documents that end on edges: no row crosses, under every scheme."""
    for scheme in ("home", "balanced", "auto"):
        *_, keys, queries, _, _ = plan_of(ends([64] * 32), 8, scheme=scheme)
        assert (keys[:, 0] == keys[:, 1]).all() and (queries[:, 0] == queries[:, 1]).all()


def test_auto_weighs_the_time_saved_against_the_traffic():
    docs = ends([4096])
    rows_cost = {}
    for wire in (1e-9, 1e-2):
        *_, queries, tried, chosen = plan_of(docs, 4, prices=[1e-6, wire, wire, wire])
        rows_cost[wire] = queries[queries[:, 0] != queries[:, 1]][:, 4].sum(), tried[chosen][0]
    assert rows_cost[1e-9][0] > 0 and rows_cost[1e-9][1] == pytest.approx(1.02)
    assert rows_cost[1e-2] == (0, math.inf)


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


PLAN = {"tokens": 8, "ranks": 2, "prices": PRICES, "scheme": "auto", "causal": True}


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
        ({"scheme": "ring"}, ValueError, "scheme is 'ring'"),
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


def flat(moves, reverse=False):
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
    _amcore.exchange_copy(out, x, flat(MOVES, reverse), reverse=reverse)
    assert torch.equal(out.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("layout", ["rows", "offset"])
def test_copy_layouts(guarded, seed, layout):
    x = with_layout(torch.randn(10, 6), layout)
    wide = guarded((12, 9))
    want = reference.copy(wide[:, :6], x, MOVES)
    _amcore.exchange_copy(wide[:, :6], x, flat(MOVES), reverse=False)
    assert torch.equal(wide[:, :6].nan_to_num(7), want.nan_to_num(7)) and wide[:, 6:].isnan().all()


def test_copy_of_many_rows(guarded, seed, threads):
    """Longer than a parallel piece, several axes."""
    x = torch.randn(3000, 2, 64)
    out = guarded((3000, 2, 64))
    _amcore.exchange_copy(out, x, [1000, 0, 2000, 0, 2000, 1000], reverse=False)
    assert torch.equal(out, torch.cat([x[1000:], x[:1000]]))


def test_copy_of_nothing(guarded):
    _amcore.exchange_copy(guarded((0, 4)), torch.empty(0, 4), [], reverse=False)
    _amcore.exchange_copy(guarded(5), torch.empty(0), [5, 0, 0], reverse=True)


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
    _amcore.exchange_sum(out, x, own, flat(moves), flat(own_moves), own_after=3, reverse=False)
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
    _amcore.exchange_sum(again, x, own, *backward, own_after=3, reverse=True)
    assert torch.equal(out, again)


def test_sum_threads_layouts_and_gaps(guarded, seed, threads):
    """Rows that nothing reaches are 0; NaN that no move names stays where it is; sources may have gaps between rows."""
    x, own = torch.randn(500, 40)[:, 3:35], torch.randn(500, 32)
    x[200:], own[:100] = float("nan"), float("nan")
    out = guarded((700, 32))
    _amcore.exchange_sum(out, x, own, [0, 100, 200], [100, 200, 400], own_after=1, reverse=False)
    want = torch.zeros(700, 32)
    want[100:300] += x[:200]
    want[200:600] += own[100:]
    assert torch.equal(out, want)
    empty = guarded((0, 32))
    _amcore.exchange_sum(empty, x, own, [], [], own_after=0, reverse=False)
    nothing = guarded((3, 32))
    _amcore.exchange_sum(nothing, x[:0], own[:0], [], [], own_after=0, reverse=False)
    assert not nothing.any()


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
        _amcore.exchange_copy(a["out"], a["x"], a["moves"], reverse=False)
    test_sum_refuses(changes, error, words)
    assert torch.equal(a["out"], kept)


@pytest.mark.parametrize(("changes", "error", "words"), SUM_REFUSED.values(), ids=SUM_REFUSED)
def test_sum_refuses(changes, error, words):
    a = arguments_of(changes)
    kept = a["out"].clone()
    with pytest.raises(error, match=words):
        _amcore.exchange_sum(
            a["out"], a["x"], a["own"], a["moves"], a["own_moves"], own_after=a["own_after"], reverse=False
        )
    assert torch.equal(a["out"], kept)


def test_movers_refuse_shared_memory():
    x = torch.zeros(8, 2)
    with pytest.raises(ValueError, match="share memory"):
        _amcore.exchange_copy(x[:4], x[3:], [0, 0, 1], reverse=False)
    with pytest.raises(ValueError, match="out and own share memory"):
        _amcore.exchange_sum(x[:4], X, x, [], [], own_after=0, reverse=False)


@pytest.mark.cuda
def test_movers_on_cuda():
    with pytest.raises(NotImplementedError, match="CPU kernel only"):
        _amcore.exchange_copy(X.cuda(), X.cuda(), [], reverse=False)
