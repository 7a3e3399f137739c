import shutil

import pytest
import torch

from automodel_c.data.build import build_dataset
from automodel_c.recipes.config import load_recipe
from automodel_c.recipes.evaluate import evaluate
from automodel_c.recipes.finetune_vlm import build, fit
from automodel_c.recipes.runtime import start_ranks

from .conftest import DIGITS, data_at

CHANCE = 0.15  # the held-out digits are even over ten classes
SHORT = (
    "step_scheduler.max_steps=44",
    "step_scheduler.global_batch_size=7",
    "step_scheduler.local_batch_size=7",
    "lr_scheduler.lr_warmup_steps=8",
    "step_scheduler.val_every_steps=null",
    "checkpoint.enabled=false",
    "validation_dataset.limit=200",
)


@pytest.fixture(scope="module")
def single_digits(digits_folder, tmp_path_factory):
    """The digits in images and those that move in clips: one digit a question, which is soon learned."""
    folder = tmp_path_factory.mktemp("single") / "digits"
    shutil.copytree(digits_folder, folder)
    for path in folder.glob("*.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if '"image"' in line or ".gif" in line))
    return folder


@pytest.fixture
def learn(single_digits, tmp_path):
    """Trains for a short while on one rank: accuracy on held-out digits, and on those with their images dealt out."""

    def run(*overrides):
        recipe = load_recipe(DIGITS, [*SHORT, *data_at(single_digits), f"output_dir={tmp_path}", *overrides])
        with start_ranks(recipe) as runtime:
            run = build(recipe, runtime)
            seeing = fit(run)
            recipe.validation_dataset.shuffle_images = True
            recipe.validation_dataset.limit = None  # of the first 200 one in seven gets an image of its own digit again
            dealt = build_dataset(recipe.validation_dataset, run.processor, recipe.seed)
            return seeing.accuracy, evaluate(run.model, dealt, run.processor, batch_size=50, runtime=runtime).accuracy

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # operators this small lose more by waiting for threads than they gain
    yield run
    torch.set_num_threads(threads)


def test_train_sees_the_images(learn):
    seeing, dealt = learn()
    assert seeing > 0.5
    assert dealt <= CHANCE, "a model that has learned answers by another image"


def test_train_with_shuffled_images(learn):
    seeing, _ = learn("dataset.shuffle_images=true")
    assert seeing <= CHANCE, "nothing but the image tells the digit"
