"""Two GPUs that split weights, or layers, over NCCL: loss and every gradient are one rank's by the error rule, as the
tests over gloo have it on the CPU."""

import pytest
import torch

from tests.models import packs, pp_worker, tp_worker
from tests.models.test_qwen3_5_cp import label_count, plain, trained, truth  # noqa: F401
from tests.models.test_qwen3_5_ep import norms_of
from tests.numerics import assert_as_good_as, ulp_of
from tests.ranks import RankPool

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("plain_memory")]

CHOSEN = ("text", "clips", "tiny", "padding")
SEEDS = range(2)  # gradients are reduced in each microbatch for even ones, held for odd ones
STAGES = {"dense": ("dense", 1), "dense, interleaved": ("dense", 2), "experts": ("experts", 1)}


@pytest.fixture(scope="module")
def pair():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: NCCL takes no two ranks on one")
    pool = RankPool(2, "nccl", "cuda")
    yield pool
    pool.close()


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_tensor_parallel(pair, plain, truth, name):  # noqa: F811
    results = pair.run(
        tp_worker.steps, name, SEEDS, (1, 1, 2), 1, CHOSEN, label_count(CHOSEN), checkpointing=True, timeout=120
    )
    found, norms = ([of_seed[i] for of_seed in results[0]] for i in (0, 1))
    check(found, norms, *([of(name, seed, *CHOSEN) for seed in SEEDS] for of in (plain, truth)), f"{name}, tp 2")
    assert [norm for _, norm in results[1]] == norms


@pytest.mark.parametrize("stages", STAGES)
def test_pipeline(pair, plain, truth, stages):  # noqa: F811
    name, chunks = STAGES[stages]
    results = pair.run(pp_worker.steps, name, SEEDS, (1, 1, 1, 2), 1, chunks, CHOSEN, label_count(CHOSEN), timeout=120)
    found = [{key: x for rank in of_seed for key, x in rank[0].items()} for of_seed in zip(*results, strict=True)]
    norms = [norm for _, norm, _ in results[0]]
    naive, exact = ([trained(name, of(name, seed, *CHOSEN)) for seed in SEEDS] for of in (plain, truth))
    check(found, norms, naive, exact, f"{stages}, pp 2")
    for others in results:
        assert [norm for _, norm, _ in others] == norms
        assert [full for *_, full in others] == [0] * len(SEEDS)


def check(found, norms, naive, exact, name):
    packs.compare(found, naive, exact, name)
    assert all(abs(a - b) <= ulp_of(float(b), "float32") for a, b in zip(norms, norms_of(found), strict=True))
    assert_as_good_as(torch.stack(norms), norms_of(naive).float(), norms_of(exact), name=f"{name}: norms")


@pytest.mark.parametrize("rows", [1024, 1536, 640])
def test_products_travel_in_pieces(pair, seed, rows):
    """Two gathers and two sums are fused, of every number of rows, and the results as good as one GPU's."""
    for found in pair.run(tp_worker.products_in_pieces, rows, 512, 768, seed, timeout=120):
        assert [fused for _, fused in found.values()] == [0, 0, 0, 4]
        for how in ("eager", "compiled"):
            for values, name in zip(
                zip(*(found[of][0] for of in (how, "plain", "exact")), strict=True),
                ("out", "x", "gate", "up", "down"),
                strict=True,
            ):
                assert_as_good_as(*values, name=f"{how}: {name}")
