"""TensorBoard and W&B beside the files: the same numbers, and words before the first step where a package lacks."""

import json
import os
import subprocess
import sys

import pytest

from automodel_c.cli import main
from automodel_c.recipes.config import RecipeError, load_recipe
from automodel_c.recipes.logs import Logs, _is_absent

from .conftest import DIGITS, ROOT

ROWS = [{"step": step, "loss": 1.0 / step, "tokens": 100 * step} for step in (1, 2, 3)]


@pytest.mark.parametrize(
    "override, key, package",
    [
        ("logging.tensorboard=true", "logging.tensorboard", "tensorboard"),
        ("logging.tensorboard=events", "logging.tensorboard", "tensorboard"),
        ("wandb={}", "wandb", "wandb"),
        ("wandb.project=digits", "wandb", "wandb"),
    ],
)
@pytest.mark.parametrize("more", [(), ("--nproc", "2")], ids=["here", "launcher"])
def test_a_missing_package_is_said_at_once(monkeypatch, capsys, override, key, package, more):
    monkeypatch.setattr("automodel_c.recipes.logs._is_absent", lambda name: name == package)
    assert main(["train", DIGITS, override, *more]) == 2
    words = f"{key} needs the package {package}, which is not installed: pip install {package}"
    assert capsys.readouterr().err == f"automodel-c: error: {words}\n"


def test_absent(tmp_path, monkeypatch):
    """A folder of that name is no package."""
    assert _is_absent("no_such_package") and not _is_absent("json")
    (tmp_path / "a_folder_of_runs").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert _is_absent("a_folder_of_runs")


def test_modes_of_wandb():
    with pytest.raises(RecipeError, match=r"wandb.mode: expected one of 'online', 'offline', 'disabled', found 'of'"):
        load_recipe(DIGITS, ["wandb.mode=of"])
    with pytest.raises(RecipeError, match=r"unknown key wandb.projct; the nearest known key is wandb.project"):
        load_recipe(DIGITS, ["wandb.projct=x"])
    assert load_recipe(DIGITS).wandb is None and load_recipe(DIGITS, ["wandb={}"]).wandb.mode is None


def test_files(tmp_path):
    """A run that goes on drops the rows behind the step from which it does."""
    logs = Logs(load_recipe(DIGITS), tmp_path, 0)
    for row in ROWS:
        logs.train(row)
    logs.held_out(ROWS[0])
    logs.close()
    Logs(load_recipe(DIGITS), tmp_path, 2).train({"step": 3, "loss": 0.5})
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [*ROWS[:2], {"step": 3, "loss": 0.5}]
    assert json.loads((tmp_path / "validation.jsonl").read_text()) == ROWS[0]


_WRITE = """
import json, sys
from automodel_c.recipes.config import load_recipe
from automodel_c.recipes.logs import Logs
recipe, folder, first, rows, override = sys.argv[1:]
logs = Logs(load_recipe(recipe, [override]), folder, int(first))
for row in json.loads(rows):
    logs.train(row)
logs.held_out({"step": json.loads(rows)[-1]["step"], "accuracy": 0.25})
logs.close()
"""


def _write(folder, rows, override, first=0, **environment):
    """In a process of its own: these packages warn, and leave threads behind."""
    done = subprocess.run(
        [sys.executable, "-c", _WRITE, DIGITS, str(folder), str(first), json.dumps(rows), override],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr


_READ = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1])
events.Reload()
print(json.dumps({tag: [[e.step, e.value] for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}))
"""


@pytest.mark.skipif(_is_absent("tensorboard"), reason="tensorboard is not installed")
@pytest.mark.parametrize("where", ["true", "events"])
def test_tensorboard(tmp_path, where):
    """Scalars of both kinds by step; a resumed run replaces what came behind."""
    folder = tmp_path / "tensorboard" if where == "true" else tmp_path / "elsewhere"
    override = f"logging.tensorboard={'true' if where == 'true' else folder}"
    _write(tmp_path / "run" if where != "true" else tmp_path, ROWS, override)
    _write(tmp_path / "run" if where != "true" else tmp_path, [{"step": 3, "loss": 0.75}], override, first=2)
    done = subprocess.run([sys.executable, "-c", _READ, str(folder)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["train/loss"] == [[1, 1.0], [2, 0.5], [3, 0.75]]
    assert found["train/tokens"] == [[1, 100.0], [2, 200.0]]
    assert found["held_out/accuracy"] == [[3, 0.25]]


@pytest.mark.skipif(_is_absent("wandb"), reason="wandb is not installed")
def test_wandb_offline(tmp_path):
    """Without a network or an account, the run lies in output_dir/wandb, to be synchronised later."""
    _write(tmp_path, ROWS, "wandb={mode: offline, project: p, name: n}", WANDB_SILENT="true", HOME=str(tmp_path))
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    (file,) = folder.glob("run-*.wandb")
    data = file.read_bytes()
    for word in (b"train/loss", b"held_out/accuracy", b"global_batch_size"):
        assert word in data, word
