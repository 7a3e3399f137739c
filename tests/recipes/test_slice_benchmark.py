"""The benchmark of a slice of the real decoder, at tiny sizes on the CPU: its gate holds and its rows come out."""

import subprocess
import sys


def test_tiny_slice():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.recipes.bench_slice", "--tiny", "--only", "ours", "--seconds", "0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert next(line.split()[1] for line in lines if line.startswith("gate")) == "loss"
    rows = [line for line in lines if line.startswith("ours")]
    assert [row[30:45].strip() for row in rows] == ["16K", "32K heavy", "16K head", "128K heavy"]
    assert all("tokens/s" in row for row in rows)
