"""A run of many steps whose packs are never the same: nothing grows, and no plan is made twice.

AM_SOAK sets the steps (60 here, 2,000 with `make soak`).
"""

import itertools
import json
import os
import statistics
import time

import pytest

from tests.faults.runs import RANKS, Run, losses, record
from tests.faults.test_runs import _poisoned_operators, data  # noqa: F401

STEPS = int(os.environ.get("AM_SOAK", "60"))
FLAT = {"kib": 0.25, "malloc_kib": 0.125, "blocks": 0.5}  # a step: less than one leaked plan or tensor of each


def growth(rank, what):
    """A step, over the second half: the median of all pairs' slopes, which no single step can move; NaN of one."""
    points = [(row["step"], row[what]) for row in rank[len(rank) // 2 :] if what in row]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(points, 2)]
    return statistics.median(slopes) if slopes else float("nan")


@pytest.fixture(scope="module")
def rows(data, tmp_path_factory):  # noqa: F811
    """What each rank wrote after every step."""
    folder, began = tmp_path_factory.mktemp("soak"), time.monotonic()
    overrides = (
        f"step_scheduler.max_steps={STEPS}",
        f"lr_scheduler.lr_decay_steps={STEPS}",
        "step_scheduler.ckpt_every_steps=20",
        "checkpoint.max_recent_checkpoints=2",
        "dataset.limit=1500",
        "dataset.cache=false",  # which grows until all samples have been seen
    )
    with Run(folder, data, *overrides, watch=folder / "watch") as run:
        status, _ = run.wait(timeout=60 + 10 * STEPS)
        assert status == 0, run.text()
    texts = [(folder / f"watch.{rank}").read_text() for rank in range(RANKS)]
    found = [[json.loads(line) for line in text.splitlines()] for text in texts]
    record(
        "soak", steps=STEPS, seconds=round(time.monotonic() - began), files=[rank[-1]["files"] for rank in found],
        **{f"{what}_a_step": [round(growth(rank, what), 3) for rank in found] for what in FLAT},
        plans=[rank[-1]["plans"] for rank in found], packs=[rank[-1]["packs"] for rank in found],
    )  # fmt: skip
    assert [len(rank) for rank in found] == [STEPS] * RANKS and len(losses(folder)) == STEPS
    return found


def test_memory_is_flat(rows):
    """In the second half, when all that is made once is made."""
    if STEPS < 500:
        pytest.skip(f"{STEPS} steps are still warming up, which looks like a leak: AM_SOAK=500 or more judges memory")
    for rank, (what, bound) in itertools.product(rows, FLAT.items()):
        assert growth(rank, what) < bound, f"{what}: {growth(rank, what)} more a step, {bound} are allowed"


def test_descriptors_and_threads_do_not_grow(rows):
    for rank in rows:
        middle = len(rank) // 2
        for what in ("files", "threads"):
            most = [max(row[what] for row in half) for half in (rank[5:middle], rank[middle:])]
            assert most[1] <= most[0] + 1, f"{what}: {most}"


def test_no_plan_is_made_twice(rows):
    """One of the pack's documents and one of its attention, which forward, recomputation and backward of all layers
    share."""
    for rank in rows:
        last = rank[-1]
        assert last["plans"] == last["packs"] > 0 and last["attention"] <= last["plans"]


def test_losses_fall(rows):
    """It is training that was watched."""
    means = [statistics.fmean(row["loss"] for row in part) for part in (rows[0][:10], rows[0][-10:])]
    assert means[1] < means[0]
