"""Checkpoints and metrics of a run that is started again."""

import contextlib
import json
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from automodel_c.optim import FusedAdamW
from automodel_c.recipes import checkpoint
from automodel_c.recipes.checkpoint import Checkpoints, checkpoint_step, load_checkpoint, save_checkpoint, step_folder
from automodel_c.recipes.config import load_recipe
from automodel_c.recipes.metrics import MetricsLog
from automodel_c.recipes.runtime import runtime_over, start_ranks
from tests.ranks import RankPool

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
    return sorted(p.name for p in folder.iterdir() if p.is_dir())


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


def test_a_checkpoint_in_the_background_is_of_its_step(runtime, tmp_path):
    """What is trained meanwhile is not in it; it is there when the next one begins."""
    model, optimizer = _trained()
    before, moment = model.weight.detach().clone(), optimizer.state[model.weight]["exp_avg"].clone()
    checkpoints = Checkpoints(tmp_path, runtime, background=True)
    folder = checkpoints.save(1, model, optimizer, data={"seed": 3})
    with torch.no_grad():
        model.weight.fill_(torch.nan)
        optimizer.state[model.weight]["exp_avg"].fill_(torch.nan)
    checkpoints.close()
    other, fresh = _trained()
    assert load_checkpoint(folder, other, fresh, runtime, data={"seed": 3}) == 1
    assert torch.equal(other.weight, before) and torch.equal(fresh.state[other.weight]["exp_avg"], moment)


@pytest.mark.parametrize("what", ["step", "metadata"])
def test_a_write_in_the_background_that_fails(runtime, tmp_path, monkeypatch, what):
    """It is raised at the next save and at the end; what was written before stays, and a later one can succeed."""
    model, optimizer = _trained()
    checkpoints = Checkpoints(tmp_path, runtime, background=True)
    checkpoints.save(1, model, optimizer, data={})
    checkpoints.wait()

    rename = Path.rename

    def fail(path, target):
        if what in path.name:
            raise OSError("disk full")
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        checkpoints.save(2, model, optimizer, data={})
        with pytest.raises((OSError, RuntimeError), match="disk full"):
            checkpoints.save(3, model, optimizer, data={})
        checkpoints.save(3, model, optimizer, data={})
        with pytest.raises((OSError, RuntimeError), match="disk full"):
            checkpoints.close()
    assert _steps(tmp_path)[-1] == "step_1" and step_folder("LATEST", tmp_path) == tmp_path / "step_1"
    again = Checkpoints(tmp_path, runtime, background=True)
    again.save(4, model, optimizer, data={})
    again.close()
    assert _steps(tmp_path) == ["step_1", "step_4"], "nothing is left of those that failed"


@pytest.fixture(scope="module")
def two():
    """Not the session's: runs in this process that fail, as others test, cut the connections of its store."""
    pool = RankPool(2)
    yield pool
    pool.close()


def fails_on_one_rank(folder, rank, name):
    """What each of two ranks says at the end, where `name` of a Checkpoints' way fails on one; then it goes well."""
    said, checkpoints = [], Checkpoints(folder, runtime_over((2, 1), torch.device("cpu")), background=True)
    model, optimizer = _trained()

    def fail(*_, **__):
        raise OSError("disk full")

    for step, broken in ((1, False), (2, True), (3, False)):
        owner = checkpoint if name == "_point" else dcp.FileSystemWriter
        with mock.patch.object(owner, name, fail) if broken and dist.get_rank() == rank else contextlib.nullcontext():
            checkpoints.save(step, model, optimizer, data={})
            try:
                checkpoints.wait()
                said.append(None)
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
    checkpoints.close()
    return said


@pytest.mark.parametrize(("rank", "name"), [(1, "write_data"), (0, "_point")])
def test_a_write_that_fails_on_one_rank_is_raised_on_all(two, tmp_path, rank, name):
    for number, said in enumerate(two.run(fails_on_one_rank, tmp_path, rank, name)):
        assert said[0] is said[2] is None and "disk full" in said[1] and f"rank {rank}" in said[1] + f"rank {number}"
    assert step_folder("LATEST", tmp_path).name == "step_3"


