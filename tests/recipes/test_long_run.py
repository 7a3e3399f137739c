"""The long run of examples/long_run.yaml, a few steps of it, and that its packs are what it says."""

import json
import math
import os
import shutil
import subprocess
import sys

import pytest

from automodel_c.data.build import build_dataset
from automodel_c.data.packing import build_packs
from automodel_c.models.build import processor_of
from automodel_c.recipes.config import load_recipe
from automodel_c.recipes.targets import resolve
from tests.recipes.conftest import ROOT, run_cli

RECIPE = "examples/long_run.yaml"


@pytest.fixture(scope="module")
def data(digits_folder, tmp_path_factory):
    """The folder that long_run.py writes, from the session's digits."""
    here = tmp_path_factory.mktemp("long_run")
    (here / ".cache").mkdir()
    shutil.copytree(digits_folder, here / ".cache/digits", symlinks=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, ROOT / "examples/long_run.py", "write"], cwd=here, env=environment, check=True)
    return here / ".cache/long_run"


def test_packs(data):
    recipe = load_recipe(str(ROOT / RECIPE), [f"dataset.path_or_dataset={data}"])
    how, processor = (resolve(name, getattr(recipe, name)._target_) for name in ("model", "processor"))
    processor = processor_of(recipe.model, recipe.processor, how, processor)
    packs = build_packs(build_dataset(recipe.dataset, processor, 0), recipe.packed_sequence, shuffle=False)
    assert len(packs) == 48
    made = [packs[i] for i in range(48)]
    longest = [int(pack["doc_ids"].bincount().max()) for pack in made]
    assert max(longest) == pytest.approx(0.92 * 256, abs=1) and sorted(longest)[-2] < 128
    assert all(pack["n_images"] + pack["n_videos"] > 0 for pack in made if int(pack["doc_ids"].max()) > 3)
    assert sum(pack["n_images"] for pack in made) > 48 and sum(pack["n_videos"] for pack in made) > 48


def test_four_ranks(data, tmp_path):
    """Two pairs that share packs, two ranks that share the experts: losses fall, gradients are finite."""
    steps = ["step_scheduler.max_steps=8", "step_scheduler.global_batch_size=6", "lr_scheduler.lr_warmup_steps=1"]
    where = [f"dataset.path_or_dataset={data}", f"output_dir={tmp_path}/run"]
    done = run_cli("train", RECIPE, "--nproc", "4", *steps, *where, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    assert all(math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]) for row in rows)
    assert rows[-1]["loss"] < 0.7 * rows[0]["loss"]
    assert rows[-1]["memory"] < 1.02 * rows[-3]["memory"]
