"""The model cut into stages on gloo ranks: loss and every gradient are one rank's, whatever the order of microbatches.

The error rule as in test_qwen3_5_cp.
"""

import pytest
import torch

from automodel_c.parallel.pipeline import PipelineParallel
from automodel_c.parallel.pipeline_order import pipeline_order
from tests.models import cp_worker, packs
from tests.models import pp_worker as worker
from tests.models.test_qwen3_5_cp import label_count, plain, trained, truth  # noqa: F401
from tests.models.test_qwen3_5_ep import norms_of
from tests.numerics import assert_as_good_as, ulp_of
from tests.ranks import RanksFailed

CHOSEN = ("text", "clips", "tiny", "padding")  # microbatches of other lengths each
# model, (dp, cp, tp, pp), how many of a stage's ranks share experts, stages on each rank
LAYOUTS = {
    "dense, pp 2": ("dense", (1, 1, 1, 2), 1, 1),
    "dense, pp 2, interleaved": ("dense", (1, 1, 1, 2), 1, 2),
    "dense, pp 4": ("dense", (1, 1, 1, 4), 1, 1),
    "experts, pp 2": ("experts", (1, 1, 1, 2), 1, 1),
    "experts, pp 4": ("experts", (1, 1, 1, 4), 1, 1),
    "one auxiliary loss, pp 2 interleaved": ("frozen", (1, 1, 1, 2), 1, 2),
    "one auxiliary loss, cp 2 x pp 2": ("frozen", (1, 2, 1, 2), 1, 1),
    "experts, dp 2 x pp 2, ep 2": ("experts", (2, 1, 1, 2), 2, 1),
    "dense, dp 2 x tp 2 x pp 2": ("dense", (2, 1, 2, 2), 1, 1),
    "experts, dp 2 x tp 2 x pp 2, ep 4": ("experts", (2, 1, 2, 2), 4, 1),
}
SEEDS = range(4)  # gradients are reduced in each microbatch for even ones, held for odd ones


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradients_are_one_ranks(rank_pools, plain, truth, layout):  # noqa: F811
    """And so is their norm, the same bits on every rank. Where gradients are reduced in each microbatch none of whole
    weights is left behind it."""
    name, shape, ep, chunks = LAYOUTS[layout]
    dp, cp, tp, pp = shape
    ranks = rank_pools(dp * cp * tp * pp)
    results = ranks.run(worker.steps, name, SEEDS, shape, ep, chunks, CHOSEN, label_count(CHOSEN), timeout=120)
    found = [{key: x for rank in of_seed for key, x in rank[0].items()} for of_seed in zip(*results, strict=True)]
    norms = [norm for _, norm, _ in results[0]]
    naive, exact = ([trained(name, of(name, seed, *CHOSEN)) for seed in SEEDS] for of in (plain, truth))
    packs.compare(found, naive, exact, layout)
    for others in results:
        assert [norm for _, norm, _ in others] == norms
        assert [full for *_, full in others] == [0] * len(SEEDS)
    assert all(abs(a - b) <= ulp_of(float(b), "float32") for a, b in zip(norms, norms_of(found), strict=True))
    assert_as_good_as(torch.stack(norms), norms_of(naive).float(), norms_of(exact), name="norms")


