"""Whatever happens to a run: all ranks leave within 30 seconds, the culprit is named, and the run that is started again
gives the losses of one that nothing happened to.

Here two ranks and some kinds of trouble; `make faults` has four ranks, all kinds, and AM_FAULTS=20 kills.
"""

import contextlib
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import time

import pytest

from automodel_c.data.digits import write_digits
from tests.faults.runs import PROMISE_S, RANKS, STEPS, Run, finish, losses, record, resume
from tests.recipes.test_integrity import flip

EXIT_STATUS = 128 + signal.SIGTERM
KILLS = int(os.environ.get("AM_FAULTS", "1"))
full = pytest.mark.skipif("AM_FAULTS" not in os.environ, reason="a minute of two cores: `make faults` runs it")


@pytest.fixture(autouse=True)
def _poisoned_operators():
    """Nothing is computed in this process."""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "digits"
    write_digits(folder)
    return folder


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory):
    """The losses of a run that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert finish(folder, data) and len(losses(folder)) == STEPS
    return losses(folder)


def ends(run, began, *words, launcher=""):
    """The run fails soon, every other rank's last words hold `words`, and the launcher's are `launcher`; the seconds it
    took. The log is that of all ranks: counted is how often it says the words."""
    status, _ = run.wait()
    took, text = time.monotonic() - began, run.text()
    assert status not in (0, EXIT_STATUS), text
    assert took < PROMISE_S, text
    for word in words:
        assert text.count(word) >= RANKS - 1, text
    assert not launcher or text.count(f"automodel-c: {launcher}\n") == 1, text
    return took


def whole(run):
    """Nothing that is called a step is less than one; LATEST names one."""
    steps = sorted(p.name for p in run.checkpoints.glob("step_*"))
    for name in steps:
        subprocess.run(["sha256sum", "-c", "--quiet", "--strict", "SHA256SUMS"], cwd=run.checkpoints / name, check=True)
    latest = run.checkpoints / "LATEST"
    assert not latest.exists() or latest.read_text().strip() in steps
    return int(latest.read_text().strip().removeprefix("step_")) if latest.exists() else 0


def test_killed_at_random_points_of_a_step(data, undisturbed, tmp_path, seed):
    """One rank after another, each time in one of the next two steps after a start."""
    random_, steps = random.Random(seed), STEPS + 4 * (KILLS - 1)
    more, kept = f"step_scheduler.max_steps={steps}", 0
    for _ in range(KILLS):
        rank, share = random_.randrange(RANKS), random_.random()
        with Run(tmp_path, data, more, *resume(tmp_path)) as run:
            run.until(lambda kept=kept: run.began() and run.steps() >= kept + 1)
            time.sleep(2 * share * run.seconds())
            seen = run.steps()
            run.ranks()[rank].send_signal(signal.SIGKILL)
            said = f"RankFailure: rank {rank} failed: stopped without a message (killed?)"
            took = ends(run, time.monotonic(), said, launcher=f"rank {rank} failed first: killed by SIGKILL")
            kept = whole(run)
            assert kept >= (seen - 1) // 2 * 2, "the last checkpoint that was written is there"
        record("kill -9", rank=rank, step=seen, share=round(share, 3), took=round(took, 2), kept=kept)
    finish(tmp_path, data, more)
    rows = losses(tmp_path)
    assert rows[:STEPS] == undisturbed and len(rows) == steps
    if KILLS > 1:
        finish(tmp_path / "undisturbed", data, more)
        assert rows == losses(tmp_path / "undisturbed")


@full
def test_a_rank_that_raises(data, undisturbed, tmp_path):
    with Run(tmp_path, data, fault=f"raise:{RANKS - 1}:5") as run:
        run.until(lambda: run.steps() >= 4)
        took = ends(run, time.monotonic(), f"RankFailure: rank {RANKS - 1} failed: ZeroDivisionError: made to fail")
        assert whole(run) == 4
    finish(tmp_path, data)
    assert losses(tmp_path) == undisturbed
    record("a rank raises", took=round(took, 2))


def test_a_loss_that_is_no_number(data, undisturbed, tmp_path):
    """It is told whose, and no weight has seen it."""
    with Run(tmp_path, data, fault="nan:0:4") as run:
        run.until(lambda: run.steps() >= 3)
        took = ends(run, time.monotonic(), "FloatingPointError: step 4: loss nan", "the loss is not on rank 0")
        assert whole(run) == 2
    if KILLS > 1:
        finish(tmp_path, data)
        assert losses(tmp_path) == undisturbed
    assert losses(tmp_path)[:3] == undisturbed[:3]
    record("a NaN loss", took=round(took, 2))


@full
def test_a_rank_that_is_only_slow(data, undisturbed, tmp_path):
    """Stopped for four seconds, sixteen heartbeats: nothing is lost, and nobody is blamed."""
    with Run(tmp_path, data) as run:
        run.until(lambda: run.steps() >= 3)
        slow = run.ranks()[RANKS - 1]
        slow.send_signal(signal.SIGSTOP)
        time.sleep(4)
        slow.send_signal(signal.SIGCONT)
        assert run.wait()[0] == 0, run.text()
    assert losses(tmp_path) == undisturbed
    record("a slow rank")


@contextlib.contextmanager
def small_disk(folder, size):
    """A file system of `size` bytes at a folder."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("where", ["background", "foreground"])
