"""A tiny recipe, and runs of it on two ranks that several tests look at."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from automodel_c.data.digits import write_digits
from tests.ranks import rank_pools  # noqa: F401

ROOT = Path(__file__).parents[2]
DIGITS = str(ROOT / "examples" / "digits.yaml")
TINY = (  # one gated-delta layer and one of full attention, narrow
    "model.config.text_config.num_hidden_layers=2",
    "model.config.text_config.full_attention_interval=2",
    "model.config.text_config.hidden_size=32",
    "model.config.text_config.moe_intermediate_size=32",
    "model.config.vision_config.depth=1",
    "model.config.vision_config.hidden_size=32",
    "model.config.vision_config.num_heads=2",
    "step_scheduler.global_batch_size=16",
    "step_scheduler.local_batch_size=4",
    "step_scheduler.max_steps=6",
    "step_scheduler.ckpt_every_steps=3",
    "step_scheduler.val_every_steps=4",
    "packed_sequence.pack_size=64",
    "optimizer.lr=2.0e-3",
    "lr_scheduler.lr_warmup_steps=2",
    "validation_dataset.limit=21",  # seven of them clips
)


@pytest.fixture(autouse=True)
def _poisoned_operators():
    """Instead of the guard of tests/conftest.py, which looks at all earlier allocations at each: a run makes many."""


@pytest.fixture(scope="session")
def digits_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "digits"
    write_digits(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(digits_folder):
    """The overrides that make examples/digits.yaml tiny, over data that is there."""
    return [*TINY, *data_at(digits_folder)]


def data_at(folder):
    return [f"dataset.path_or_dataset={folder}", f"validation_dataset.path_or_dataset={folder}"]


def run_cli(*arguments, timeout=150):
    """`python -m automodel_c ...` from the repository's root: a CompletedProcess with stdout and stderr as text."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-m", "automodel_c", *arguments],
        cwd=ROOT,
        env=environment,
        timeout=timeout,
        capture_output=True,
        text=True,
        check=False,
    )


def train_two_ranks(*overrides):
    done = run_cli("train", DIGITS, "--nproc", "2", *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="session")
def finished(tiny, tmp_path_factory):
    """(output folder, CompletedProcess) of six tiny steps on two ranks."""
    output = tmp_path_factory.mktemp("finished") / "run"
    return output, train_two_ranks(*tiny, f"output_dir={output}")
