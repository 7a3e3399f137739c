import json

import pytest

from automodel_c.recipes.config import load_recipe
from automodel_c.recipes.finetune_vlm import train

from .conftest import DIGITS, data_at

CHANCE = 0.15  # the held-out digits are even over ten classes


@pytest.fixture
def learn(digits_folder, tmp_path):
    """Trains the recipe for a short while on one rank and returns its accuracy on the held-out digits."""

    def run(name, *overrides):
        short = ("step_scheduler.max_steps=40", "step_scheduler.global_batch_size=64", "lr_scheduler.lr_warmup_steps=8",
                 "step_scheduler.val_every_steps=null", "checkpoint.enabled=false", f"output_dir={tmp_path / name}")
        evaluation = train(load_recipe(DIGITS, [*short, *data_at(digits_folder), *overrides]))
        assert evaluation.total == 296
        return evaluation.accuracy

    return run


def test_train_needs_the_images(learn):
    """What the model learns, it sees: with images dealt to the wrong prompts accuracy stays at chance."""
    assert learn("right") > 0.5
    assert learn("dealt", "dataset.shuffle_images=true") <= CHANCE


def test_shuffled_held_out_images(learn, tmp_path):
    """A model that has learned is at chance when the held-out images are dealt to the wrong prompts."""
    assert learn("asked", "validation_dataset.shuffle_images=true") <= CHANCE
    rows = [json.loads(line) for line in (tmp_path / "asked" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] < rows[0]["loss"] / 2
