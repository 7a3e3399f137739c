"""Megatron-FSDP beside FSDP2 over NCCL, on one GPU and on two: loss, every gradient and every updated parameter by the
error rule, checkpoints to the bit."""

import importlib.metadata

import pytest
import torch

from tests.models import megatron_worker as worker
from tests.models.megatron_check import CHOSEN, check_gradients, check_updates
from tests.models.test_qwen3_5_cp import label_count, truth  # noqa: F401
from tests.ranks import RankPool

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("plain_memory")]

SEEDS = range(3)
BF16 = torch.bfloat16
# ranks, model, (dp, cp, tp), whether every microbatch reduces
LAYOUTS = {
    "one GPU": (1, "dense", (1, 1, 1), True),
    "one GPU, deferred": (1, "dense", (1, 1, 1), False),
    "one GPU, experts": (1, "experts", (1, 1, 1), True),
    "dp 2": (2, "dense", (2, 1, 1), True),
    "dp 2, deferred": (2, "dense", (2, 1, 1), False),
    "cp 2": (2, "dense", (1, 2, 1), True),
    "tp 2": (2, "key heads", (1, 1, 2), True),
    "tp 2, deferred": (2, "key heads", (1, 1, 2), False),
    "experts, dp 2": (2, "experts", (2, 1, 1), True),
}


@pytest.fixture(scope="module", autouse=True)
def installed():
    try:
        importlib.metadata.version("megatron-fsdp")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package megatron-fsdp is not installed")


@pytest.fixture(scope="module")
def pools():
    made = {}

    def get(world):
        if torch.cuda.device_count() < world:
            pytest.skip(f"needs {world} GPUs: NCCL takes no two ranks on one")
        if world not in made:
            made[world] = RankPool(world, "nccl", "cuda")
        return made[world]

    yield get
    for pool in made.values():
        pool.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_are_fsdp2s(pools, truth, layout):  # noqa: F811
    world, name, shape, per_microbatch = LAYOUTS[layout]
    arguments = name, SEEDS, shape, CHOSEN, label_count(CHOSEN), per_microbatch
    found, twins = (
        pools(world).run(worker.steps, strategy, *arguments, timeout=120)[0] for strategy in ("megatron_fsdp", "fsdp2")
    )
    check_gradients(found, twins, [truth(name, seed, *CHOSEN) for seed in SEEDS], layout)
    check_updates(found, twins, layout)


@pytest.mark.parametrize("world", [1, 2])
def test_bf16_computes_over_float32_masters(pools, world):
    """As near to float32's step as FSDP2 is, whose gradients are bf16's as well."""
    arguments = "dense", SEEDS, (world, 1, 1), CHOSEN, label_count(CHOSEN), True
    exact, twins = (pools(world).run(worker.steps, "fsdp2", *arguments, dtype)[0] for dtype in (None, BF16))
    found = pools(world).run(worker.steps, "megatron_fsdp", *arguments, BF16, activation_checkpointing=True)[0]
    check_gradients(found, twins, [{"loss": of[0][0][0], **of[0][0][2]} for of in exact], f"bf16 on {world}")
    check_updates(found, twins, f"bf16 on {world}")


@pytest.mark.parametrize("strategies", [("megatron_fsdp", "megatron_fsdp"), ("megatron_fsdp", "fsdp2")], ids=str)
@pytest.mark.parametrize(("world", "shape"), [(1, (1, 1, 1)), (2, (2, 1, 1)), (2, (1, 1, 2))])
def test_a_checkpoint_goes_on(pools, tmp_path, world, shape, strategies):
    """To the bit under the strategy that wrote it; under FSDP2 but for the order of sums."""
    name = "key heads" if shape[2] > 1 else "dense"
    for differences in pools(world).run(worker.round_trip, str(tmp_path), strategies, name, shape, True, BF16):
        assert max(differences.values()) <= (0.0 if len(set(strategies)) == 1 else 1e-4), differences


def test_ranks_without_rows_count_steps(pools):
    for empty, parameters, counted in pools(2).run(worker.empties, "dense", (2, 1, 1)):
        assert 0 < empty < parameters and counted