@pytest.mark.parametrize(("shape", "chunks"), [((1, 1, 1, 2), 1), ((1, 1, 1, 2), 2), ((1, 2, 1, 2), 1)])
def test_logits_are_on_the_last_stages_ranks(rank_pools, shape, chunks):
    rows, model = [5, 0, 17], cp_worker.build("dense", 0)
    with torch.no_grad():
        expected = model.logits({k: v for k, v in cp_worker.PACKS["clips"].items() if k != "labels"}, rows)
    found = rank_pools(shape[1] * shape[3]).run(worker.answers, "dense", shape, chunks, "clips", rows)
    assert all(x is None for x in found[: len(found) // 2])
    for logits in found[len(found) // 2 :]:
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("shape", "chunks"), [((1, 1, 1, 4), 1), ((2, 1, 1, 2), 2)])
def test_prewarming_opens_every_way(rank_pools, shape, chunks):
    found = rank_pools(4).run(worker.prewarmed, shape, chunks)
    assert [done for done, _ in found] == [[{"comm_groups": True}] * 2] * 4
    last = shape[0]  # ranks of the last stage
    assert [told for _, told in found] == [False] * (4 - last) + [True] * last


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 7, 8])
def test_pipeline_order(ranks, chunks, microbatches):
    """Everything once; a run in these orders comes to its end, with what arrives in the order in which it was sent."""
    orders = pipeline_order(ranks, chunks, microbatches)
    every = {(kind, c, m) for kind in "FB" for c in range(chunks) for m in range(microbatches)}
    assert all(len(order) == len(every) and set(order) == every for order in orders)
    assert run_in(orders, ranks, chunks)
    for r in range(ranks):
        for kind, back in (("F", False), ("B", True)):
            sent = arrivals(orders[r], kind, ranks, chunks, r, back)
            other = orders[(r - 1 if back else r + 1) % ranks]
            taken = [
                of for of in other if of[0] == kind and needs(of, ranks, chunks, (r - 1 if back else r + 1) % ranks)
            ]
            assert ranks == 1 or sent == taken


def arrivals(order, kind, ranks, chunks, rank, back):
    """What a rank's neighbour gets of it, in order."""
    found = []
    for what, c, m in order:
        stage = c * ranks + rank + (-1 if back else 1)
        if what == kind and 0 <= stage < ranks * chunks:
            found.append((kind, stage // ranks, m))
    return found


def needs(of, ranks, chunks, rank):
    kind, c, _ = of
    stage = c * ranks + rank
    return stage > 0 if kind == "F" else stage < ranks * chunks - 1


def run_in(orders, ranks, chunks):
    at, done, moved = [0] * ranks, set(), True
    while moved:
        moved = False
        for r, order in enumerate(orders):
            if at[r] < len(order):
                kind, c, m = order[at[r]]
                stage = c * ranks + r
                before = stage - 1 if kind == "F" else stage + 1
                ready = not 0 <= before < ranks * chunks or (kind, before, m) in done
                if ready and (kind == "F" or ("F", stage, m) in done):
                    done.add((kind, stage, m))
                    at[r], moved = at[r] + 1, True
    return all(a == len(order) for a, order in zip(at, orders, strict=True))


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 5), (4, 8), (4, 3)])
def test_one_forward_one_backward_holds_few_microbatches(ranks, microbatches):
    for rank, order in enumerate(pipeline_order(ranks, 1, microbatches)):
        held = most = 0
        for kind, _, _ in order:
            held += 1 if kind == "F" else -1
            most = max(most, held)
        assert most == min(ranks - rank, microbatches)


@pytest.mark.parametrize(("layers", "ranks", "chunks"), [(64, 4, 1), (40, 4, 2), (7, 3, 2), (4, 4, 1), (6, 4, 1)])
def test_layers_of_stages(layers, ranks, chunks):
    held = [PipelineParallel(s % ranks, ranks, chunks).layers(layers, s // ranks) for s in range(ranks * chunks)]
    assert [i for stage in held for i in stage] == list(range(layers))
    sizes = [len(stage) for stage in held]
    assert max(sizes) - min(sizes) <= 1 and max(sizes[0], sizes[-1]) <= max(sizes[1:-1], default=max(sizes))
    with pytest.raises(ValueError, match=f"{ranks * chunks - 1} layers cannot be cut into {ranks * chunks} stages"):
        PipelineParallel(0, ranks, chunks).layers(ranks * chunks - 1, 0)


@pytest.mark.parametrize("rank", [0, 2, 3])
def test_a_stage_that_fails_makes_all_raise(rank_pools, rank):
    with pytest.raises(RanksFailed) as failed:
        rank_pools(4).run(worker.fails, (1, 1, 1, 4), 1, rank, timeout=60, grace=30)
    assert sorted(failed.value.reports) == [0, 1, 2, 3]
    for other, text in failed.value.reports.items():
        assert "the layer's own" in text and (other == rank or f"RankFailure: rank {rank}" in text)
