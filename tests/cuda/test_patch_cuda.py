"""transformers' model with our operators on one GPU: loss and every gradient of a pack, by the error rule.

The twin is transformers in float32 on the CPU, the truth its float64, both a document at a time."""

import pytest
import torch

import automodel_c
from tests.models.packs import compare
from tests.patch import models

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("plain_memory")]


@pytest.fixture(autouse=True)
def float32_convolution(monkeypatch):
    """transformers embeds patches with cuDNN's convolution, which rounds float32 to TF32 unless told."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def on_cuda(batch):
    return {name: value.cuda() for name, value in batch.items()}


def run(model, batch):
    return {name: value.cpu() for name, value in models.run(model, on_cuda(batch)).items()}


@pytest.mark.parametrize(
    ("family", "make"),
    [("qwen3_5", models.uneven), ("qwen3_5_moe", models.uneven), ("qwen3_5", models.with_videos)],
)
def test_pack_equals_each_document_alone(family, make):
    documents = make()
    runs = {"truth": [], "naive": [], "pack": []}
    for seed in range(7):  # the median of three is that of one unlucky model too often
        model = models.build(family, seed=seed)
        with models.Exact():
            runs["truth"].append(models.run_each(models.in_float64(model), documents))
        runs["naive"].append(models.run_each(model, documents))
        on_cpu = automodel_c.patch_transformers(model)
        swapped = list(on_cpu.swapped)
        on_cpu.undo()
        report = automodel_c.patch_transformers(model.cuda())
        assert list(report.swapped) == swapped
        runs["pack"].append(run(model, models.pack(documents)))
    compare(runs["pack"], runs["naive"], runs["truth"], "pack")


def test_checkpointing_and_repetition_give_the_same_bits():
    model = models.build().cuda().bfloat16()
    automodel_c.patch_transformers(model)
    batch = models.pack(models.uneven())
    expected = run(model, batch)
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        found = run(model, batch)
        assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []
