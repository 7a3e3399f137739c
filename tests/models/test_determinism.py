"""The same seed, the same bits: loss and every gradient, again and with other numbers of threads."""

import pytest
import torch

from automodel_c import _amcore, build_info
from tests.models import packs


@pytest.fixture(autouse=True)
def _threads_restored():
    before = build_info()["num_threads"]
    yield
    _amcore.set_num_threads(before)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_same_bits_with_any_threads(tmp_path, family):
    """Threads of the extension; torch's own, whose products may add in another order, stay as many as they are."""
    _, model = packs.checkpoint(tmp_path, family)
    batch = packs.pack(packs.PACKS["mixed"], padding=3)
    expected = packs.ours(model, batch)
    for threads in (1, 1, 2, 5):
        _amcore.set_num_threads(threads)
        found = packs.ours(model, batch)
        assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == [], threads
