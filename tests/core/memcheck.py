"""The binding layer under valgrind's memcheck: python -m tests.core.memcheck

Every door that takes NumPy arrays, lists and capsules, rightly and wrongly, and every producer of hostile.c, without
torch, whose allocations would hide ours. What counts is what has the extension in its stack.
"""

import importlib.machinery
import importlib.util
import itertools
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import numpy as np

from automodel_c import _amcore

ROOT = Path(__file__).parents[2]
FLAGS = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-Icsrc/python"]
OURS = (ValueError, TypeError, NotImplementedError, MemoryError, BufferError, RuntimeError)
ODD = [None, 7, 2**70, "x", [0, 1.5], [0, 2**64], [[1]], (), np.zeros(3, ">i8"), np.zeros((2, 2), np.int64), object()]


def load_hostile(folder):
    """Compiles tests/core/hostile.c into `folder` and imports it."""
    out = Path(folder) / f"hostile{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    compiler = [*shlex.split(os.environ.get("CC", "gcc")), *FLAGS, f"-I{sysconfig.get_path('include')}"]
    subprocess.run([*compiler, "tests/core/hostile.c", "-o", str(out)], cwd=ROOT, check=True)
    spec = importlib.util.spec_from_file_location("hostile", out)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def attempt(method, *args, **kwargs):
    try:
        return getattr(_amcore, method)(*args, **kwargs)
    except OURS as error:
        return error


def calls(hostile):
    """Makes the calls; how many."""
    index, rows = np.arange(6), np.ones((3, 2), np.float32)
    made = itertools.count()

    def producers(array, code):
        strides = tuple(s // array.itemsize for s in array.strides)
        for kind, behind in itertools.product(hostile.KINDS, (hostile.Producer, hostile.Table)):
            yield behind(array.ctypes.data, array.shape, strides, code, 8 * array.itemsize, kind)

    adam = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0}
    lists = lambda n=2: [np.ones(n, np.float32) for _ in range(2)]  # noqa: E731
    for given in (*ODD, [0, 2, 2, 5], (0, 1), index, index[::2], index.astype(np.int32), *producers(index, 0)):
        for method in ("index_array", "docs_from_ids", "docs_from_offsets"):
            attempt(method, given), next(made)
        attempt("frame_partition", given, 2, alpha=1, bisect=False), next(made)
    for given in (*ODD, rows, rows[:, ::2], rows.astype(np.float64), *producers(rows, 2)):
        attempt("exchange_copy", np.zeros((3, 2), np.float32), given, [0, 0, 3], reverse=False, runs=False), next(made)
        attempt("exchange_copy", given, rows, [0, 0, 3], reverse=False, runs=False), next(made)
        attempt("grad_sumsq", np.zeros(1), np.zeros(1024), [given, rows]), next(made)
        attempt("comm_reduce_parts", np.zeros(2, np.float32), given, scale=1.0), next(made)
        for name in ("params", "exp_avgs", "exp_avg_sqs", "grads"):
            tensors = {key: lists() for key in ("params", "exp_avgs", "exp_avg_sqs", "grads")}
            tensors[name] = [np.ones(2, np.float32), given]
            attempt("adam_step", **tensors, steps=lists(1), **adam), next(made)
    attempt("index_array"), attempt("index_array", [1], [1]), attempt("index_array", other=1)
    return next(made) + 3


def main():
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        options = ["--leak-check=full", "--show-leak-kinds=definite", "--error-limit=no", "--num-callers=40"]
        python = [sys.executable, "-m", "tests.core.memcheck", "calls", folder]
        command = ["valgrind", *options, f"--log-file={log}", *python]
        environment = {**os.environ, "PYTHONMALLOC": "malloc", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        blocks = re.split(r"==\d+== \n", log.read_text())
    bad = [
        block for block in blocks if "_amcore" in block and re.search(r"Invalid|uninitialised|definitely lost", block)
    ]
    print(
        "".join(f"{block}\n" for block in bad) + f"{done.stdout.strip()}, {len(bad)} errors with the extension in them"
    )
    return 1 if bad or done.returncode else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["calls"]:
        print(f"{calls(load_hostile(sys.argv[2]))} calls")
    else:
        sys.exit(main())
