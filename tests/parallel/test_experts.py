"""Experts over gloo ranks: outputs, statistics and every gradient are those of one rank that holds all experts."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import automodel_c as amc
from automodel_c import _amcore
from automodel_c.parallel import RankFailure, checkpoint_context_fn, exchange, experts, wire
from automodel_c.parallel.exchange import Route, triples
from automodel_c.parallel.experts import expert_range
from tests.numerics import assert_as_good_as
from tests.ops.test_moe import naive, oracle, problem, run
from tests.ranks import here

SIZE, INNER, EXPERTS, K = 40, 24, 7, 3
PARTS = ("out", "prob_sum", "dhidden", "drouter", "dgate_up", "ddown")


def inputs(tokens, dtype, seed, skewed):
    """hidden, router, gate_up, down, padding, upstream of out and of prob_sum, of all ranks."""
    torch.manual_seed(seed)
    made = problem(tokens, SIZE, INNER, EXPERTS, K, dtype)
    if skewed:  # the last experts get no token
        made[1][-3:] = -made[0].mean(0) * 1e3
        made[0] = made[0].abs()
        made[1][-3:] = -made[1][-3:].abs()
    padding = torch.rand(tokens) < 0.2
    return made, padding, torch.randn(tokens, SIZE).to(dtype), torch.randn(EXPERTS)


def cuts_of(tokens, ranks):
    """Where each rank's tokens start: uneven, the second of more than two ranks has none."""
    first = tokens // ranks + 3
    return [0, first, *([first] * (ranks > 2)), *(tokens * (r + 1) // ranks for r in range(2, ranks - 1)), tokens]


def over_ranks(tokens, dtype, seed, skewed):
    """This rank's out and dhidden, its experts' gradients, the sums over ranks of the rest; load; the wire."""
    group = dist.group.WORLD
    ranks, rank = group.size(), dist.get_rank()
    (hidden, router, gate_up, down), padding, dout, dprob = (
        [x.to(here()) for x in part] if isinstance(part, list) else part.to(here())
        for part in inputs(tokens, dtype, seed, skewed)
    )
    begin, end = cuts_of(tokens, ranks)[rank : rank + 2]
    mine = slice(*expert_range(EXPERTS, ranks, rank))
    x = hidden[begin:end].clone()
    x[padding[begin:end]] = torch.nan
    leaves = [t.clone().requires_grad_() for t in (x, router, gate_up[mine], down[mine])]
    before = wire.sent
    out, load, prob_sum, real = amc.ops.moe(
        *leaves, top_k=K, padding=padding[begin:end], ep_group=group, return_router_stats=True
    )
    forward = wire.sent - before
    torch.autograd.backward([out, prob_sum], [dout[begin:end], dprob])
    summed = [t.detach().double().clone() for t in (prob_sum, leaves[1].grad, load, real)]
    for t in summed:
        dist.all_reduce(t)
    experts = [t.grad for t in leaves[2:]]
    return [out.detach(), leaves[0].grad, *experts], summed, forward, wire.sent - before - forward


def whole(results):
    """`PARTS` in order, load and real rows, of what `over_ranks` gave."""
    own = [torch.cat(parts) for parts in zip(*(r[0] for r in results), strict=True)]
    prob_sum, drouter, load, real = results[0][1]
    return [own[0], prob_sum.float(), own[1], drouter.to(own[0].dtype), *own[2:]], load, real


@pytest.mark.parametrize("skewed", [False, True], ids=["even", "skewed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_are_one_rank(rank_pools, seed, world, dtype, skewed):
    check_whole(rank_pools(world).run(over_ranks, 90, dtype, seed, skewed), 90, dtype, seed, skewed)


def test_more_ranks_than_experts(rank_pools, seed):
    """One of eight ranks holds no expert."""
    for dtype in (torch.float32, torch.bfloat16):
        check_whole(rank_pools(8).run(over_ranks, 90, dtype, seed, False), 90, dtype, seed, False)
    rank_pools(8).close()


def check_whole(results, tokens, dtype, seed, skewed):
    """The error rule for what `over_ranks` gave, and the bytes on the wire."""
    found, load, real = whole(results)
    made, padding, *upstream = inputs(tokens, dtype, seed, skewed)
    made[0][padding] = 0
    plain = run(naive, made, upstream, top_k=K, padding=padding)
    truth = run(oracle, [x.double() for x in made], upstream, top_k=K, padding=padding)
    for part, a, b, c in zip(PARTS, found, plain, truth, strict=True):
        assert_as_good_as(a, b, c, name=part, dtype=dtype)
    _, wanted, _, rows = amc.ops.moe(*made, top_k=K, padding=padding, return_router_stats=True)
    assert torch.equal(load, wanted.double()) and real == rows
    if skewed:
        assert not load[-3:].any() and not found[4][-3:].any() and not found[5][-3:].any()
    check_wire(results, made, padding, len(results))


def check_wire(results, made, padding, world):
    """A token travels once to each other rank that holds an expert of its: row, choice and weights; its row back."""
    logits = made[0].double() @ made[1].double().T
    chosen = torch.topk(logits, K).indices
    holder = torch.tensor([r for r in range(world) for _ in range(*expert_range(EXPERTS, world, r))])
    cuts, row = cuts_of(len(padding), world), SIZE * made[0].element_size()
    goes = torch.zeros(world, world, dtype=torch.int64)  # from, to
    for rank in range(world):
        for t in range(cuts[rank], cuts[rank + 1]):
            for to in set() if padding[t] else {*holder[chosen[t]].tolist()} - {rank}:
                goes[rank, to] += 1
    for rank, (_, _, forward, backward) in enumerate(results):
        sent, received = int(goes[rank].sum()), int(goes[:, rank].sum())
        assert forward == sent * (row + K * 8) + received * row + (world - 1) * 8
        assert backward == sent * row + received * (row + K * 4)


def recomputed(seed):
    """Gradients and exchanges of a layer with and without activation checkpointing."""
    (hidden, router, gate_up, down), _, dout, _ = inputs(40, torch.float32, seed, False)
    group = dist.group.WORLD
    mine = slice(*expert_range(EXPERTS, group.size(), dist.get_rank()))
    found = []
    for context in (None, checkpoint_context_fn):
        leaves = [t.clone().requires_grad_() for t in (hidden, router, gate_up[mine], down[mine])]
        before = wire.exchanges

        def layer(x, leaves=leaves):
            return amc.ops.moe(torch.sin(x), *leaves[1:], top_k=K, ep_group=group)

        x = leaves[0]
        out = layer(x) if context is None else checkpoint(layer, x, use_reentrant=False, context_fn=context)
        out.backward(dout)
        found.append((out.detach(), *(t.grad for t in leaves), wire.exchanges - before))
    return found


def test_recomputation_moves_no_rows(ranks, seed):
    for plain, again in ranks.run(recomputed, seed):
        assert all(torch.equal(a, b) for a, b in zip(plain[:-1], again[:-1], strict=True))
        assert plain[-1] == again[-1] == 5 + 3


def failure(kind):
    rank = dist.get_rank()
    (hidden, router, gate_up, down), *_ = inputs(8, torch.float32, 0, False)
    mine = slice(*expert_range(EXPERTS, 2, rank))
    call = {"hidden": hidden, "router_weight": router, "gate_up": gate_up[mine], "down": down[mine], "top_k": K}
    if rank == 1:
        call |= {"experts": {"down": down}, "kind": {"hidden": None}, "k": {"top_k": 0}, "nan": {"top_k": 9}}[kind]
    try:
        amc.ops.moe(**call, ep_group=dist.group.WORLD)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("experts", "ValueError: moe: down has 7 experts; rank 1 of 2 holds 3 of 7"),
        ("kind", "TypeError: moe: argument 'hidden' must be a torch tensor, not NoneType"),
        ("k", "ValueError: moe: top_k is 0"),
        ("nan", "ValueError: moe: top_k is 9, 1 to 7 experts are possible"),
    ],
)
def test_a_bad_argument_on_one_rank_is_raised_on_all(rank_pools, kind, words):
    pool = rank_pools(2)
    peer, bad = pool.run(failure, kind)
    pool.close()
    assert bad.startswith(words)
    assert peer.startswith(f"{RankFailure.__name__}: rank 1") and words in peer


def test_expert_range():
    assert [expert_range(7, 3, r) for r in range(3)] == [(0, 3), (3, 5), (5, 7)]
    assert expert_range(256, 8, 7) == (224, 256)
    assert [expert_range(1, 2, r) for r in range(2)] == [(0, 1), (1, 1)]


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("rows", [0, 1, 7, 90])
def test_tables_made_beside_the_rows_do_as_the_routes(seed, world, rows):
    """The tables that a GPU makes for itself, here on the CPU, against the Route made on the host, rank by rank."""
    generator = torch.Generator().manual_seed(seed)
    goes = [torch.rand(world, rows + r, generator=generator) < 0.4 for r in range(world)]
    sent = torch.stack([g.sum(1) for g in goes])
    for rank in range(world):
        x = torch.randn(rows + rank, 3, generator=generator)
        others, arriving = np.arange(world) != rank, sent[:, rank]
        to, row = np.nonzero(goes[rank].numpy())
        own = row[to == rank]
        starts = (arriving.cumsum(0) - arriving).numpy()
        counts, ones = arriving.numpy(), np.ones_like(row)
        route = Route(
            sends=triples(row[to != rank], np.arange((to != rank).sum()), ones[to != rank]),
            receipts=triples(*(c[others] for c in (np.cumsum(counts * others) - counts * others, starts, counts))),
            own=triples(own, starts[rank] + np.arange(len(own)), np.ones_like(own)),
            send_rows=tuple((sent[rank].numpy() * others).tolist()), receive_rows=tuple((counts * others).tolist()),
            own_after=int((to < rank).sum()), rows_in=rows + rank, rows_out=int(counts.sum()), used=True, words="",
        )  # fmt: skip
        there, back = experts._Places(goes[rank], sent[rank], arriving, rank).of(route)
        arrived = torch.randn(sum(route.receive_rows), 3, generator=generator)
        dout = torch.randn(route.rows_out, 3, generator=generator)
        host = exchange._Moves(route.sends, route.receipts, route.own, route.own_after, False)
        for name, source, length, (table, n) in (
            ("pack", x, sum(route.send_rows), there[0]),
            ("keep", x, route.rows_out, there[1]),
            ("unpack", arrived, route.rows_out, there[2]),
            ("pack_back", dout, sum(route.receive_rows), back[0]),
        ):
            expected, found = torch.zeros(length, 3), torch.zeros(length, 3)
            getattr(host, name)(expected, source)
            _amcore.exchange_copy_by(found, source, table, rows=n)
            assert torch.equal(expected, found), name
        expected, found = torch.zeros_like(x), torch.zeros_like(x)
        returned = torch.randn(sum(route.send_rows), 3, generator=generator)
        host.add(expected, returned, dout)
        _amcore.exchange_sum_by(found, returned, dout, back[1][0])
        assert torch.equal(expected, found)
