"""Runs of a recipe under strategy megatron_fsdp, on the CPU as tests/models/test_megatron.py has it."""

import importlib.metadata
import json

import pytest

from tests.models import megatron_worker as worker

from .conftest import DIGITS

STRATEGY = "distributed.strategy=megatron_fsdp"


@pytest.fixture(scope="module", autouse=True)
def installed():
    try:
        importlib.metadata.version("megatron-fsdp")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package megatron-fsdp is not installed")


@pytest.mark.parametrize("more", [[], ["distributed.defer_fsdp_grad_sync=true"]], ids=["each microbatch", "deferred"])
def test_a_run_is_fsdp2s(rank_pools, tiny, tmp_path, more):
    """Losses, norms and held-out score; saved, resumed to the bit and exported."""
    small = [*tiny, *more, "step_scheduler.global_batch_size=8", "checkpoint.is_async=true"]

    def run(name, steps, *overrides):
        rank_pools(2).run(
            worker.trained, DIGITS, [*small, f"step_scheduler.max_steps={steps}", f"output_dir={tmp_path / name}",
                                     "step_scheduler.ckpt_every_steps=1", *overrides], timeout=120,
        )  # fmt: skip
        return [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]

    found, expected = run("ours", 3, STRATEGY), run("theirs", 3)
    for ours, theirs in zip(found, expected, strict=True):
        for key in ("loss", "grad_norm"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4)
        assert (ours["tokens"], ours["num_label_tokens"]) == (theirs["tokens"], theirs["num_label_tokens"])
    scores = [
        json.loads((tmp_path / of / "validation.jsonl").read_text().splitlines()[-1]) for of in ("ours", "theirs")
    ]
    assert scores[0]["loss"] == pytest.approx(scores[1]["loss"], rel=1e-4)
    resumed = run("again", 3, STRATEGY, f"checkpoint.restore_from={tmp_path / 'ours/checkpoints/step_2'}")
    assert [resumed[-1][key] for key in ("step", "loss", "grad_norm")] == [
        found[-1][key] for key in ("step", "loss", "grad_norm")
    ]
    assert (tmp_path / "again/hf/model.safetensors").read_bytes() == (
        tmp_path / "ours/hf/model.safetensors"
    ).read_bytes()
