"""A patched model under FSDP2 on two ranks against one rank."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import automodel_c
from automodel_c.models.gates import published_name
from automodel_c.models.parallelize import parallelize_qwen3_5
from automodel_c.parallel import install_comm_hooks
from tests.models.packs import compare
from tests.patch import models

SEEDS = range(3)
SMALL = {"num_hidden_layers": 2}  # one gated-delta layer, one of full attention


def share(rank):
    """A rank's documents: uneven, images on both, the second rank with a document of one token."""
    documents = models.uneven()
    return documents[:2] if rank == 0 else documents[2:]


def two_ranks(*options):
    """Of each seed's model: loss and gradients of the documents of all ranks, gathered."""
    return [gathered(seed, *options) for seed in SEEDS]


def gathered(seed, family, hooks, checkpointing):
    model = models.build(family, seed=seed, **SMALL)
    automodel_c.patch_transformers(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    parallelize_qwen3_5(model, mesh, activation_checkpointing=checkpointing)
    if hooks:
        install_comm_hooks(model)
    count = torch.tensor(sum(int((d["labels"][1:] != -100).sum()) for d in models.uneven()))
    loss = model(**models.pack(share(dist.get_rank())), num_items_in_batch=count).loss
    (loss * dist.get_world_size()).backward()  # FSDP2 takes the mean over ranks
    total = loss.detach().clone()
    dist.all_reduce(total)
    gradients = {
        published_name(name): torch.zeros(p.shape) if p.grad is None else p.grad.full_tensor()
        for name, p in model.named_parameters()
    }
    return {"loss": total} | gradients


@pytest.mark.parametrize(
    ("family", "hooks", "checkpointing"),
    [("qwen3_5", False, False), ("qwen3_5", True, False), ("qwen3_5_moe", True, True)],
    ids=["torch", "hooks", "experts-checkpointed"],
)
def test_two_ranks_equal_one(ranks, family, hooks, checkpointing):
    documents = models.uneven()
    truth, naive = [], []
    for seed in SEEDS:
        model = models.build(family, seed=seed, **SMALL)
        with models.Exact():
            truth.append(models.run_each(models.in_float64(model), documents))
        naive.append(models.run_each(model, documents))
    first, second = ranks.run(two_ranks, family, hooks, checkpointing, timeout=300.0)
    for one, other in zip(first, second, strict=True):
        assert [name for name, value in one.items() if not torch.equal(value, other[name])] == []
    compare(first, naive, truth, "two ranks")
