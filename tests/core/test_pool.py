"""The thread pool: a C driver, plain and under ThreadSanitizer (submitters, nesting, fork, changing counts)."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from automodel_c import build_info

ROOT = Path(__file__).parents[2]
SOURCES = ["tests/core/pool_tsan.c", "csrc/core/am_pool.c"]
FLAGS = ["-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1", "-g", "-pthread", "-Icsrc/core"]


@pytest.mark.parametrize("sanitizer", ["", "thread", "undefined"], ids=["plain", "thread", "undefined"])
def test_driver(sanitizer, tmp_path):
    if build_info()["sanitizer"]:
        pytest.skip("a sanitizer is loaded into this process already; the plain suite runs the driver")
    compiler = shlex.split(os.environ.get("CC", "gcc"))
    extra = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover"] if sanitizer else []
    program = str(tmp_path / "pool")
    subprocess.run([*compiler, *FLAGS, *extra, *SOURCES, "-o", program], cwd=ROOT, check=True)
    environment = {**os.environ, "TSAN_OPTIONS": "die_after_fork=0 exitcode=66"}
    rounds = os.environ.get("AM_POOL_ROUNDS", "300")
    done = subprocess.run([program, rounds], env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "pool: fine\n"), done.stderr
