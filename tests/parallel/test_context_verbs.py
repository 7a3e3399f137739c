"""plan, shard and gather: layouts, padding, gradients, and what is refused."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import automodel_c as amc
from automodel_c.parallel import ContextParallel, Prices
from automodel_c.parallel import attention as cp_attention
from automodel_c.parallel.exchange import Route, exchange
from automodel_c.parallel.plan import ContextPlan, make_pack
from tests.strategies import doc_ids


def plan_for(ranks, rank, tokens, layout="contiguous", **documents):
    """The plan of one of so many ranks, without any process group."""
    pack, tokens = make_pack(documents.get("cu_seqlens"), documents.get("doc_ids"), tokens)
    return ContextPlan(pack, tokens, ranks=ranks, rank=rank, layout=layout)


def held(ranks, tokens, layout="contiguous"):
    """Rows of the padded axis that each rank holds, in its order."""
    plans = [plan_for(ranks, r, tokens, layout) for r in range(ranks)]
    return [[i for begin, end in p.chunks_of(r) for i in range(begin, end)] for r, p in enumerate(plans)]


def test_known_layouts():
    assert held(4, 16)[2] == [8, 9, 10, 11]
    assert held(2, 8, "round_robin") == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert held(2, 128)[0] == list(range(64)), "documents [96, 32]: the flattened pack is cut, not each document"
    assert [len(rows) for rows in held(2, 127)] == [64, 64]


@given(ranks=st.integers(1, 9), tokens=st.integers(0, 200), layout=st.sampled_from(["contiguous", "round_robin"]))
def test_every_row_has_one_owner(ranks, tokens, layout):
    rows = held(ranks, tokens, layout)
    padded = -(-tokens // (2 * ranks)) * 2 * ranks
    assert sorted(i for mine in rows for i in mine) == list(range(padded)) and {len(r) for r in rows} == {
        padded // ranks
    }
    plan = plan_for(ranks, 0, tokens, layout)
    for rank, mine in enumerate(rows):
        assert plan.local_row(np.array(mine, dtype=np.int64)).tolist() == list(range(len(mine)))
        assert all(plan.owners[i // plan.chunk] == rank for i in mine)


@given(ids=doc_ids(60), ranks=st.integers(1, 5), layout=st.sampled_from(["contiguous", "round_robin"]))
def test_every_rank_makes_the_same_plan(ids, ranks, layout):
    """What one rank sends is what the others expect, rank by rank and row by row."""
    plans = [plan_for(ranks, r, len(ids), layout, doc_ids=ids) for r in range(ranks)]
    works = [p.attention(4, 2, 16, torch.float32) for p in plans]
    for name in ("keys", "queries", "outputs"):
        routes = [getattr(w, name) for w in works]
        table = np.array([r.send_rows for r in routes]), np.array([r.receive_rows for r in routes])
        assert (table[0] == table[1].T).all() and (np.diag(table[0]) == 0).all()
        assert len({r.used for r in routes}) == 1 and routes[0].used == bool(table[0].any())
    assert len({w.stays for w in works}) == 1 and len({w.apart for w in works}) == 1
    assert all((w.costs == works[0].costs).all() for w in works)


@given(ids=doc_ids(60), ranks=st.integers(1, 5), layout=st.sampled_from(["contiguous", "round_robin"]))
def test_pieces_are_the_documents_rows_by_rank(ids, ranks, layout):
    plan = plan_for(ranks, 0, len(ids), layout, doc_ids=ids)
    rows = held(ranks, len(ids), layout)
    for rank, doc, begin, end, local in plan.pieces.tolist():
        assert rows[rank][local : local + end - begin] == list(range(begin, end))
        assert plan.docs[doc][0] <= begin < end <= plan.docs[doc][1]
    found = sorted(i for _, _, begin, end, _ in plan.pieces.tolist() for i in range(begin, end))
    assert found == [i for i, number in enumerate(ids) if number]


def everything(tokens, layout):
    """Round trips of several dtypes, fills, and the gradients of shard and gather."""
    cp = ContextParallel(dist.group.WORLD)
    plan = cp.plan(tokens=tokens, layout=layout)
    draw = torch.Generator().manual_seed(tokens)
    whole = torch.randn(tokens, 3, 2, generator=draw)
    whole[: tokens // 3] = float("nan")
    kinds = [
        whole,
        whole.bfloat16(),
        whole.double(),
        torch.arange(tokens),
        torch.arange(tokens).int(),
        whole[:, 0, 0] > 0,
    ]
    for x in kinds:
        back = cp.gather(cp.shard(x, plan), plan)
        assert back.dtype == x.dtype and torch.equal(back.view(torch.uint8), x.contiguous().view(torch.uint8))
    labels = cp.shard(torch.arange(tokens), plan, fill=-100)
    mine = torch.tensor([i for b, e in plan.chunks_of(plan.rank) for i in range(b, e)], dtype=torch.int64)
    assert torch.equal(labels, torch.where(mine < tokens, mine, -100))

    x = torch.ones(tokens, 2, requires_grad=True)
    (cp.shard(x, plan, fill=9.0) * (1 + plan.rank)).sum().backward()
    own = torch.zeros(tokens, 2)
    own[mine[mine < tokens]] = 1 + plan.rank
    assert torch.equal(x.grad, own)

    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        local = torch.zeros(plan.local, 5, dtype=dtype, requires_grad=True)
        weight = (torch.arange(tokens) % 7).to(dtype)[:, None] * (1 + plan.rank)  # sums are exact in bfloat16
        (cp.gather(local, plan) * weight).sum().backward()
        total = sum(1 + r for r in range(plan.ranks))
        want = torch.where(mine < tokens, mine % 7 * total, 0).to(dtype)[:, None].expand(-1, 5)
        assert torch.equal(local.grad, want)
    return True


@pytest.mark.parametrize("layout", ["contiguous", "round_robin"])
@pytest.mark.parametrize(("world", "tokens"), [(2, 127), (3, 5), (3, 24), (4, 1), (2, 0)])
def test_shard_and_gather(rank_pools, world, tokens, layout):
    assert all(rank_pools(world).run(everything, tokens, layout))


def test_shard_and_gather_over_eight_ranks(rank_pools):
    for tokens in (0, 5, 8, 131):
        for layout in ("contiguous", "round_robin"):
            assert all(rank_pools(8).run(everything, tokens, layout))
    rank_pools(8).close()


@pytest.mark.parametrize("cp", [ContextParallel(None), ContextParallel()], ids=["none", "default"])
def test_one_rank_is_the_plain_path(seed, cp):
    """Shards or whole tensors, the same bits as the operator; nothing is sent."""
    cu = [0, 4, 4, 9]
    plan = cp.plan(cu_seqlens=cu, tokens=11)
    q, k, v = torch.randn(11, 4, 16), torch.randn(11, 2, 16), torch.randn(11, 2, 16)
    want = amc.ops.attention(q, k, v, cu_seqlens=cu)
    assert torch.equal(cp_attention(q, k, v, plan), want)
    local = cp_attention(*(cp.shard(x, plan, fill=float("nan")) for x in (q, k, v)), plan)
    assert torch.equal(cp.gather(local, plan), want) and not local[9:].any()
    assert torch.equal(cp.gather(cp.shard(q, plan), plan), q)


@pytest.mark.parametrize(
    ("documents", "error", "words"),
    [
        ({"cu_seqlens": [0, 4], "doc_ids": [1] * 4}, ValueError, "give cu_seqlens or doc_ids, not both"),
        ({}, ValueError, "give cu_seqlens, doc_ids or tokens"),
        ({"doc_ids": [1] * 4, "tokens": 5}, ValueError, "doc_ids has 4 elements, tokens is 5"),
        ({"cu_seqlens": [0, 6], "tokens": 5}, ValueError, "cu_seqlens ends at 6, tokens is 5"),
        ({"cu_seqlens": [1, 6]}, ValueError, r"cu_seqlens\[0\] is 1"),
        ({"cu_seqlens": [0.0, 1.0]}, TypeError, "cu_seqlens"),
        ({"tokens": -1}, ValueError, "tokens is -1"),
        ({"tokens": 4.0}, TypeError, "tokens is 4.0"),
        ({"tokens": 4, "layout": "zigzag"}, ValueError, "layout is 'zigzag'"),
        ({"tokens": 4, "scheme": "ring"}, ValueError, "scheme is 'ring'"),
        ({"tokens": 4, "prices": 1.0}, TypeError, "prices must be Prices or None, not float"),
    ],
)
def test_plan_refuses(documents, error, words):
    with pytest.raises(error, match=words):
        ContextParallel().plan(**documents)


def test_verbs_refuse():
    cp = ContextParallel()
    plan = cp.plan(tokens=4)
    q = torch.zeros(4, 2, 16)
    for call, error, words in (
        (lambda: cp.shard(torch.zeros(5), plan), ValueError, "shard: x has 5 rows, the plan has 4 tokens"),
        (lambda: cp.shard(torch.zeros(()), plan), ValueError, "shard: x has no axis"),
        (lambda: cp.shard([1], plan), TypeError, "shard: x must be a torch tensor, not list"),
        (lambda: cp.gather(torch.zeros(3), plan), ValueError, "gather: x has 3 rows, the plan has 4 local"),
        (lambda: cp.gather(torch.zeros(4), None), TypeError, "plan must come from ContextParallel.plan"),
        (lambda: cp.shard(q, plan_for(2, 1, 4)), ValueError, "the plan is for rank 1 of 2"),
        (lambda: cp_attention(q, q, q, None), TypeError, "plan must come from ContextParallel.plan"),
        (lambda: cp_attention(q, q[:3], q, plan), ValueError, "k has 3 rows, a rank holds 4"),
        (lambda: cp_attention(q[0], q, q, plan), ValueError, "q has 2 axes"),
        (lambda: cp_attention(q, q, q.double(), plan), TypeError, "v is torch.float64"),
        (lambda: cp_attention(q.half(), q.half(), q.half(), plan), TypeError, "q is torch.float16"),
        (lambda: cp_attention(q[:, :1], q, q, plan), ValueError, "1 query heads are not a multiple of 2"),
        (lambda: cp_attention(q, q, q[:, :1], plan), ValueError, r"v is \[4, 1, 16\], k \[4, 2, 16\]"),
        (lambda: cp_attention(q, q, q, plan, scale=float("inf")), ValueError, "scale is inf"),
        (lambda: ContextParallel("cp"), TypeError, "group must be a process group or None, not str"),
    ):
        with pytest.raises(error, match=words):
            call()


def test_plan_takes_lists_arrays_and_tensors_and_keeps_its_own():
    cp, cu = ContextParallel(), np.array([0, 3, 5])
    plan = cp.plan(cu_seqlens=cu)
    cu[1] = 4
    assert plan.docs.tolist() == [[0, 3], [3, 5]] and plan.tokens == 5 and plan.padded == 6
    assert cp.plan(cu_seqlens=torch.tensor([0, 3, 5], dtype=torch.int32)).docs.tolist() == plan.docs.tolist()
    assert cp.plan(doc_ids=(1, 1, 0, 2)).docs.tolist() == [[0, 2], [3, 4]]
    assert "2 documents, 5 tokens and 1 of padding" in repr(plan)


def test_explain_says_who_computes_what_and_why():
    dear, cheap = (Prices({"bfloat16": 1e-9}, byte, 1e-6) for byte in (1.0, 1e-12))
    pack, tokens = make_pack([0, 4096], None, None)

    def text(scheme, prices, *heads):
        return ContextPlan(pack, tokens, ranks=4, rank=0, scheme=scheme, prices=prices).explain(*heads)

    assert "rows stay home: their traffic would cost more" in text("auto", dear)
    assert "rows migrate: the time saved exceeds their traffic by" in text("auto", cheap, 3, 1)
    assert "the scheme was forced: 0 rows migrate" in text("home", cheap)
    assert "the scheme was forced: heads of 1 document are split, 3072 rows' worth of queries travel" in text(
        "heads", dear
    )
    assert "  heads of 1 document split, other rows: home " in text("auto", cheap)
    split = "heads of 1 document are split, 3072 rows' worth of queries travel: the time saved exceeds"
    assert split in text("auto", cheap, 32, 32)
    with pytest.raises(ValueError, match="no score of float32, only of bfloat16"):
        ContextPlan(pack, tokens, prices=cheap).explain(dtype=torch.float32)
    short, tokens = make_pack([0, 16, 32, 48, 64], None, None)
    alike = ContextPlan(short, tokens, ranks=4, rank=0).explain()
    assert "every rank is within 5 % of the mean as it is" in alike and alike.count("1.000") == 4


def operator_checks():
    """The operator by itself: schema, fake kernel and autograd; twice backward; the gradient has one of its own."""
    rank, world = dist.get_rank(), dist.get_world_size()
    moves = np.array([[0, 0, 0, 1, 2], [1, 0, 3, 4, 1], [0, 1, 1, 0, 3], [1, 1, 0, 3, 1]])
    route = Route.of(moves, rank, world, 5, 6)
    x = torch.randn(5, 3, requires_grad=True)
    arguments = (route.sends, route.receipts, route.own, route.send_rows, route.receive_rows, route.own_after,
                 route.rows_out, route.used, route.runs, dist.group.WORLD.group_name, route.words)  # fmt: skip
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.automodel_c.exchange_rows.default, (x, *arguments), test_utils=tests)
    out = exchange(x, route, dist.group.WORLD)
    compiled = torch.compile(lambda t: exchange(t, route, dist.group.WORLD), backend="aot_eager")
    assert torch.equal(out, compiled(x))
    upstream = torch.randn_like(out)
    first, second = (torch.autograd.grad(out, x, upstream, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    transposed = torch.autograd.grad(out, x, upstream.T.contiguous().T, retain_graph=True)[0]
    assert torch.equal(first, transposed)
    again = torch.autograd.grad(out, x, upstream.requires_grad_(), create_graph=True)[0]
    again.sum().backward()
    assert torch.equal(again, first)
    return torch.equal(upstream.grad, exchange(torch.ones_like(x), route, dist.group.WORLD))


def test_the_operator(ranks):
    assert ranks.run(operator_checks) == [True, True]


def strided(ids):
    """Inputs that are slices of one buffer, and an upstream gradient that autograd expanded."""
    cp = ContextParallel(dist.group.WORLD)
    plan = cp.plan(doc_ids=ids, scheme="balanced")
    parts = [torch.randn(len(ids), n, 16, generator=torch.Generator().manual_seed(n)) for n in (4, 2, 2)]
    buffer = cp.shard(torch.cat(parts, dim=1), plan).requires_grad_()
    q, k, v = buffer.split([4, 2, 2], dim=1)
    cp_attention(q, k, v, plan).sum().backward()
    again = buffer.detach().clone().requires_grad_()
    q, k, v = (x.contiguous() for x in again.split([4, 2, 2], dim=1))
    cp_attention(q, k, v.transpose(0, 1).contiguous().transpose(0, 1), plan).sum().backward()
    return torch.equal(buffer.grad, again.grad)


def test_strided_inputs_and_gradients(ranks):
    assert ranks.run(strided, [1] * 30 + [2] * 7) == [True, True]
