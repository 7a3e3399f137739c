"""The extension as a module: what it tells about itself, how it loads, what it exports."""

import gc
import importlib.util
import os
import re
import subprocess
import sys
import weakref

import pytest

from automodel_c import _amcore, build_info
from tests.conftest import ISAS, MACHINE_ISAS


def python(code, **environment):
    """Runs code in a fresh interpreter; its standard output, or AssertionError with its standard error."""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_build_info():
    info = build_info()
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", info["version"])
    assert "partition" in info["slices"].split()
    assert info["isa"] in ISAS and info["best_isa"] == MACHINE_ISAS[-1]
    assert isinstance(info["cuda"], bool) and isinstance(info["debug"], bool)
    assert bool(info["cuda_version"]) == info["cuda"]
    assert info["sanitizer"] in ("", "address", "thread") and info["num_threads"] >= 1 and info["compiler"]


def test_only_the_module_initialiser_is_exported():
    out = subprocess.run(["nm", "-D", "--defined-only", _amcore.__file__], capture_output=True, text=True, check=True)
    symbols = {line.split()[-1] for line in out.stdout.splitlines()}
    if build_info()["sanitizer"]:
        symbols = {name for name in symbols if not re.match(r"_*(a|t|ub)san_|__odr_asan|\.", name)}
    assert symbols == {"PyInit__amcore"}


def test_no_vendor_library_is_needed():
    out = subprocess.run(["ldd", _amcore.__file__], capture_output=True, text=True, check=True).stdout
    assert not re.search("cuda|nvidia|cublas|nccl|torch", out), out


@pytest.mark.parametrize("asked", [*ISAS, "", "nonsense"])
def test_am_isa_lowers_and_never_raises(asked):
    expected = asked if asked in MACHINE_ISAS else MACHINE_ISAS[-1]
    code = "import automodel_c; i = automodel_c.build_info(); print(i['isa'], i['best_isa'])"
    assert python(code, AM_ISA=asked) == f"{expected} {MACHINE_ISAS[-1]}"


def test_set_isa_errors(isa):
    with pytest.raises(ValueError, match="set_isa: 'sse' is not one of scalar, avx2, avx512, avx512_bf16"):
        _amcore.set_isa("sse")
    with pytest.raises(TypeError, match="set_isa: the name must be a str"):
        _amcore.set_isa(3)
    with pytest.raises(ValueError, match="is not one of"):
        _amcore.set_isa("scalar\0")  # read up to the null character, this was a name
    with pytest.raises(UnicodeEncodeError):
        _amcore.set_isa("\ud800")
    for name in ISAS[len(MACHINE_ISAS) :]:
        with pytest.raises(NotImplementedError, match=f"this CPU goes up to {MACHINE_ISAS[-1]}, not {name}"):
            _amcore.set_isa(name)
    assert build_info()["isa"] == isa


@pytest.mark.parametrize(
    ("count", "error", "words"),
    [
        (0, ValueError, "set_num_threads: 0 is not between 1 and 256"),
        (-1, ValueError, "set_num_threads: -1 is not between 1 and 256"),
        (257, ValueError, "set_num_threads: 257 is not between 1 and 256"),
        (2**70, ValueError, "set_num_threads: the count does not fit in 64 bits"),
        (True, TypeError, "set_num_threads: the count must be an int"),
        (2.0, TypeError, "set_num_threads: the count must be an int"),
        ("2", TypeError, "set_num_threads: the count must be an int"),
    ],
)
def test_set_num_threads_errors(count, error, words):
    before = build_info()["num_threads"]
    with pytest.raises(error, match=words):
        _amcore.set_num_threads(count)
    assert build_info()["num_threads"] == before


def test_threads_of_a_fresh_process():
    code = "import automodel_c; print(automodel_c.build_info()['num_threads'])"
    assert python(code, OMP_NUM_THREADS="3") == "3"
    assert python(code, OMP_NUM_THREADS="99999") == "256"
    for odd in ("", "0", "-4", "many"):
        assert python(code, OMP_NUM_THREADS=odd) == str(len(os.sched_getaffinity(0)))


def test_second_module_object_has_its_own_state():
    spec = importlib.util.spec_from_file_location("automodel_c._amcore", _amcore.__file__)
    second = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(second)
    assert second is not _amcore and second.frame_partition is not _amcore.frame_partition
    import torch

    for module in (second, _amcore, second):
        assert module.index_array(torch.tensor([1, 2])).tolist() == [1, 2]
    kept = second.index_array
    gone = weakref.ref(second)
    del second, module, spec
    gc.collect()
    assert gone() is not None and kept([3]).tolist() == [3]  # a bound method keeps its module
    del kept
    gc.collect()
    assert gone() is None


def test_import_again_after_removal():
    code = """
import sys, automodel_c
first = sys.modules.pop("automodel_c._amcore")
import importlib
again = importlib.import_module("automodel_c._amcore")
assert again is not first and again.index_array([1]).tolist() == first.index_array([1]).tolist() == [1]
print("fine")
"""
    assert python(code) == "fine"


def test_works_without_torch():
    code = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is blocked")

sys.meta_path.insert(0, Block())
import numpy as np
import automodel_c as amc
assert amc.frame_partition(np.array([3, 4, 5], np.int32), 2, method="bisect").tolist() == [0, 2, 3]
assert amc.docs_from_ids([1, 1, 0, 2]).tolist() == [[0, 2], [3, 4]]
assert len(amc.Pack(cu_seqlens=[0, 2, 5])) == 2 and amc.Pack(doc_ids=np.array([1, 2])).end == 2
assert "torch" not in sys.modules
try:
    amc.ops._alloc
except (ImportError, AttributeError):
    print("fine")
"""
    assert python(code) == "fine"


def test_unknown_attribute():
    import automodel_c

    with pytest.raises(AttributeError, match="module 'automodel_c' has no attribute 'nothing'"):
        _ = automodel_c.nothing
    assert {"ops", "optim", "frame_partition"} <= set(dir(automodel_c))


def test_clean_exit_of_the_interpreter():
    code = "import automodel_c, torch; x = torch.tensor([1]); automodel_c.docs_from_ids(x); print('fine')"
    assert python(code) == "fine"
