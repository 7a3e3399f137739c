"""A recipe of NeMo Automodel: what is not carried out is named, each key with what to say, and said so it trains."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from automodel_c.recipes.config import RecipeError, load_recipe
from tests.lint.source import ROOT

RECIPE = ROOT / "examples/nemo_automodel.yaml"


def advice(path, *overrides):
    """{key: value to say} of the error."""
    with pytest.raises(NotImplementedError) as refused:
        load_recipe(path, overrides)
    return dict(re.findall(r"say ([\w.]+)=([\w<]+)", str(refused.value)))


def test_every_key_that_is_not_carried_out_is_named_with_what_to_say():
    said = advice(RECIPE)
    assert said == {
        "model.backend": "null",
        "optimizer.store_param_remainders": "false",
        "dataset._target_": "make_chat_jsonl_dataset",
    }
    recipe = load_recipe(RECIPE, [f"{key}={value}" for key, value in said.items()])
    assert recipe.optimizer.lr == 1e-5 and recipe.packed_sequence.max_packs == 128


def test_errors_of_another_kind_are_named_beside_them():
    with pytest.raises(RecipeError) as refused:
        load_recipe(RECIPE, ["optimizer.learning_rate=1", "seed=x"])
    lines = str(refused.value).splitlines()
    assert lines[0] == "5 keys:" and len(lines) == 6
    assert "unknown key optimizer.learning_rate; the nearest known key is optimizer." in str(refused.value)
    assert "seed: expected int, found 'x'" in str(refused.value)


def test_it_trains_unchanged_but_for_those_keys(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _write_data(tmp_path / "mine")
    options = ["step_scheduler.max_steps=1", "dataset.path_or_dataset=mine", "validation_dataset=null"]
    _train(ROOT / "examples/own_images/recipe.yaml", *options)  # the walk's model, which the recipe names
    said = [f"{key}={value}" for key, value in advice(RECIPE).items()]
    _train(RECIPE, *said, "dataset.path_or_dataset=mine")
    rows = [json.loads(x) for x in Path("runs/nemo_automodel/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and all(row["loss"] > 0 for row in rows)


def _train(*words):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "automodel_c", "train", *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def _write_data(folder):
    folder.mkdir()
    with open(folder / "train.jsonl", "w") as lines:
        for number in range(80):
            Image.new("RGB", (32, 32), (number, 0, 0)).save(folder / f"{number}.png")
            content = [{"type": "image", "image": f"{number}.png"}, {"type": "text", "text": "What is this?"}]
            turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "red circle"}]
            lines.write(json.dumps({"messages": turns}) + "\n")
