"""One way to measure: build inputs, gate, warm up, interleaved rounds, table, JSON.

A benchmark file makes `Case`s and calls `main`. No time is shown for a case whose gate is red, and the exit status is
1; also when a bar or --min-ratio is missed. A ratio is peer / ours, so more than 1 is faster than the peer; `self` is
ours over ours in the same rounds, the spread inside which two things are equal. Beside other processes look at the
ratio of least times, with many rounds: medians then tell how long a team of threads waits for one that has no core.
"""

import argparse
import json
import math
import os
import platform
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from automodel_c import _amcore, build_info
from benchmarks.peers import Peer, version_of

ROOT = Path(__file__).parents[1]
SAMPLE_S = 200e-6  # a sample repeats the call until it lasts about this long
LEAST = 3  # rounds, however long they take
LONG_S = 0.1  # calls that take longer are not led by an untimed one: they fill the caches themselves


@dataclass
class Case:
    """One row. `gate(outcomes)` gets {name: result of one call}, raises AssertionError when one is wrong, and may
    return numbers for the JSON; `bar_s` is a promise on our median."""

    op: str
    direction: str
    shape: str
    dtype: str
    ours: Callable
    gate: Callable
    peers: list[Peer] = field(default_factory=list)
    inputs: object = None
    floor_bytes: float = 0.0
    bar_s: float = math.inf
    device: str = "cpu"


def main(op, cases, argv=None, *, budget_s=math.inf):
    """Command line of one benchmark; `cases` maps a shape's name to a function that makes its Cases. After `budget_s`
    seconds a case's rounds end early, at LEAST of them: for peers that take a second a call."""
    options = _parser(op, cases).parse_args(argv)
    _set_threads(options.threads)
    rows, failures = [], []
    bandwidth = None
    for name in options.shape or cases:
        for case in cases[name]():
            peers = _available(case)
            calls = {"ours": case.ours, **{peer.name: peer.make(case.inputs) for peer in peers}}
            gate = None
            if not options.no_gate:
                try:
                    gate = case.gate({label: call() for label, call in calls.items()})
                except AssertionError as error:
                    print(f"{_label(case)}  RED GATE, nothing is timed: {error}")
                    failures.append(f"{_label(case)}: gate")
                    continue
            times = measure(calls, options.rounds, budget_s)
            if case.floor_bytes and bandwidth is None:
                bandwidth = copy_bandwidth()
            row = _row(case, times, peers, gate, bandwidth)
            _show(case, row)
            rows.append(row)
            failures += _missed(case, row, options.min_ratio)
    whole = not options.shape and not options.no_gate and not failures
    _write(op, rows, options, whole)
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    sys.exit(1 if failures else 0)


def measure(calls, rounds, budget_s=math.inf):
    """{name: seconds of a call in each round}; 'self' is ours once more.

    Each round has its own order and each sample starts with an untimed call, so that nobody always follows the peer
    that empties the caches.
    """
    calls = {**calls, "self": calls["ours"]}
    repeats = {name: _repeats(call) for name, call in calls.items()}
    times = {name: [] for name in calls}
    order, shuffle = list(calls), random.Random(0).shuffle
    started = time.perf_counter()
    for made in range(rounds):
        if made >= LEAST and time.perf_counter() - started > budget_s:
            break
        shuffle(order)
        for name in order:
            call, count = calls[name], repeats[name]
            if min(times[name], default=0.0) < LONG_S:
                call()
            began = time.perf_counter_ns()
            for _ in range(count):
                call()
            times[name].append((time.perf_counter_ns() - began) * 1e-9 / count)
    return times


def _repeats(call):
    """Warms up and finds how many calls make a sample."""
    count = 1
    while True:
        began = time.perf_counter_ns()
        for _ in range(count):
            call()
        elapsed = (time.perf_counter_ns() - began) * 1e-9
        if elapsed >= SAMPLE_S / 2 or count >= 1 << 16:
            return max(1, round(count * SAMPLE_S / max(elapsed, 1e-9))) if elapsed < SAMPLE_S else count
        count *= 2


def copy_bandwidth():
    """Bytes a second, read and written, of a large copy with torch's threads: the floor of what memory allows."""
    import torch

    source = torch.ones(1 << 26, dtype=torch.uint8)
    target = torch.empty_like(source)
    best = min(measure({"ours": lambda: target.copy_(source)}, 5)["ours"])
    return 2 * source.numel() / best


