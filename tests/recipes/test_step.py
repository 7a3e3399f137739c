import os
import subprocess
import sys

import pytest
import torch

from automodel_c.data.collate import collate
from automodel_c.recipes.config import load_recipe
from automodel_c.recipes.finetune_vlm import build
from automodel_c.recipes.runtime import start_ranks
from automodel_c.recipes.step import cross_entropy_sum, model_inputs

from .conftest import DIGITS, ROOT
from .step_worker import gradients


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
    with start_ranks(load_recipe(DIGITS, tiny)) as runtime, torch.no_grad():
        run = build(load_recipe(DIGITS, tiny), runtime)
        packs = [next(p for p in run.dataset if p[key]) for key in ("n_videos", "n_images", "n_videos")]
        batch = collate(packs, run.processor)
        inputs = model_inputs(batch, runtime.device, run.model.config)
        assert "pixel_values_videos" not in inputs
        names = ("input_ids", "position_ids", "attention_mask", "mm_token_type_ids", "pixel_values", "image_grid_thw")
        plain = {name: batch[name] for name in (*names, "pixel_values_videos", "video_grid_thw")}
        ours, theirs = run.model(**inputs, use_cache=False).logits, run.model(**plain, use_cache=False).logits
    torch.testing.assert_close(ours, theirs)


def test_gradients_do_not_depend_on_ranks(tiny, tmp_path):
    """Loss and gradients of one global batch on one rank and on two, reduced in every microbatch and deferred."""
    gradients(load_recipe(DIGITS, tiny), tmp_path / "one.pt")
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
        *tiny,
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    one, *others = torch.load(tmp_path / "one.pt") + torch.load(tmp_path / "two.pt")
    for other in others:
        assert other["labels"] == one["labels"] >= 24, "16 packs, four without labels"
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-6)
        for name, expected in one["gradients"].items():
            error = (other["gradients"][name] - expected).norm() / expected.norm().clamp(min=1e-12)
            assert error < 1e-5, f"{name}: {error:.2e}"
