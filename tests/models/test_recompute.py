"""Activations made again in backward: no bit changes, and what nobody reads is not made twice."""

import pytest
import torch

from automodel_c import _amcore
from automodel_c.models.qwen3_5.recompute import made_again
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


def test_backward_twice(tmp_path):
    """A graph that is kept makes its activations again each time."""
    _, model = packs.checkpoint(tmp_path, "qwen3_5_moe")
    model.recompute(True)
    loss, _ = model(packs.pack(packs.PACKS["mixed"]))
    gradients = []
    for keep in (True, False):
        model.zero_grad()
        loss.backward(retain_graph=keep)
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0] and all(torch.equal(gradients[1][name], value) for name, value in gradients[0].items())


@pytest.mark.parametrize("part", ["experts.down_proj", "experts.", "mlp.gate."])
def test_only_experts_learn(tmp_path, part):
    """Then the sum that is left out is all that asks for what the shared expert saves."""
    _, model = packs.checkpoint(tmp_path, "qwen3_5_moe")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part in name)
    batch, gradients = packs.pack(packs.PACKS["mixed"]), []
    for recompute in (False, True):
        model.recompute(recompute)
        model.zero_grad()
        model(batch)[0].backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0] and gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[1][name], value) for name, value in gradients[0].items())


def test_an_error_in_a_recomputation(tmp_path, monkeypatch):
    """The next forward is a first one again."""
    _, model = packs.checkpoint(tmp_path, "qwen3_5_moe")
    model.recompute(True)
    batch = packs.pack(packs.PACKS["mixed"])
    expected, _ = model(batch)
    loss, _ = model(batch)

    def fail(*arguments, **options):
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(_amcore, "moe_forward", fail)
        with pytest.raises(RuntimeError, match="no"):
            loss.backward()
    assert not made_again() and torch.equal(model(batch)[0], expected)
