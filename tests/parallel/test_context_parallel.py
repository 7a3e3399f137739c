"""Attention of a pack over gloo ranks: out and every gradient are those of one rank, and bytes are the plan's."""

import pytest
import torch

from automodel_c import docs_from_ids
from automodel_c.reference.attention import attention as reference
from tests.numerics import assert_as_good_as
from tests.ops.test_attention import eager
from tests.ops.test_attention import run as run_one
from tests.parallel import context_worker as worker
from tests.parallel.context_worker import DIM, HEADS, PACKS

LAYOUTS, SCHEMES = ("contiguous", "round_robin"), ("home", "balanced", "heads", "auto")
CASES = [
    *((2, layout, scheme) for layout in LAYOUTS for scheme in SCHEMES),
    *((3, "contiguous", scheme) for scheme in ("home", "balanced", "heads")),
    *((3, "round_robin", scheme) for scheme in ("home", "heads")),
    *((4, "contiguous", scheme) for scheme in ("balanced", "heads")),
    *((4, "round_robin", scheme) for scheme in ("home", "heads")),
]


def check(results, ids, dtype=torch.float32, heads=HEADS, dim=DIM, seed=0, causal=True):
    """The error rule for what `worker.run` gathered, and that every rank has the same bits."""
    first = results[0][0]
    for other, *_ in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    whole = worker.inputs(len(ids), dtype, heads, dim, seed)
    docs = docs_from_ids(ids)
    if not len(docs):
        assert all(not x.any() for x in first)
        return
    naive = run_one(*whole, eager, docs=docs, causal=causal)
    truth = run_one(*(x.double() for x in whole), reference, docs=docs, causal=causal)
    for name, ours, plain, true in zip(("out", "dq", "dk", "dv"), first, _no_lse(naive), _no_lse(truth), strict=True):
        assert_as_good_as(ours, plain, true, name=name)


def _no_lse(results):
    return [results[0], *results[2:]]


def check_bytes(results):
    """What went over the wire is what the plan said; the way back takes as much."""
    for _, forward, total, said, _ in results:
        assert forward == said
        assert total[0] == forward[0] + forward[1] and total[1] == total[0]
    assert sum(r[1][0] for r in results) == sum(r[1][1] for r in results)


@pytest.mark.parametrize(("world", "layout", "scheme"), CASES)
def test_attention_is_that_of_one_rank(rank_pools, world, layout, scheme):
    cases = [(ids, True) for ids in PACKS.values()] + [
        (PACKS[name], False) for name in ("straddling", "gaps", "uneven")
    ]
    found = rank_pools(world).run(worker.run_all, cases, layout=layout, scheme=scheme, poison=True)
    for (ids, causal), results in zip(cases, zip(*found, strict=True), strict=True):
        check(results, ids, causal=causal)
        check_bytes(results)
