"""The gated delta rule of a pack over gloo ranks: out and every gradient are those of one rank, bytes are the plan's.

The plain twin is transformers' fallback, document by document; the truth is the recurrence in float64.
"""

import functools

import pytest
import torch

from automodel_c import docs_from_ids, ops
from automodel_c.reference.gdn import gated_delta_rule as reference
from tests.numerics import assert_as_good_as, draws_for, pool
from tests.ops.test_gdn import plain
from tests.parallel import gdn_worker as worker
from tests.parallel.gdn_worker import PACKS

NAMES = ("o", "dq", "dk", "dv", "dg", "dbeta")
F32, BF16 = torch.float32, torch.bfloat16


def gradients(function, whole, docs, options):
    *leaves, dout = whole
    leaves = [x.requires_grad_() for x in leaves]
    out = function(*leaves, docs, **options)[0]
    found = torch.autograd.grad(out, leaves, dout, allow_unused=True)
    return [out.detach(), *(torch.zeros_like(x) if d is None else d for x, d in zip(leaves, found, strict=True))]


@functools.cache
def expected(ids, drawn, options):
    """[plain twin, truth] of the whole pack on one rank."""
    docs, drawn, options = docs_from_ids(list(ids)), dict(drawn), dict(options)
    whole = worker.inputs(len(ids), **drawn)
    twin = gradients(plain, whole, docs, options)
    wide = [x.detach().double() for x in whole]
    return twin, gradients(reference, wide, docs, options)


def check(results, ids, options=None, **drawn):
    """The error rule for what `worker.run` gathered, and that every rank has the same bits."""
    first = results[0][0]
    for other, *_ in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    if not any(ids):
        assert all(not x.any() for x in first)
        return
    twin, truth = expected(tuple(ids), tuple(drawn.items()), tuple((options or {}).items()))
    for name, ours, naive, true in zip(NAMES, first, twin, truth, strict=True):
        assert_as_good_as(ours, naive, true, name=name)


def check_bytes(results):
    """What went over the wire is what the plan said; the way back takes as much."""
    for _, forward, total, planned in results:
        assert forward == planned
        assert total[0] == total[1] == forward[0] + forward[1]
    assert sum(r[1][0] for r in results) == sum(r[1][1] for r in results)


@pytest.mark.parametrize("layout", ["contiguous", "round_robin"])
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", PACKS)
def test_gated_delta_rule_is_that_of_one_rank(rank_pools, name, world, layout):
    results = rank_pools(world).run(worker.run, PACKS[name], layout=layout)
    check(results, PACKS[name])
    check_bytes(results)


def gate_sums(dg, g):
    """What becomes of the gradients of A_log and dt_bias, but for factors of each row alone."""
    return (dg.double() * g.double()).sum(0).to(dg.dtype), dg.double().sum(0).to(dg.dtype)


def drawn_gates(ids, seeds, **drawn):
    return [worker.run(ids, seed=seed, **drawn)[0][4] for seed in seeds]


def test_sums_of_gates_gradients_are_as_exact_as_on_one_rank(rank_pools):
    """One document over four ranks, one rank as the twin. A sum is one number a head: many are asked together."""
    ids, seeds, drawn = [1] * 150, range(draws_for(worker.HEADS[1])), {"gate": 0.1}
    docs, draws = docs_from_ids(ids), []
    for seed, found in zip(seeds, rank_pools(4).run(drawn_gates, ids, seeds, **drawn)[0], strict=True):
        whole = worker.inputs(len(ids), seed=seed, **drawn)
        alone = gradients(lambda *x: ops.gated_delta_rule(*x[:5], cu_seqlens=x[5].flatten()), [*whole], docs, {})[4]
        true = gradients(reference, [x.detach().double() for x in whole], docs, {})[4]
        draws.append([torch.stack(gate_sums(dg, whole[3].detach())) for dg in (found, alone, true)])
    assert_as_good_as(*pool(draws), name="sums of dg")
