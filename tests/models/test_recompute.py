"""Activations made again in backward: no bit changes, and what nobody reads is not made twice."""

import pytest
import torch

from automodel_c import _amcore
from tests.models import packs


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_same_bits(tmp_path, family):
    _, model = packs.checkpoint(tmp_path, family)
    batch = packs.pack(packs.PACKS["mixed"])
    expected = packs.ours(model, batch)
    model.recompute(True)
    found = packs.ours(model, batch)
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


def test_down_is_not_made_again(tmp_path, monkeypatch):
    """The experts' sum goes into another sum alone: its gradient does not need it."""
    _, model = packs.checkpoint(tmp_path, "qwen3_5_moe")
    model.recompute(True)
    forward, whole = _amcore.moe_forward, []

    def moe_forward(out, *rest, **options):
        whole.append(out is not None)
        forward(out, *rest, **options)

    monkeypatch.setattr(_amcore, "moe_forward", moe_forward)
    loss, _ = model(packs.pack(packs.PACKS["mixed"]))
    layers = len(whole)
    assert layers >= len(model.model.language_model.layers) and all(whole)
    loss.backward()
    assert whole[layers:] == [False] * layers
