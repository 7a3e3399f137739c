"""What a plan says of documents that go on from rank to rank, against a count row by row."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from automodel_c.parallel.plan import LAYOUTS, ContextPlan, make_pack
from automodel_c.parallel.straddle import Straddles

RUNS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20)), max_size=12)


@st.composite
def plans(draw):
    """The plans of all ranks for one pack, and each row's document (-1: padding) and rank."""
    ids = np.repeat(*np.array(draw(RUNS), np.int64).reshape(-1, 2).T)
    ranks, layout = draw(st.integers(1, 6)), draw(st.sampled_from(LAYOUTS))
    pack, tokens = make_pack(None, ids, len(ids))
    made = [ContextPlan(pack, tokens, ranks=ranks, rank=r, layout=layout) for r in range(ranks)]
    doc, home = np.full(made[0].padded, -1), np.full(made[0].padded, -1)
    for n, (start, stop) in enumerate(pack.docs):
        doc[start:stop] = n
    for plan in made:
        for begin, end in plan.chunks_of(plan.rank):
            home[begin:end] = plan.rank
    return made, doc, home


def edges_of(doc, home):
    """Rows whose document came to their rank from another one's."""
    rows = np.arange(1, len(doc))
    return rows[(doc[1:] == doc[:-1]) & (doc[1:] >= 0) & (home[1:] != home[:-1])]


@given(plans())
def test_parts_hold_every_row_once(case):
    made, doc, home = case
    for plan in made:
        straddles = Straddles(plan)
        at = 0
        rows = np.concatenate([np.arange(b, e) for b, e in plan.chunks_of(plan.rank)])
        came = goes = 0
        for part in straddles.parts:
            mine = rows[at : at + part.rows]
            inside = np.zeros(part.rows, bool)
            for start, stop in part.docs:
                assert len({*doc[mine[start:stop]]}) == 1 and doc[mine[start]] >= 0
                inside[start:stop] = True
            assert (doc[mine[~inside]] == -1).all()
            came, goes = came + part.came * (part.rows > 0), goes + part.goes * (part.rows > 0)
            at += part.rows
        assert at == plan.local == len(rows)
        edges = edges_of(doc, home)
        assert came == (home[edges] == plan.rank).sum() and goes == (home[edges - 1] == plan.rank).sum()
        assert any(p.came for p in straddles.parts) and any(p.goes for p in straddles.parts)
        assert straddles.any == bool(len(edges))


@given(plans(), st.integers(2, 8))
def test_halo_is_what_stands_before_a_piece(case, width):
    """Carrying row numbers along the moves gives every rank the rows before its edges, newest last, and no others."""
    made, doc, home = case
    moves = Straddles(made[0]).halo(width).moves
    edges = edges_of(doc, home)
    for plan in made:
        mine = edges[home[edges] == plan.rank]
        wanted = np.full((len(mine), width - 1), -1)
        for i, edge in enumerate(mine):
            before = np.arange(edge - width + 1, edge)
            inside = (before >= 0) & (doc[before] == doc[edge])
            wanted[i, inside] = before[inside]
        found = np.full(wanted.size, -1)
        for src, _, row, put, rows in moves[moves[:, 1] == plan.rank]:
            held = np.concatenate([np.arange(b, e) for b, e in plan.chunks_of(src)])
            assert (found[put : put + rows] == -1).all()
            found[put : put + rows] = held[row : row + rows]
        assert np.array_equal(found.reshape(wanted.shape), wanted)
        assert Straddles(plan).halo(width).route.rows_out == wanted.size


@given(plans())
def test_states_come_from_the_earlier_ranks_of_a_document(case):
    """A rank gets each earlier span's block once and no other's, with a transition where the span holds no start."""
    made, doc, home = case
    key_dim, value_dim = 8, 24
    spans = np.flatnonzero(np.diff(home, prepend=-1))
    ends = np.append(spans, len(home))[1:]
    goes = [e < len(doc) and doc[e] >= 0 and doc[e] == doc[e - 1] for e in ends]
    for plan in made:
        states = Straddles(plan).states(key_dim, value_dim)
        wanted = {}
        for n, begin in enumerate(spans):
            if home[begin] == plan.rank and n and goes[n - 1]:
                for source in range(n):
                    if (doc[spans[source] : ends[source]] == doc[begin]).any():
                        starts_there = spans[source] == 0 or doc[spans[source] - 1] != doc[begin]
                        wanted[source] = value_dim if starts_there else value_dim + key_dim
        sizes = {s: sum(states.sizes[n] for n in block if n is not None) for s, block in states.blocks.items()}
        assert sizes == wanted
        assert states.route.rows_out == sum(wanted.values())
        moved = states.moves[states.moves[:, 1] == plan.rank]
        assert sorted(moved[:, 4]) == sorted(wanted.values())
        assert sum(states.route.receive_rows) == sum(rows for s, rows in wanted.items() if home[spans[s]] != plan.rank)


def test_explain_says_what_states_and_halos_take():
    pack, tokens = make_pack(None, [1] * 100 + [2] * 28, 128)
    plan = ContextPlan(pack, tokens, ranks=4)
    text = plan.explain(states=(2, 128, 128), channels=1024)
    # rank 0 sends a state to ranks 1, 2 and 3; 1 and 2 send states and transitions on: 3 + 2 * 2 + 2 states of 128 KiB
    assert "gated delta rule, 2 heads of 128 x 128: 6 messages, 1.125 MiB" in text
    assert "convolution of 1024 channels, width 4: 3 messages, 0.018 MiB" in text
    alone = ContextPlan(*make_pack(None, [1] * 32 + [2] * 96, 128)[:1], 128, ranks=1)
    assert "gated delta rule and convolution send nothing" in alone.explain()
