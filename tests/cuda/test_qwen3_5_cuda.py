"""The whole model on one GPU: loss and every gradient, by the error rule.

The twin is transformers in float32 on the CPU, the truth its float64. head_dim 16 and key heads of 8 take the plain
kernels; real head dims are the operators' own tests."""

import pytest
import torch

from automodel_c.models import qwen3_5
from automodel_c.optim import FusedAdamW
from tests.models import packs
from tests.patch import models

pytestmark = pytest.mark.cuda
FAMILIES = pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])


def on_host(found):
    return {name: value.cpu() for name, value in found.items()}


@FAMILIES
def test_loss_and_gradients_are_transformers(tmp_path, family):
    runs = {name: [] for name in ("truth", "naive", "pack", "alone", "padded")}
    for seed in range(2):
        reference, _ = packs.checkpoint(tmp_path / str(seed), family, seed=seed)
        model = qwen3_5.load(tmp_path / str(seed), device="cuda")
        exact = models.in_float64(reference)
        for documents in packs.PACKS.values():
            with models.Exact():
                runs["truth"].append(packs.theirs(exact, documents))
            runs["naive"].append(packs.theirs(reference, documents))
            runs["pack"].append(on_host(packs.ours(model, packs.pack(documents))))
            runs["alone"].append(on_host(packs.ours_alone(model, documents)))
            runs["padded"].append(on_host(packs.ours(model, packs.pack(documents, padding=3))))
    for name in ("pack", "alone", "padded"):
        packs.compare(runs[name], runs["naive"], runs["truth"], name)


@FAMILIES
def test_recomputation_and_repetition_give_the_same_bits(tmp_path, family):
    packs.checkpoint(tmp_path, family)
    model = qwen3_5.load(tmp_path, device="cuda", dtype=torch.bfloat16)
    batch = packs.pack(packs.PACKS["mixed"], padding=2)
    expected = packs.ours(model, batch)
    for recompute in (False, True):
        model.recompute(recompute)
        found = packs.ours(model, batch)
        assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


@FAMILIES
def test_training_lowers_the_loss(tmp_path, family):
    packs.checkpoint(tmp_path, family)
    model = qwen3_5.load(tmp_path, device="cuda", dtype=torch.bfloat16, activation_checkpointing=True)
    optimizer = FusedAdamW(model.parameters(), lr=3e-3)
    batch, losses = packs.pack(packs.PACKS["mixed"]), []
    for _ in range(12):
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0], losses
