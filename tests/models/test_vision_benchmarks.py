"""The benchmarks of the vision tower run, gates and all, at small sizes on the CPU."""

import sys

from benchmarks.parallel import bench_frames_cuda
from benchmarks.recipes import bench_tower


def test_the_tower(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_tower", "--tiny"])
    assert bench_tower.main() == 0
    assert capsys.readouterr().out.count("gate") == 1 + len(bench_tower.CHOSEN)


def frames():
    seconds = lambda calls, rounds: {name: float(call() is not None) for name, call in calls.items()}  # noqa: E731
    return list(bench_frames_cuda.rows(bench_tower.TINY, 9000, "cpu", seconds))


def test_frames_over_ranks(ranks):
    (row,), (other,) = ranks.run(frames)
    assert row["patches"] > 4 * 8000 and 0 < row["sent_MiB"] + other["sent_MiB"] < 1
