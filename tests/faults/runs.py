"""Runs of a tiny recipe by the command line, watched and disturbed from outside."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from automodel_c.recipes.metrics import read_rows

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "examples" / "digits_cp2.yaml")
INJECT = str(Path(__file__).parent / "inject")
RANKS = int(os.environ.get("AM_FAULT_RANKS", "2"))  # 4 with `make faults`; two at a time share their packs
PROMISE_S = 30.0
STEPS = 8
TINY = (
    "model.config.text_config.num_hidden_layers=2",
    "model.config.text_config.full_attention_interval=2",
    "model.config.text_config.hidden_size=32",
    "model.config.text_config.moe_intermediate_size=32",
    "model.config.vision_config.depth=1",
    "model.config.vision_config.hidden_size=32",
    "model.config.vision_config.num_heads=2",
    "step_scheduler.global_batch_size=4",
    "step_scheduler.local_batch_size=1",
    "step_scheduler.num_epochs=100",
    f"step_scheduler.max_steps={STEPS}",
    f"lr_scheduler.lr_decay_steps={STEPS}",
    "step_scheduler.ckpt_every_steps=2",
    "step_scheduler.gc_every_steps=null",
    "packed_sequence.pack_size=64",
    "validation_dataset=null",
    "dataset.limit=120",
    "checkpoint.save_consolidated=false",
    "optimizer.lr=2.0e-3",
    "lr_scheduler.lr_warmup_steps=2",
)


class Run:
    """`automodel-c train` in a folder; `overrides` after those of TINY. fault, watch: AM_FAULT and AM_WATCH of
    inject/sitecustomize.py."""

    def __init__(self, folder, data, *overrides, fault=None, watch=None):
        self.folder = Path(folder)
        self.checkpoints = self.folder / "checkpoints"
        self.folder.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([INJECT, str(ROOT)]), "HF_HUB_OFFLINE": "1"}
        environment |= {"AM_FAULT": fault} if fault else {}
        environment |= {"AM_WATCH": str(watch)} if watch else {}
        self.before = self._metrics()
        self.log = open(self.folder / "log", "w+b")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "automodel_c", "train", RECIPE, "--nproc", str(RANKS), *TINY,
             f"dataset.path_or_dataset={data}", f"output_dir={folder}", *overrides],
            cwd=ROOT, env=environment, stdout=self.log, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in [*self._children(), self.process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        self.log.close()

    def _children(self):
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def ranks(self):
        """{rank: its psutil.Process}."""
        found = {}
        for child in self._children():
            try:
                found[int(child.environ()["RANK"])] = child
            except (KeyError, psutil.Error):
                pass
        return found

    def steps(self):
        """The last step of metrics.jsonl, 0 before the first."""
        return max([row["step"] for row in read_rows(self.folder / "metrics.jsonl")], default=0)

    def _metrics(self):
        path = self.folder / "metrics.jsonl"
        return path.stat().st_ino if path.exists() else None

    def began(self):
        """Whether this run, and not only one before it in this folder, has come to its steps."""
        return self._metrics() != self.before

    def seconds(self):
        """What the last step took, about."""
        row = read_rows(self.folder / "metrics.jsonl")[-1]
        return row["tokens"] / row["tokens_per_s"]

    def until(self, reached, timeout=150.0):
        """Waits until `reached()`; AssertionError with the log where the run ends before."""
        deadline = time.monotonic() + timeout
        while not (value := reached()):
            assert self.process.poll() is None and time.monotonic() < deadline, self.text()
            time.sleep(0.002)
        return value

    def wait(self, timeout=150.0):
        """The exit status once it has ended, and the seconds that this took."""
        began = time.monotonic()
        return self.process.wait(timeout), time.monotonic() - began

    def text(self):
        self.log.flush()
        return (self.folder / "log").read_text(errors="replace")


def losses(folder):
    """What must not change: (step, loss, gradient norm, rate, tokens) of every step."""
    rows = read_rows(Path(folder) / "metrics.jsonl")
    return [[row[key] for key in ("step", "loss", "grad_norm", "lr", "tokens")] for row in rows]


def resume(folder):
    """The overrides that go on from the last checkpoint, where there is one."""
    return ["checkpoint.restore_from=LATEST"] if (Path(folder) / "checkpoints" / "LATEST").exists() else []


def finish(folder, data, *overrides):
    """Goes on from the last checkpoint (or the beginning, where there is none) to the last step; the log."""
    with Run(folder, data, *resume(folder), *overrides) as run:
        status, _ = run.wait()
        assert status == 0, run.text()
        return run.text()


def record(case, **figures):
    """A line of build/faults.jsonl, from which RELIABILITY.md is written."""
    path = ROOT / "build" / "faults.jsonl"
    path.parent.mkdir(exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps({"case": case, "ranks": RANKS, **figures}) + "\n")
