"""What is done before the first step: failures stay where they are, and random numbers are as they were."""

import random

import numpy as np
import pytest
import torch

from automodel_c.recipes import prewarm as module
from automodel_c.recipes.config import load_recipe
from automodel_c.recipes.prewarm import prewarm
from automodel_c.recipes.runtime import runtime_over, start_ranks
from automodel_c.recipes.schema import Prewarm

from .conftest import DIGITS

ALL = Prewarm(True, True, True, True)


@pytest.fixture
def runtime():
    with start_ranks(load_recipe(DIGITS)) as runtime:
        yield runtime


def test_prewarm_does_what_is_asked(runtime):
    assert prewarm(Prewarm(), runtime) == {}
    assert prewarm(Prewarm(fla_gdn_autotune=True, mamba_ssd_autotune=True), runtime) == {}, "nothing tunes itself"
    assert prewarm(ALL, runtime) == {"cublas_backward": False, "comm_groups": True}, "a CPU has no cuBLAS"


def test_prewarm_isolates_failures(runtime, monkeypatch, caplog):
    """The next part runs; numbers that a part drew are not missing afterwards."""

    def fail(_):
        torch.rand(3)
        raise KeyError("no handle")

    monkeypatch.setitem(module._PARTS, "cublas_backward", fail)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    assert prewarm(ALL, runtime) == {"cublas_backward": False, "comm_groups": True}
    assert "prewarm.cublas_backward failed: KeyError: 'no handle'" in caplog.text
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
    assert torch.equal(before[0], after[0]) and before[1] == after[1] and (before[2] == after[2]).all()


def on_four_ranks():
    return prewarm(ALL, runtime_over((2, 2), torch.device("cpu"), 2))


def test_prewarm_of_communicators(rank_pools):
    assert rank_pools(4).run(on_four_ranks) == [{"cublas_backward": False, "comm_groups": True}] * 4
