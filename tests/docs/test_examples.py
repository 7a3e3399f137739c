"""Examples that the lint suite does not run: TRL's trainer on a patched model, and the walk from one's own images."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.lint.source import ROOT


def run(folder, *words, timeout=280):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed: pip install trl")
def test_trl_trains_a_patched_model(tmp_path):
    said = run(tmp_path, ROOT / "examples/trl_sft.py")
    assert "ops.gated_delta_rule" in said and "is the mean loss" in said


def test_the_walk_learns_its_images(tmp_path):
    walk = ROOT / "examples/own_images"
    run(tmp_path, walk / "draw.py", "own_images")
    run(tmp_path, "-m", "automodel_c", "train", walk / "recipe.yaml")
    found = json.loads((tmp_path / "runs/own_images/validation.jsonl").read_text().splitlines()[-1])
    assert found["accuracy"] > 0.9, found  # of sixteen answers
    said = run(tmp_path, walk / "ask.py", "own_images/images/held_out_000.png")
    colour, _, shape = said.strip().partition(" ")
    assert colour in ("red", "green", "blue", "yellow") and shape in ("circle", "square", "triangle", "cross")