def test_pointers(runtime, tmp_path):
    """LATEST is the newest; LOWEST_VAL that of the lowest held-out loss, which stays beyond the newest ones, and is
    found again by another run."""
    model, optimizer = _trained()
    losses = {1: 3.0, 2: None, 3: 1.5, 4: 2.0, 5: None, 6: 1.5, 7: 9.0}
    lowest, kept = dict(zip(losses, (1, 1, 3, 3, 3, 6, 6), strict=True)), set()
    for step, loss in losses.items():
        Checkpoints(tmp_path, runtime, keep=2).save(step, model, optimizer, data={}, held_out=loss)
        kept = {*sorted(kept | {step})[-2:], lowest[step]}
        assert _steps(tmp_path) == sorted(f"step_{n}" for n in kept)
        for pointer, named in (("LATEST", step), ("LOWEST_VAL", lowest[step])):
            for path, folder in ((pointer, tmp_path), (tmp_path / pointer, None)):
                assert checkpoint_step(step_folder(path, folder)) == named
    assert step_folder(tmp_path / "step_6") == tmp_path / "step_6"


def test_a_loss_that_is_no_number_is_not_the_lowest(runtime, tmp_path):
    model, optimizer = _trained()
    for step, loss in enumerate((float("nan"), 2.0, float("nan"), 1.0, float("nan"))):
        Checkpoints(tmp_path, runtime).save(step, model, optimizer, data={}, held_out=loss)
        if step:
            assert step_folder("LOWEST_VAL", tmp_path).name == ("step_1" if step < 3 else "step_3")
    assert json.loads((tmp_path / "step_1" / "held_out.json").read_text()) == {"loss": 2.0}


def test_no_such_pointer(tmp_path):
    with pytest.raises(ValueError, match=r"checkpoint\.restore_from='.*LOWEST_VAL': No such file"):
        step_folder("LOWEST_VAL", tmp_path)


@pytest.mark.parametrize("torn", ["", '{"step": 3, "lo', '{"step": 3}'])
def test_metrics_log_goes_on_after_a_kill(tmp_path, torn):
    """A run that was killed while it wrote a row can be resumed."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n' + torn)
    MetricsLog(path, 2).append({"step": 3, "loss": 1.0})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


@pytest.mark.parametrize("what", ["replaced", "pruned"])
def test_a_checkpoint_that_goes_is_never_half_there(runtime, tmp_path, what):
    """Killed while an old checkpoint is deleted, a run leaves no folder of a step that is not whole."""
    model, optimizer = _trained()
    save_checkpoint(tmp_path, 1, model, optimizer, runtime, data={})
    whole = {p.name for p in (tmp_path / "step_1").iterdir()}
    gone = []

    def half(path, ignore_errors=False):
        if not Path(path).exists():
            return
        next(Path(path).glob("*.distcp")).unlink()
        gone.append(path)
        raise KeyboardInterrupt

    step, keep = (1, None) if what == "replaced" else (2, 1)
    with mock.patch("shutil.rmtree", half), pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, step, model, optimizer, runtime, data={}, keep=keep)
    assert len(gone) == 1
    visible = list(tmp_path.glob("step_*"))
    assert [p.name for p in visible] == [f"step_{step}"]
    assert {p.name for p in visible[0].iterdir()} == whole
    save_checkpoint(tmp_path, 3, model, optimizer, runtime, data={})
    assert not list(tmp_path.glob(".step_*"))


def test_a_pointer_is_on_the_disk_before_it_has_its_name(runtime, tmp_path):
    """And what it names is before it."""
    order, fsync, rename = [], checkpoint.os.fsync, Path.replace

    def synced(number):
        order.append(Path(f"/proc/self/fd/{number}").readlink().name)
        fsync(number)

    def replaced(self, target):
        order.append(f"-> {target.name}")
        return rename(self, target)

    model, optimizer = _trained()
    with mock.patch.object(checkpoint.os, "fsync", synced), mock.patch.object(Path, "replace", replaced):
        save_checkpoint(tmp_path, 1, model, optimizer, runtime, data={})
    at = {name: i for i, name in enumerate(order)}
    assert order.index(tmp_path.name) < at[".LATEST.tmp"] < at["-> LATEST"] < at[tmp_path.name]
    assert any(name.endswith(".distcp") for name in order[: order.index(tmp_path.name)])
