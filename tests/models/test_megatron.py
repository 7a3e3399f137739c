"""Megatron-FSDP: what is refused, and its code on the CPU beside FSDP2, where streams are nothing and ranks are gloo's.

The package computes on GPUs alone; tests/cuda/test_megatron_cuda.py runs it there. Here is run what it does with
buffers, shards, hooks and meshes, which is the same code whatever the device.
"""

import importlib.metadata
import re

import pytest
import torch

from automodel_c.parallel import megatron
from tests.models import megatron_worker as worker
from tests.models.megatron_check import CHOSEN, check_gradients, check_updates
from tests.models.test_qwen3_5_cp import label_count, truth  # noqa: F401

SEEDS = range(3)
STRATEGIES = [("megatron_fsdp", "megatron_fsdp"), ("megatron_fsdp", "fsdp2"), ("fsdp2", "megatron_fsdp")]
BF16 = torch.bfloat16
# model, (dp, cp, tp), whether every microbatch reduces, whether weights are freed
LAYOUTS = {
    "dp 2": ("dense", (2, 1, 1), True, None),
    "dp 2, deferred": ("dense", (2, 1, 1), False, None),
    "experts, dp 2, whole weights": ("experts", (2, 1, 1), True, False),
    "cp 2": ("dense", (1, 2, 1), True, None),
    "tp 2": ("key heads", (1, 1, 2), True, None),
    "dp 2 x tp 2, deferred": ("key heads", (2, 1, 2), False, None),
    "experts, dp 2 x cp 2": ("experts", (2, 2, 1), True, None),
}


@pytest.fixture(scope="module")
def installed():
    try:
        importlib.metadata.version("megatron-fsdp")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package megatron-fsdp is not installed")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_are_fsdp2s(rank_pools, truth, layout):  # noqa: F811
    name, shape, per_microbatch, reshard = LAYOUTS[layout]
    world = shape[0] * shape[1] * shape[2]
    ranks, seeds = rank_pools(world), SEEDS[: 1 if world > 2 else len(SEEDS)]  # each is a minute of four ranks
    arguments = name, seeds, shape, CHOSEN, label_count(CHOSEN), per_microbatch
    found = ranks.run(worker.steps, "megatron_fsdp", *arguments, reshard_after_forward=reshard, timeout=120)[0]
    twins = ranks.run(worker.steps, "fsdp2", *arguments, timeout=120)[0]
    check_gradients(found, twins, [truth(name, seed, *CHOSEN) for seed in seeds], layout)
    check_updates(found, twins, layout)


@pytest.mark.usefixtures("installed")
def test_bf16_computes_over_float32_masters(ranks):
    """As near to float32's step as FSDP2 is."""
    arguments = "dense", SEEDS, (2, 1, 1), CHOSEN, label_count(CHOSEN), True
    exact, twins = (ranks.run(worker.steps, "fsdp2", *arguments, dtype, timeout=120)[0] for dtype in (None, BF16))
    found = ranks.run(worker.steps, "megatron_fsdp", *arguments, BF16, activation_checkpointing=True, timeout=120)[0]
    check_gradients(found, twins, [{"loss": of[0][0][0], **of[0][0][2]} for of in exact], "bf16")
    check_updates(found, twins, "bf16")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("strategies", STRATEGIES, ids=" to ".join)
@pytest.mark.parametrize(("name", "shape"), [("dense", (2, 1, 1)), ("key heads", (2, 1, 2))])
def test_a_checkpoint_goes_on(rank_pools, tmp_path, name, shape, strategies):
    """To the bit under the strategy that wrote it; under the other but for the order of sums over tp."""
    ranks = rank_pools(shape[0] * shape[1] * shape[2])
    for differences in ranks.run(worker.round_trip, str(tmp_path), strategies, name, shape, True, BF16, timeout=120):
        assert max(differences.values()) <= (0.0 if len(set(strategies)) == 1 else 1e-4), differences


@pytest.mark.usefixtures("installed")
def test_ranks_without_rows_count_steps(ranks):
    for empty, parameters, counted in ranks.run(worker.empties, "dense", (2, 1, 1)):
        assert 0 < empty < parameters and counted


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("source", ["drawn", "files"])
def test_a_model_on_the_meta_device(ranks, tmp_path, source):
    """Its shards take the weights that one rank's model has, and no rank is asked for more; it is exported whole."""
    for same, exported in ranks.run(worker.from_meta, str(tmp_path), source, BF16):
        assert same and exported


def test_uneven_shards_are_saved_and_read(ranks, tmp_path):
    """By torch's checkpoints, of ranks that hold nothing as well, and onto other rows."""
    assert ranks.run(worker.uneven_round_trip, str(tmp_path)) == [True, True]


def test_the_mesh_is_flattened(rank_pools):
    for names, shape, rows, columns in rank_pools(4).run(worker.flattened, (1, 2, 2)):
        assert names == ("dp_cp", "tp") and shape == (2, 2)
        assert rows in ([0, 1], [2, 3]) and columns in ([0, 2], [1, 3])


def test_the_cpu_is_refused(ranks):
    for said in ranks.run(worker.refused):
        assert said.startswith("NotImplementedError: distributed.strategy=megatron_fsdp trains on GPUs alone, found")
        assert "'cpu': megatron-fsdp gathers and reduces on CUDA streams" in said


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (None, "needs the package megatron-fsdp, which is not here: pip install 'megatron-fsdp>=0.5'"),
        ("0.4.0", "needs megatron-fsdp 0.5 or later, found 0.4.0: pip install"),
        ("0.3.1", "found 0.3.1"),
        ("0.2.0.dev1", "found 0.2.0.dev1"),
    ],
)
def test_releases_before_05_are_refused(monkeypatch, version, words):
    def told(_):
        if version is None:
            raise importlib.metadata.PackageNotFoundError
        return version

    monkeypatch.setattr(importlib.metadata, "version", told)
    with pytest.raises(NotImplementedError, match=re.escape(words)):
        megatron.require("cuda")


@pytest.mark.parametrize("version", ["0.5.0", "0.6.1", "1.0rc1", "0.10"])
def test_releases_from_05_on_are_taken(monkeypatch, version):
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    monkeypatch.setattr(importlib, "import_module", lambda name: name)
    assert megatron.require("cuda") == "megatron_fsdp"


@pytest.mark.parametrize(
    ("per_microbatch", "reshard", "zero"),
    [
        (True, None, "optim_grads_params"),
        (True, True, "optim_grads_params"),
        (True, False, "optim_grads"),
        (False, None, "optim"),
        (False, False, "optim"),
        (False, True, None),
    ],
)
def test_reduction_is_the_packages(per_microbatch, reshard, zero):
    if zero is None:
        with pytest.raises(ValueError, match="reshard_after_forward=true needs"):
            megatron.zero_strategy(per_microbatch, reshard)
    else:
        assert megatron.zero_strategy(per_microbatch, reshard) == zero


@pytest.mark.usefixtures("installed")
def test_what_it_cannot_do_is_refused(ranks):
    for told in ranks.run(worker.refusals):
        for said, words in zip(
            told,
            [
                "NotImplementedError: distributed.strategy=megatron_fsdp with distributed.ep_size=2 is not supported",
                "NotImplementedError: distributed.strategy=megatron_fsdp needs model.operators: automodel_c",
                "NotImplementedError: distributed.strategy=megatron_fsdp with distributed.mp_policy.output_dtype",
                "ValueError: strategy is 'ddp', one of fsdp2, megatron_fsdp is needed",
            ],
            strict=True,
        ):
            assert said.startswith(words), said
