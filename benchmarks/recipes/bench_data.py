"""Packing 100,000 samples, and planning the frames of 160 images and clips over 32 ranks.

    python -m benchmarks.recipes.bench_data [--json FILE]

Asked: 2 s for the packing on one core, 1 ms for a plan. Gate, before any time: every sample is in one pack, no pack is
over its capacity; every frame has one rank. Predicted: a heap operation a sample, 100,000 of 1.5 us, and the sort:
0.2 s; the plan is one call of `frame_partition` and a pass over the grid, 0.1 ms.
"""

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path

from automodel_c.data.packing import knapsack
from automodel_c.parallel.frame_plan import plan_frames
from benchmarks.harness import machine

JSON = Path(__file__).parents[1] / "results/cpu/data.json"
SAMPLES, CAPACITY, RANKS = 100_000, 131_072, 32


def lengths():
    """Heavy-tailed: most of some hundred tokens, some of 60,000."""
    rng = random.Random(0)
    return [int(rng.paretovariate(1.1) * 200) % 60_000 + 16 for _ in range(SAMPLES)]


def grids():
    rng = random.Random(1)
    return [tuple(rng.choice(sides) for sides in ([1, 1, 8], [16, 32, 48, 64], [16, 32, 64])) for _ in range(160)]


def plan(grid, rank=5):
    return plan_frames(grid, RANKS, rank, merge=2, alpha=3456, min_local_patch_rows=96)


def check(samples, bins, grid):
    assert sorted(i for each in bins for i in each) == list(range(SAMPLES)), "every sample is in one pack"
    assert max(sum(samples[i] for i in each) for each in bins) <= CAPACITY, "no pack is over its capacity"
    owned = [sum(t * h * w for t, h, w in plan(grid, rank).grid) for rank in range(RANKS)]
    assert sum(owned) == sum(t * h * w for t, h, w in grid), "every frame has one rank"


def row(what, asked, call, rounds):
    found = []
    for _ in range(rounds):
        began = time.thread_time()
        call()
        found.append(time.thread_time() - began)
    return {"what": what, "asked_s": asked, "s": found}


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recipes.bench_data", description=__doc__.split("\n")[0])
    parser.add_argument("--json", default=JSON, help="write here")
    options = parser.parse_args()
    samples, grid = lengths(), grids()
    bins = knapsack(samples, CAPACITY)
    check(samples, bins, grid)
    rows = [
        row("pack 100,000 samples", 2.0, lambda: knapsack(samples, CAPACITY), 7)
        | {"packs": len(bins), "fill": sum(samples) / len(bins) / CAPACITY},
        row("plan frames over 32 ranks", 1e-3, lambda: plan(grid), 101),
    ]
    for each in rows:
        ms = statistics.median(each["s"]) * 1e3
        print(f"{each['what']:28s} {ms:8.3f} ms (asked {each['asked_s'] * 1e3:g})")
    Path(options.json).write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    return int(any(statistics.median(each["s"]) > each["asked_s"] for each in rows))


if __name__ == "__main__":
    sys.exit(main())
