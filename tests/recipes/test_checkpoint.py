"""Checkpoints and metrics of a run that is started again."""

import json

import pytest
import torch

from automodel_c.optim import FusedAdamW
from automodel_c.recipes.checkpoint import load_checkpoint, save_checkpoint
from automodel_c.recipes.config import load_recipe
from automodel_c.recipes.metrics import MetricsLog
from automodel_c.recipes.runtime import start_ranks

from .conftest import DIGITS


@pytest.fixture
def runtime():
    with start_ranks(load_recipe(DIGITS)) as runtime:
        yield runtime


def _trained(**settings):
    model = torch.nn.Linear(3, 2)
    optimizer = FusedAdamW(model.parameters(), **settings)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _steps(folder):
    return sorted(p.name for p in folder.iterdir())


def test_save_checkpoint_keeps_what_was_written_last(runtime, tmp_path):
    """A run that is started again in the same folder does not delete its own checkpoints for older, later steps."""
    model, optimizer = _trained()
    for step in (100, 200):
        save_checkpoint(tmp_path, step, model, optimizer, runtime, data={}, keep=2)
    for step, kept in ((1, ["step_1", "step_200"]), (2, ["step_1", "step_2"]), (3, ["step_2", "step_3"])):
        save_checkpoint(tmp_path, step, model, optimizer, runtime, data={}, keep=2)
        assert _steps(tmp_path) == kept


def test_load_checkpoint_takes_the_settings_of_the_recipe(runtime, tmp_path):
    """State comes from the checkpoint; rates and decays are what the recipe says now."""
    model, optimizer = _trained(betas=(0.9, 0.95), weight_decay=0.1)
    folder = save_checkpoint(tmp_path, 1, model, optimizer, runtime, data={})
    other = torch.nn.Linear(3, 2)
    fresh = FusedAdamW(other.parameters(), betas=(0.5, 0.6), weight_decay=0.2, eps=1e-6)
    assert load_checkpoint(folder, other, fresh, runtime, data={}) == 1
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(fresh.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])
    (group,) = fresh.param_groups
    assert (tuple(group["betas"]), group["weight_decay"], group["eps"]) == ((0.5, 0.6), 0.2, 1e-6)


@pytest.mark.parametrize("torn", ["", '{"step": 3, "lo', '{"step": 3}'])
def test_metrics_log_goes_on_after_a_kill(tmp_path, torn):
    """A run that was killed while it wrote a row can be resumed."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n' + torn)
    MetricsLog(path, 2).append({"step": 3, "loss": 1.0})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]
