"""What each rank holds of a pack, any number of ranks in one process: rows, what they look ahead to, vision tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from automodel_c.models.qwen3_5.share import Share
from automodel_c.parallel.plan import ContextPlan, make_pack


def shares(ids, ranks, depths=0, layout="contiguous"):
    pack, tokens = make_pack(None, np.array(ids, np.int64), None)
    ends = np.zeros(tokens, np.int64)
    for begin, end in pack.docs:
        ends[begin:end] = end
    plans = [ContextPlan(pack, tokens, ranks=ranks, rank=rank, layout=layout) for rank in range(ranks)]
    return ends, [Share(ends, plan, depths) for plan in plans]


doc_ids = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), max_size=8).map(
    lambda runs: [id for id, length in runs for _ in range(length)]
)


@given(
    ids=doc_ids,
    ranks=st.integers(2, 9),
    depths=st.integers(0, 3),
    layout=st.sampled_from(["contiguous", "round_robin"]),
)
def test_rows_are_held_once_and_what_is_ahead_is_embedded(ids, ranks, depths, layout):
    ends, found = shares(ids, ranks, depths, layout)
    padded = found[0].tokens
    assert sorted(np.concatenate([share.own for share in found])) == list(range(padded))
    for share in found:
        assert list(share.rows[: len(share.own)]) == list(share.own) and len(set(share.rows)) == len(share.rows)
        needed = set(share.own)
        for k in range(1, depths + 1):
            rows, inside = share.ahead(k)
            for row, there, within in zip(share.own, rows, inside, strict=True):
                end = ends[row] if row < len(ids) else 0
                assert within == (row + k < end)
                assert there == (min(row + k, end - 1) if end else row)
            assert np.array_equal(share.rows[share.embedded(rows)], rows)
            needed |= set(rows)
        assert needed == set(share.rows)


@given(data=st.data(), ids=doc_ids, ranks=st.integers(2, 9), depths=st.integers(0, 3))
def test_every_vision_token_travels_where_its_row_is_embedded(data, ids, ranks, depths):
    _, found = shares(ids, ranks, depths)
    places = np.array(data.draw(st.permutations(range(len(ids)))), np.int64)
    places = places[: data.draw(st.integers(0, len(places)))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(places)), min_size=ranks - 1, max_size=ranks - 1)))
    cuts = [0, *cuts, len(places)]
    moves = [share.token_moves(places, np.diff(cuts)) for share in found]
    assert all(np.array_equal(one, moves[0]) for one in moves)
    for rank, share in enumerate(found):
        tokens, rows = share.spliced(places)
        assert np.array_equal(share.rows[rows], places[tokens])
        assert set(places) & set(share.rows) == set(places[tokens])
        arrived = np.full(len(tokens), -1)
        for src, _, taken, put, count in moves[0][moves[0][:, 1] == rank]:
            arrived[put : put + count] = cuts[src] + taken + np.arange(count)
            assert taken + count <= cuts[src + 1] - cuts[src]
        assert np.array_equal(arrived, tokens)


@pytest.mark.parametrize("rows", [[], [0], [12, 3, 3, 0]])
def test_any_rows_go_to_all(rows):
    _, found = shares([1] * 13, 3)
    held = [share.own for share in found]
    for share in found:
        route = share.to_all(np.array(rows, np.int64))
        assert route.rows_out == len(rows) and sum(route.receive_rows) + int(route.own[2::3].sum()) == len(rows)
        taken = {int(put): int(held[share.plan.rank][row]) for row, put, _ in route.own.view(-1, 3).tolist()}
        assert all(rows[put] == row for put, row in taken.items())


def test_a_rank_alone_holds_everything():
    ends = np.array([3, 3, 3, 0])
    share = Share(ends)
    assert list(share.own) == list(share.rows) == [0, 1, 2, 3]
    x = np.arange(4)
    assert share.take(x, 0) is x
