"""Where a step's time goes: every microsecond in one row, the results untouched, and nothing left behind."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import Interval

from automodel_c import _amcore, ops
from automodel_c.recipes import profile
from automodel_c.recipes.config import load_recipe
from automodel_c.recipes.finetune_vlm import build, fit
from automodel_c.recipes.profile import Profile, Row, Table, span
from automodel_c.recipes.runtime import start_ranks

from .conftest import DIGITS, run_cli

RUN = (
    "step_scheduler.max_steps=4",
    "step_scheduler.ckpt_every_steps=null",
    "step_scheduler.val_every_steps=null",
    "checkpoint.enabled=false",
    "validation_dataset=null",
    "rng.deterministic=false",  # a switch of the whole process, which other tests share
)


@pytest.fixture(scope="module")
def profiled(tiny, tmp_path_factory):
    """(the folder, what profile.json holds, the names that _amcore had while a step ran) of a run on one rank."""
    folder = tmp_path_factory.mktemp("profiled")
    overrides = [word for word in tiny if not word.startswith("validation_dataset")]
    recipe = load_recipe(DIGITS, [*overrides, *RUN, f"output_dir={folder}"])
    with start_ranks(recipe) as runtime:
        run = build(recipe, runtime)
        run.profile = Profile(2, left=4, device=runtime.device, world=1)
        fit(run)
    return folder, json.loads((folder / "profile.json").read_text())


def test_calls_and_shares(profiled):
    """One of two layers is attention, one the gated delta rule; a tower of one block; four microbatches a step."""
    folder, found = profiled
    assert (found["first_step"], found["steps"], found["clock"], found["world"]) == (2, 2, "wall", 1)
    calls = {(row["operator"], row["part"]): row["calls"] for row in found["rows"]}
    steps, microbatches = 2, 4
    for part in ("forward", "backward"):
        assert calls["attention", part] == 2 * microbatches * steps
        assert calls["gated_delta_rule", part] == calls["causal_conv1d", part] == microbatches * steps
        assert calls["moe", part] == 2 * microbatches * steps
    assert calls["linear_cross_entropy", "forward"] == microbatches * steps
    assert calls["adam_step", "optimizer"] == steps and calls["grad_sumsq", "clip"] >= steps
    assert not any(part == "recomputed" for _, part in calls)
    rows = found["rows"]
    assert [row["seconds"] for row in rows] == sorted((row["seconds"] for row in rows), reverse=True)
    assert sum(row["seconds"] for row in rows) == pytest.approx(found["seconds"], rel=1e-3)
    assert sum(row["share"] for row in rows) == pytest.approx(1, rel=1e-3)
    for row in rows:
        assert row["mean_seconds"] == (row["seconds"] / row["calls"] if row["calls"] else None)
    assert (folder / "profile.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_is_left_behind(profiled):
    assert type(_amcore.adam_step).__name__.startswith("builtin")
    assert span("forward") is span("backward") is profile._NOTHING


def test_recomputed_operators_are_told_apart():
    """In backward, a forward operator is one that is made again; an entry of the extension is just called there."""
    profiler = Profile(1, left=1, device=torch.device("cpu"), world=1)
    with profiler.step(7):
        with span("backward"):
            _amcore.build_info()
            ops.rms_norm(torch.ones(2, 8), torch.ones(8))
    table = profiler.table
    assert (table.first_step, table.steps) == (7, 1)
    found = {(row.operator, row.part): row.calls for row in table.rows}
    assert found["rms_norm", "recomputed"] == found["build_info", "backward"] == 1


def test_train_profile(finished, tiny, tmp_path):
    """From the command line, on two ranks: one table, the files, and the bits of the run without it."""
    done = run_cli("train", DIGITS, *tiny, "--nproc", "2", "--profile-steps", "3", f"output_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("profile of steps 2 to 4 on rank 0 of 2: ") == 1
    assert "attention" in done.stdout and f"wrote {tmp_path}/profile.json and profile.png" in done.stdout
    keys = ("step", "loss", "grad_norm", "lr", "tokens")
    texts = [(folder / "metrics.jsonl").read_text().splitlines() for folder in (finished[0], tmp_path)]
    plain, found = ([[json.loads(line)[key] for key in keys] for line in text] for text in texts)
    assert found == plain
    assert {p.name for p in tmp_path.iterdir()} - {p.name for p in finished[0].iterdir()} == {
        "profile.json",
        "profile.png",
    }


@pytest.mark.parametrize(
    "steps, left, expected",
    [(5, 9, [2, 3, 4, 5, 6]), (5, 5, [1, 2, 3, 4, 5]), (5, 2, [1, 2]), (1, 2, [2]), (1, 1, [1])],
)
def test_which_steps(monkeypatch, steps, left, expected):
    """One step warms up where there is one to spare."""
    seen = []
    profiler = Profile(steps, left=left, device=torch.device("cpu"), world=1)
    monkeypatch.setattr(profiler, "_start", lambda: setattr(profiler, "_profiler", profiler))
    monkeypatch.setattr(profiler, "finish", lambda: setattr(profiler, "table", True))
    for step in range(1, left + 1):
        before = profiler.seen
        with profiler.step(step):
            pass
        seen += [step] * (profiler.seen - before)
    assert seen == expected and profiler.first == expected[0]


def test_an_interrupted_profile(profiled):
    """What was seen until then is told; of nothing there is no table."""
    profiler = Profile(3, left=9, device=torch.device("cpu"), world=1)
    assert profiler.finish() is None
    for step in (1, 2):
        with profiler.step(step):
            torch.ones(3).sum()
    table = profiler.finish()
    assert (table.first_step, table.steps) == (2, 1) and profiler.finish() is table


def _event(name, wall=0.0, gpu=0.0, children=(), parent=None, device=DeviceType.CPU, start=0.0, range_=False):
    event = SimpleNamespace(
        name=name, device_type=device, device_time_total=gpu, cpu_children=list(children), cpu_parent=parent,
        time_range=Interval(start, start + wall), is_user_annotation=range_,
    )  # fmt: skip
    for child in children:
        child.cpu_parent = event
    return event


def test_rows_of_a_gpu():
    """By the GPU's time; backward has a thread of its own; a kernel of no operator and the time without one are told
    too, and the shadow that a range has on the GPU is no kernel."""
    forward = _event("automodel_c::attention_forward", 10, 400)
    step = _event("step: rest", 1000, 400, [_event("step: forward", 900, 400, [forward])])
    inner = _event("automodel_c::attention_backward", 10, 300), _event("automodel_c::rms_norm", 5, 50)
    node = _event("autograd::engine::evaluate_function: X", 20, 350, inner)
    times = ((0, 400), (500, 300), (780, 50), (400, 30))  # two overlap by 20
    kernels = [_event("a kernel", gpu, device=DeviceType.CUDA, start=start) for start, gpu in times]
    kernels += [_event("step: rest", 1000, device=DeviceType.CUDA, range_=ours) for ours in (True, False)]
    seconds, rows = profile._rows_of([step, *step.cpu_children, forward, node, *inner, *kernels], "gpu")
    assert seconds == pytest.approx(1e-3)
    found = {(row.operator, row.part): (row.calls, round(1e6 * row.seconds), round(row.share, 3)) for row in rows}
    assert found == {
        ("attention", "forward"): (1, 400, 0.4),
        ("attention", "backward"): (1, 300, 0.3),
        ("rms_norm", "recomputed"): (1, 50, 0.05),
        ("in no operator", "rest"): (0, 30, 0.03),
        ("idle", "rest"): (0, 240, 0.24),
    }


def test_lines():
    rows = [Row("attention", "forward", 4, 0.5, 0.5), Row("Python", "rest", 0, 0.25, 0.25), *[Row("x", "rest")] * 3]
    lines = list(Table(2, 2, 1.0, "wall", 1, rows).lines(most=2))
    assert lines[0] == "profile of steps 2 to 3 on rank 0 of 1: 500.0 ms a step; wall time"
    assert lines[2].split() == ["attention", "forward", "4", "500.0", "125.000", "50.0", "%"]
    assert lines[3].split() == ["Python", "rest", "250.0", "25.0", "%"]
    assert lines[4].split() == ["3", "more", "0.0", "0.0", "%"] and len(lines) == 5