def statistics_of(seconds):
    """Milliseconds: median, least, and the 10th and 90th percentile."""
    p10, median, p90 = np.percentile(seconds, [10, 50, 90]) * 1e3
    return {"ms_median": float(median), "ms_min": min(seconds) * 1e3, "ms_p10": float(p10), "ms_p90": float(p90)}


def _row(case, times, peers, gate, bandwidth):
    stats = {name: statistics_of(seconds) for name, seconds in times.items()}
    ours = stats["ours"]["ms_median"]
    floor_ms = case.floor_bytes / bandwidth * 1e3 if case.floor_bytes else 0.0
    return {
        "op": case.op,
        "pass": case.direction,
        "shape": case.shape,
        "dtype": case.dtype,
        "device": case.device,
        "rounds": len(times["ours"]),
        "ours": stats["ours"],
        "peers": {peer.name: {"version": peer.version, **stats[peer.name]} for peer in peers},
        "ratio": {peer.name: stats[peer.name]["ms_median"] / ours for peer in peers},
        "ratio_of_least": {peer.name: stats[peer.name]["ms_min"] / stats["ours"]["ms_min"] for peer in peers},
        "self_ratio": stats["self"]["ms_median"] / ours,
        "floor_share": floor_ms / ours,
        "gate": gate,
    }


def _available(case):
    found = []
    for peer in case.peers:
        reason = peer.available()
        if reason is None:
            found.append(peer)
        else:
            print(f"{_label(case)}  {peer.name} is missing: {reason}")
    return found


def _label(case):
    return f"{case.op} {case.direction}  {case.shape} {case.dtype}"


def in_words(milliseconds):
    """A time with the unit that suits it."""
    return f"{milliseconds:.2f} ms" if milliseconds >= 0.1 else f"{milliseconds * 1e3:.2f} us"


def _show(case, row):
    parts = [
        f"{_label(case):<48}",
        f"ours {in_words(row['ours']['ms_median'])} (min {in_words(row['ours']['ms_min'])})",
    ]
    for name, ratio in row["ratio"].items():
        least = row["ratio_of_least"][name]
        parts.append(f"{name} {in_words(row['peers'][name]['ms_median'])} ({ratio:.2f}x, of least times {least:.2f}x)")
    parts += [f"floor {row['floor_share']:.0%}"] if row["floor_share"] else []
    parts.append(f"self {row['self_ratio']:.2f}")
    parts += [f"bar {in_words(case.bar_s * 1e3)}"] if math.isfinite(case.bar_s) else []
    print("   ".join(parts), flush=True)


def _missed(case, row, min_ratio):
    missed = []
    if row["ours"]["ms_median"] > case.bar_s * 1e3:
        missed.append(f"{_label(case)}: {in_words(row['ours']['ms_median'])}, bar {in_words(case.bar_s * 1e3)}")
    low = {name: ratio for name, ratio in row["ratio"].items() if min_ratio is not None and ratio < min_ratio}
    return missed + [f"{_label(case)}: {ratio:.2f}x of {name}, at least {min_ratio}x" for name, ratio in low.items()]


def _set_threads(count):
    _amcore.set_num_threads(count)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(count)


def machine():
    """What a number depends on besides the code."""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "cpu": names[0].split(":", 1)[1].strip() if names else cpu,
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": version_of("torch"),
        "numpy": np.__version__,
        "commit": commit.stdout.strip(),
        "build": build_info(),
    }


def write_gpu_rows(path, rows, commit, packages=()):
    """JSON of a GPU benchmark. commit: what was measured, where there is no git; packages: whose versions are told."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    about = machine()
    if shutil.which(query[0]):
        about |= {"gpu": subprocess.run(query, capture_output=True, text=True).stdout.strip()}
    about |= {"commit": commit} if commit else {}
    about |= {"peers": {name: version_of(name) for name in packages}} if packages else {}
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")


def _write(op, rows, options, whole):
    path = Path(options.json) if options.json else ROOT / "benchmarks/results/cpu" / f"{op}.json" if whole else None
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), "threads": options.threads, "rows": rows}, indent=1) + "\n")


def _parser(op, cases):
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.ops.bench_{op}", description=__doc__.split("\n")[0])
    parser.add_argument("--shape", nargs="+", choices=list(cases), help="only these")
    parser.add_argument("--json", help="write here; a whole green run goes to benchmarks/results/cpu by itself")
    parser.add_argument("--min-ratio", type=float, help="fail when a peer is faster than this")
    parser.add_argument("--no-gate", action="store_true", help="time without checking the results")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=31)
    return parser
