"""The whole model on one GPU: loss and every gradient, by the error rule.

The twin is transformers in float32 on the CPU, the truth its float64. head_dim 16 and key heads of 8 take the plain
kernels; real head dims are the operators' own tests."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from automodel_c import partition
from automodel_c.models import qwen3_5
from automodel_c.models.parallelize import parallelize_qwen3_5
from automodel_c.optim import FusedAdamW
from tests.models import packs
from tests.patch import models

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("plain_memory")]
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


def test_few_labels(tmp_path):
    """The last layer's MLP, the norm and the head see rows with a label alone."""
    documents, seen = [dict(d, labels=d["labels"].clone()) for d in packs.PACKS["mixed"]], []
    for d in documents:
        d["labels"][:-3] = -100
    reference, _ = packs.checkpoint(tmp_path, "qwen3_5_moe")
    model = qwen3_5.load(tmp_path, device="cuda")
    model.model.language_model.norm.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    with models.Exact():
        truth = packs.theirs(models.in_float64(reference), documents)
    found = on_host(packs.ours(model, packs.pack(documents)))
    packs.compare([found], [packs.theirs(reference, documents)], [truth], "few labels")
    assert seen == [packs.label_count(documents)]


@pytest.fixture
def one_rank():
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore(), device_id=torch.device("cuda", 0))
    try:
        yield init_device_mesh("cuda", (1,), mesh_dim_names=("dp",))
    finally:
        dist.destroy_process_group()


@FAMILIES
def test_sharded_and_made_again(tmp_path, family, one_rank, recwarn, monkeypatch):
    """FSDP2 on one rank: the plain model's loss but for bf16 weights, float32 gradients, and no batch that was moved
    before its plan was made, of which `Pack` would warn."""
    monkeypatch.setattr(partition, "_warned", [])  # it warns once
    packs.checkpoint(tmp_path, family)
    batch = packs.pack(packs.PACKS["mixed"])
    plain, sharded = (qwen3_5.load(tmp_path, device="cuda") for _ in range(2))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    parallelize_qwen3_5(sharded, one_rank, mp_policy=policy, activation_checkpointing=True)
    loss = sharded(batch)[0]
    loss.backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in sharded.parameters())
    assert sharded.logits(batch, rows=[1, 5]).shape[0] == 2
    assert [str(w.message) for w in recwarn if "CUDA device" in str(w.message)] == []
    assert abs(loss.item() - plain(batch)[0].item()) < 0.02


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
