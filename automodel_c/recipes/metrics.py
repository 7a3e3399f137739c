"""metrics.jsonl, validation.jsonl and the progress bar."""

import json
import os
import resource
import time
from pathlib import Path

import torch
from tqdm import tqdm


class MetricsLog:
    """Appends one JSON object a line; every row has an integer `step`.

    On resuming, rows after `last_step` are dropped, so that the file reads as if the run had never stopped.
    """

    def __init__(self, path, last_step=0):
        self.path = Path(path)
        kept = [row for row in read_rows(self.path) if row["step"] <= last_step] if last_step else []
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".tmp")
        beside.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        beside.rename(self.path)

    def append(self, row):
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")


def read_rows(path):
    """The rows of a metrics file, [] when there is none. A last line that a killed run left unfinished is no row."""
    path = Path(path)
    if not path.exists():
        return []
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in whole.splitlines() if line.strip()]


def memory_gib(device):
    """The most memory this rank has held, in GiB: of the GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class Progress:
    """One progress bar on the main rank: loss, tokens a second, memory, time left."""

    def __init__(self, steps, first_step, *, show):
        interval = 0.2 if os.isatty(2) else 10.0  # a file gets a line every ten seconds, not five a second
        self.bar = tqdm(
            total=steps, initial=first_step, disable=not show, unit="step", mininterval=interval, dynamic_ncols=True
        )
        self.clock = time.perf_counter()

    def step_seconds(self):
        """Seconds since the last call."""
        last, self.clock = self.clock, time.perf_counter()
        return self.clock - last

    def skip(self):
        """Takes what happened since the last step (a checkpoint, an evaluation) out of the next step's time."""
        self.clock = time.perf_counter()

    def show(self, row):
        self.bar.set_postfix_str(
            f"loss {row['loss']:.4f}, {row['tokens_per_s']:,.0f} tokens/s, {row['memory']:.2f} GiB", refresh=False
        )
        self.bar.update(1)

    def say(self, text):
        """Prints `text` above the bar."""
        self.bar.clear()
        print(text, flush=True)
        self.bar.refresh()

    def close(self):
        self.bar.close()
