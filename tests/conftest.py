"""Fixtures of every test: seeds, instruction sets, thread counts, poisoned memory, and skips in words."""

import os
import secrets
import sys
import zlib

import hypothesis
import numpy as np
import pytest
import torch

from automodel_c import _amcore
from automodel_c.ops import _alloc
from tests.guards import CheckedAllocator, Guards

# transformers takes these wherever they are installed, also for tensors that they cannot run; its own code is the twin
for package in ("fla", "causal_conv1d"):
    sys.modules.setdefault(package, None)

ISAS = ("scalar", "avx2", "avx512", "avx512_bf16", "amx_bf16")
MACHINE_ISAS = ISAS[: ISAS.index(_amcore.build_info()["best_isa"]) + 1]

_COMMON = {
    "deadline": None,
    "suppress_health_check": [hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
}
hypothesis.settings.register_profile("ci", max_examples=50, derandomize=True, database=None, **_COMMON)
hypothesis.settings.register_profile("long", max_examples=2000, **_COMMON)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture
def seed(request):
    """A fresh seed for torch and `rng`, shown when the test fails; AM_TEST_SEED=... repeats one.

    Under CI it is the test's own, so that a change is judged on the inputs that the last one was judged on.
    """
    own = zlib.crc32(request.node.nodeid.encode()) if os.environ.get("CI") else secrets.randbits(32)
    value = int(os.environ.get("AM_TEST_SEED") or own)
    request.node.add_report_section("setup", "seed", f"AM_TEST_SEED={value} repeats this run")
    torch.manual_seed(value)
    return value


@pytest.fixture
def rng(seed):
    return np.random.default_rng(seed)


@pytest.fixture(params=MACHINE_ISAS)
def isa(request):
    """Runs the test once for every row of CPU kernels that this machine has."""
    before = _amcore.build_info()["isa"]
    _amcore.set_isa(request.param)
    yield request.param
    _amcore.set_isa(before)


@pytest.fixture(params=[1, 2, 5], ids=lambda n: f"{n}-threads")
def threads(request):
    """Runs the test with 1, 2 and 5 threads of the extension."""
    before = _amcore.build_info()["num_threads"]
    _amcore.set_num_threads(request.param)
    yield request.param
    _amcore.set_num_threads(before)


@pytest.fixture
def guarded():
    """guarded(shape, dtype=torch.float32, device="cpu"): poisoned memory between canaries, checked at the end of the
    test and at every guarded.check()."""
    guards = Guards()
    yield guards
    guards.check()


@pytest.fixture(autouse=True)
def _poisoned_operators(monkeypatch):
    allocator = CheckedAllocator(Guards())
    monkeypatch.setattr(_alloc, "empty", allocator.empty)
    monkeypatch.setattr(_alloc, "workspace", allocator.workspace)
    yield
    allocator.guards.check()


def pytest_runtest_setup(item):
    needs_hopper = item.get_closest_marker("sm90") is not None
    if not needs_hopper and item.get_closest_marker("cuda") is None:
        return
    if not _amcore.build_info()["cuda"]:
        pytest.skip("the extension was built without CUDA: install nvcc and rebuild with AM_CUDA=1")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device is visible to torch on this machine")
    if needs_hopper and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip(f"needs a Hopper GPU (H100, H200), this is {torch.cuda.get_device_name()}")
