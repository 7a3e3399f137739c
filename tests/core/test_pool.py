"""The thread pool: a C driver, plain, on OpenMP's team and under ThreadSanitizer (submitters, nesting, fork, changing
counts)."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from automodel_c import build_info

ROOT = Path(__file__).parents[2]
SOURCES = ["tests/core/pool_tsan.c", "csrc/core/am_pool.c", "csrc/core/am_openmp.c"]
FLAGS = ["-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1", "-g", "-pthread", "-Icsrc/core"]


EXTRA = {
    "plain": [],
    "openmp": ["-Wl,--no-as-needed", "-fopenmp"],  # libgomp is in the process, as beside torch
    "thread": ["-fsanitize=thread", "-fno-sanitize-recover"],
    "undefined": ["-fsanitize=undefined", "-fno-sanitize-recover"],
}


@pytest.mark.parametrize("kind", EXTRA)
def test_driver(kind, tmp_path):
    if build_info()["sanitizer"]:
        pytest.skip("a sanitizer is loaded into this process already; the plain suite runs the driver")
    compiler = shlex.split(os.environ.get("CC", "gcc"))
    program = str(tmp_path / "pool")
    subprocess.run([*compiler, *FLAGS, *EXTRA[kind], *SOURCES, "-o", program, "-ldl"], cwd=ROOT, check=True)
    environment = {**os.environ, "TSAN_OPTIONS": "die_after_fork=0 exitcode=66", "OMP_NUM_THREADS": "4"}
    rounds = os.environ.get("AM_POOL_ROUNDS", "300")
    done = subprocess.run([program, rounds], env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "pool: fine\n"), done.stderr
