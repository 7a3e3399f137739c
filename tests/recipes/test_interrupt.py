"""Ctrl-C and SIGTERM: once, the step is finished and saved; twice, every rank leaves at once."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from automodel_c.recipes import interrupt
from automodel_c.recipes.interrupt import Interrupt, agreed, stay_apart

from . import interrupt_worker as worker
from .conftest import DIGITS, ROOT

RUN = (
    "rng.deterministic=false",  # a switch of the whole process, which other tests share
    "step_scheduler.max_steps=4",
    "step_scheduler.ckpt_every_steps=null",
    "step_scheduler.val_every_steps=null",
    "checkpoint.save_consolidated=false",
    "validation_dataset=null",
    "lr_scheduler.lr_decay_steps=4",
)


def _rows(folder):
    keys = ("step", "loss", "grad_norm", "lr", "tokens")
    return [[json.loads(line)[key] for key in keys] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def short(tiny):
    return [*(word for word in tiny if not word.startswith("validation_dataset")), *RUN]


@pytest.fixture(scope="module")
def whole(rank_pools, short, tmp_path_factory):
    """The rows of a run that nobody interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    assert rank_pools(2).run(worker.run, DIGITS, [*short, f"output_dir={folder}"]) == [(None, None, 4)] * 2
    return _rows(folder)


@pytest.mark.parametrize("inside", [True, False], ids=["in a step", "after a step"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_one_rank_is_told_and_all_save(rank_pools, short, whole, tmp_path, number, inside):
    """Whichever rank heard it and when: all leave after step 2, and the run goes on from there to the same bits."""
    overrides = [*short, f"output_dir={tmp_path}", f"checkpoint.is_async={inside}"]
    found = rank_pools(2).run(worker.run, DIGITS, overrides, number, inside=inside)
    step = tmp_path / "checkpoints" / "step_2"
    how = f"saved, to go on: the same command with checkpoint.restore_from={step}"
    said = f"ended by {number.name} after step 2; {how}"
    assert found == [(said, 128 + number, 2)] * 2
    assert step.is_dir() and (step.parent / "LATEST").read_text() == "step_2\n" and _rows(tmp_path) == whole[:2]
    overrides.append("checkpoint.restore_from=LATEST")
    assert rank_pools(2).run(worker.run, DIGITS, overrides) == [(None, None, 4)] * 2
    assert _rows(tmp_path) == whole


@pytest.mark.parametrize(
    "override, said",
    [
        ("checkpoint.enabled=false", "ended by SIGINT after step 1; nothing is saved: checkpoint.enabled is false"),
        ("step_scheduler.ckpt_every_steps=1", "ended by SIGINT after step 1; saved, .*step_1"),
    ],
)
def test_nothing_is_saved_twice(rank_pools, short, tmp_path, override, said):
    overrides = [*short, f"output_dir={tmp_path}", override]
    for text, status, saved in rank_pools(2).run(worker.run, DIGITS, overrides, signal.SIGINT, at=1, inside=False):
        assert re.search(said, text) and status == 130 and saved == (None if "enabled" in override else 1)


def test_twice_is_now(monkeypatch, capfd):
    """The second signal raises, unless it comes with the first; after the third the process would be gone."""
    before = [signal.getsignal(number) for number in interrupt.SIGNALS]
    with pytest.raises(KeyboardInterrupt), Interrupt(notice=True) as asked:
        assert asked.asked is None
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        assert asked.asked == signal.SIGTERM
        monkeypatch.setattr(interrupt, "_SAME_S", 0.0)
        try:
            os.kill(os.getpid(), signal.SIGINT)
        finally:
            assert signal.getsignal(signal.SIGINT) == signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert [signal.getsignal(number) for number in interrupt.SIGNALS] == before
    assert capfd.readouterr().err == "\nSIGTERM: leaving after this step and a checkpoint; again: now\n"


def test_agreed():
    assert [agreed(sums) for sums in ([0, 0], [0.0, 2.0], [1, 3])] == [None, signal.SIGTERM, signal.SIGINT]


def test_loaders_stand_apart():
    """Signals to the rank's process group do not reach who loads its data."""
    child = os.fork()
    if not child:
        stay_apart()
        os._exit(os.getpgrp() != os.getpid())
    assert os.waitpid(child, 0)[1] == 0


@pytest.fixture
def started(tiny, tmp_path):
    """started(command, *overrides): a process of two ranks whose first step has begun."""
    processes = []

    def start(command, *overrides):
        overrides = [*tiny, "step_scheduler.max_steps=900", f"output_dir={tmp_path}", *overrides]
        path = tmp_path / "said"
        with open(path, "w") as said:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", *command, *overrides],
                    env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                    stdout=said,
                    stderr=said,
                    cwd=ROOT,
                )
            )
        _wait_for(lambda: "0/900 [" in path.read_text(), processes[-1])
        return processes[-1], path

    yield start
    for process in processes:
        process.kill()
        process.wait()