@full
def test_a_disk_that_is_full(data, undisturbed, tmp_path, where):
    """It takes one checkpoint and half of the next."""
    if os.geteuid():
        pytest.skip("only root can mount a small disk")
    folder = tmp_path / "checkpoints"
    with small_disk(folder, "4500k"):
        with Run(tmp_path, data, f"checkpoint.is_async={where == 'background'}".lower()) as run:
            run.until(lambda: run.steps() >= 3)
            took = ends(run, time.monotonic(), "No space left on device")
            assert whole(run) == 2
        subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)
        finish(tmp_path, data)
    assert losses(tmp_path) == undisturbed
    record(f"disk full, {where}", took=round(took, 2))


@full
def test_a_file_that_cannot_grow(data, undisturbed, tmp_path):
    """What a full disk is to whoever is not root: from the second checkpoint on no file of one rank may be large."""
    with Run(tmp_path, data) as run:
        run.until(lambda: (run.checkpoints / "LATEST").exists())
        run.ranks()[RANKS - 1].rlimit(resource.RLIMIT_FSIZE, (1 << 14, 1 << 14))
        run.until(lambda: run.steps() >= 3)
        took = ends(run, time.monotonic(), f"was not written: rank {RANKS - 1}: ")
        kept = whole(run)
        assert kept >= 2
    finish(tmp_path, data)
    assert losses(tmp_path) == undisturbed
    record("a file that cannot grow", took=round(took, 2), kept=kept)


@pytest.mark.parametrize("number", range(min(KILLS, 5)))
@full
def test_killed_while_it_writes_a_checkpoint(data, undisturbed, tmp_path, seed, number):
    random_ = random.Random(seed)
    rank = random_.randrange(RANKS)
    with Run(tmp_path, data, f"checkpoint.is_async={str(number % 2 == 1).lower()}") as run:
        run.until(lambda: (run.checkpoints / "LATEST").exists())
        beside = run.until(lambda: list(run.checkpoints.glob(".step_*.tmp")))
        time.sleep(0.05 * random_.random())
        run.ranks()[rank].send_signal(signal.SIGKILL)
        took = ends(run, time.monotonic(), launcher=f"rank {rank} failed first: killed by SIGKILL")
        kept = whole(run)
        assert kept >= 2
    finish(tmp_path, data)
    assert losses(tmp_path) == undisturbed
    record("kill -9 in a checkpoint", rank=rank, took=round(took, 2), writing=beside[0].name, kept=kept)


@full
def test_a_damaged_checkpoint(data, undisturbed, tmp_path, seed):
    """LATEST goes on from the one before, and says so."""
    with Run(tmp_path, data, "step_scheduler.max_steps=6") as run:
        assert run.wait()[0] == 0, run.text()
    path = tmp_path / "checkpoints" / "step_6" / f"__{RANKS - 1}_0.distcp"
    flip(path, random.Random(seed).randrange(8 * path.stat().st_size))
    text = finish(tmp_path, data)
    assert f"step_6 is damaged: {path.name} is not what was written; going on from step_4" in text
    assert losses(tmp_path) == undisturbed
    record("a bit flipped in the last checkpoint")


@full
def test_a_sample_that_is_damaged(data, undisturbed, tmp_path):
    """Its header is good, so that it is only seen when it is its turn; repaired, the run goes on."""
    copy = tmp_path / "digits"
    shutil.copytree(data, copy)
    names = [path for path in sorted((copy / "images").iterdir()) if path.suffix == ".png"][:60]
    whole_files = {path: path.read_bytes() for path in names[20:]}
    for path, content in whole_files.items():
        path.write_bytes(content[:60])
    began = time.monotonic()
    with Run(tmp_path, copy, "dataset.cache=false") as run:
        status, _ = run.wait()
        text = run.text()
        assert status == 1 and "BadSample" in text and re.search(r"train\.jsonl, line \d+: OSError", text), text
        assert time.monotonic() - began < 90
        whole(run)
    for path, content in whole_files.items():
        path.write_bytes(content)
    finish(tmp_path, copy)
    assert losses(tmp_path) == undisturbed
    record("a damaged sample", seen=run.steps())


@pytest.mark.parametrize("to", ["launcher", pytest.param("one rank", marks=full)])
def test_sigterm(data, undisturbed, tmp_path, to):
    """The step is finished, saved, and nothing at all is lost."""
    with Run(tmp_path, data, "step_scheduler.ckpt_every_steps=100") as run:
        run.until(lambda: run.steps() >= 3)
        target = run.process if to == "launcher" else run.ranks()[RANKS - 1]
        target.send_signal(signal.SIGTERM)
        began = time.monotonic()
        status, _ = run.wait()
        took, text = time.monotonic() - began, run.text()
        step = int(re.search(r"ended by SIGTERM after step (\d+)", text)[1])
        assert status == EXIT_STATUS and took < PROMISE_S, text
        assert run.steps() == step == whole(run) and step < STEPS
        assert "RankFailure" not in text
    finish(tmp_path, data)
    assert losses(tmp_path) == undisturbed
    record(f"SIGTERM to {to}", took=round(took, 2), step=step)
