import os
import subprocess
import sys

import pytest
import torch

from automodel_c.data.collate import collate
from automodel_c.recipes.calls import cross_entropy_sum, model_inputs
from automodel_c.recipes.config import load_recipe
from automodel_c.recipes.finetune_vlm import build
from automodel_c.recipes.runtime import start_ranks

from .conftest import DIGITS, ROOT
from .step_worker import WAYS, gradients

PARTS = (  # every part of the loss
    "model.config.text_config.output_router_logits=true",
    "model.config.text_config.router_aux_loss_coef=0.3",
    "model.config.text_config.mtp_num_hidden_layers=1",
)


def test_cross_entropy_sum():
    logits = torch.randn(2, 3, 5, requires_grad=True)
    labels = torch.tensor([[1, -100, 4], [-100, -100, 0]])
    loss = cross_entropy_sum(logits, labels)
    expected = -sum(logits.log_softmax(-1)[b, t, labels[b, t]] for b, t in ((0, 0), (0, 2), (1, 2)))
    assert torch.allclose(loss, expected)


def test_cross_entropy_sum_no_label():
    logits = torch.full((1, 3, 5), float("nan"), requires_grad=True)
    loss = cross_entropy_sum(logits, torch.full((1, 3), -100))
    loss.backward()
    assert loss.item() == 0 and (logits.grad == 0).all()


def test_model_inputs_of_videos(tiny, tmp_path, monkeypatch):
    """What the model says of a batch of images and clips is what it says when videos are handed over as such."""
    monkeypatch.setenv("MASTER_PORT", "29537")
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(key, value)
    recipe = load_recipe(DIGITS, [*tiny, "model.operators=patched"])
    with start_ranks(recipe) as runtime, torch.no_grad():
        run = build(recipe, runtime)
        packs = [next(p for p in run.dataset if p[key]) for key in ("n_videos", "n_images", "n_videos")]
        batch = collate(packs, run.processor)
        inputs = model_inputs(batch, runtime.device, run.model.config)
        assert "pixel_values_videos" not in inputs
        names = ("input_ids", "position_ids", "attention_mask", "mm_token_type_ids", "pixel_values", "image_grid_thw")
        plain = {name: batch[name] for name in (*names, "pixel_values_videos", "video_grid_thw")}
        ours, theirs = run.model(**inputs, use_cache=False).logits, run.model(**plain, use_cache=False).logits
    torch.testing.assert_close(ours, theirs)


def test_gradients_do_not_depend_on_ranks(tiny, tmp_path):
    """Losses and gradients of one global batch on one rank and on two, reduced in every microbatch and deferred; what
    is recomputed in backward has the same bits."""
    overrides = [*tiny, *PARTS]
    gradients(load_recipe(DIGITS, overrides), tmp_path / "one.pt")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "tests.recipes.step_worker",
        DIGITS,
        str(tmp_path / "two.pt"),
        *overrides,
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    one, two = (torch.load(tmp_path / f"{name}.pt") for name in ("one", "two"))
    for run in (one, two):
        for kept, recomputed in ((run[0], run[2]), (run[1], run[3])):
            assert_same_bits(kept, recomputed)
    for other in (one[1], *two[: len(WAYS) // 2]):
        assert other["labels"] >= 24, "16 packs, four without labels"
        assert_same_step(other, one[0])


def assert_same_step(other, one):
    """Counts, losses and gradients of step_worker are equal but for rounding."""
    assert other["labels"] == one["labels"]
    for name in ("lm", "aux", "mtp"):
        assert other[name] == pytest.approx(one[name], rel=1e-6) and other[name] > 0
    for name, expected in one["gradients"].items():
        error = (other["gradients"][name] - expected).norm() / expected.norm().clamp(min=1e-12)
        assert error < 1e-5, f"{name}: {error:.2e}"


def assert_same_bits(one, other):
    assert {k: v for k, v in one.items() if k != "gradients"} == {k: v for k, v in other.items() if k != "gradients"}
    for name, expected in one["gradients"].items():
        assert torch.equal(other["gradients"][name], expected), name