def _wait_for(ready, process, seconds=100):
    deadline = time.monotonic() + seconds
    while not ready():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)


def test_launcher_passes_both_on(started, tmp_path):
    """The launcher's ranks finish a step after one Ctrl-C and end after the next, without a traceback of theirs."""
    huge = "step_scheduler.global_batch_size=1944"  # most of a minute
    process, path = started(("automodel_c", "train", DIGITS, "--nproc", "2"), huge)
    process.send_signal(signal.SIGINT)
    _wait_for(lambda: "SIGINT: leaving after this step" in path.read_text(), process, 10)
    time.sleep(interrupt._SAME_S + 0.1)
    assert process.poll() is None
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130 and time.monotonic() - began < 15
    text = path.read_text()
    assert re.search(r"^automodel-c: (interrupted|ended by SIGINT)$", text, re.M) and "Traceback" not in text, text
    assert not (tmp_path / "metrics.jsonl").read_text() and not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT], ids=lambda n: n.name)
def test_launcher_that_is_ended_blames_no_rank(tmp_path, number):
    """These two are not passed on: the ranks end with the launcher, and none of them failed first."""
    rank = "import os, pathlib, time; pathlib.Path('up' + os.environ['RANK']).touch(); time.sleep(100)"
    code = f"from automodel_c.recipes.launch import run_ranks; print(run_ranks(['-c', {rank!r}], 2))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open(tmp_path / "said", "w") as said:
        process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=environment, stdout=said)
    try:
        _wait_for(lambda: len(list(tmp_path.glob("up*"))) == 2, process)
        process.send_signal(number)
        assert process.wait(60) == 0 and (tmp_path / "said").read_text() == f"(None, -{number.value})\n"
    finally:
        process.kill()
        process.wait()


def test_ranks_have_time_for_last_words(tmp_path):
    """Who is left when a rank is killed still says so, though SIGTERM would end it; named is who was first."""
    rank = "import os, sys, time; me = os.environ['RANK']; me == '1' and os.kill(os.getpid(), 9); time.sleep(2)"
    rank += "; print('heard', flush=True); sys.exit(1)"
    code = f"from automodel_c.recipes.launch import run_ranks; print(run_ranks(['-c', {rank!r}], 2))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "heard\n(1, -9)\n", done.stderr


def test_another_rank_left_at_once(monkeypatch, capsys):
    """Who hears of it before its own signal says no more than that."""
    import automodel_c.recipes.finetune_vlm as recipe
    from automodel_c.cli import main
    from automodel_c.parallel.faults import RankFailure

    def told(*_, **__):
        raise RankFailure(1, "KeyboardInterrupt: ")

    monkeypatch.setattr(recipe, "train", told)
    assert main(["train", DIGITS]) == 130 and capsys.readouterr().err == "automodel-c: interrupted\n"


def test_torchrun_passes_it_on(started, tmp_path):
    """Under torchrun itself, which tells each rank and all that the rank started: the step is finished and saved."""
    torchrun = ("torch.distributed.run", "--nproc-per-node", "2", "-m", "automodel_c", "train", DIGITS)
    process, path = started(torchrun, "dataloader.num_workers=1", "step_scheduler.ckpt_every_steps=null")
    _wait_for(lambda: (tmp_path / "metrics.jsonl").read_text().count("\n") > 1, process, 30)
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    said = re.search(r"automodel-c: ended by SIGTERM after step (\d+); saved, ", path.read_text())
    assert said, path.read_text()
    assert [p.name for p in (tmp_path / "checkpoints").glob("step_*")] == [f"step_{said[1]}"]
