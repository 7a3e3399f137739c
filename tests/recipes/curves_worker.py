"""Fifty steps of training a tiny model with experts, by this package over any mesh and by transformers with torch's
AdamW: the losses. A step takes two packs of images and text with something to learn.

The optimizer's eps is large beside the rounding of a gradient: else the sign of what is but rounding moves a weight by
lr in the first steps, and the curves of two programs would differ by luck.
"""

import contextlib

import torch
import torch.distributed as dist

from automodel_c.models import qwen3_5
from automodel_c.models.parallelize import parallelize_qwen3_5
from automodel_c.optim import FusedAdamW
from automodel_c.parallel import ContextParallel
from automodel_c.recipes.parts import install_reduction
from automodel_c.recipes.runtime import runtime_over
from tests.models import packs
from tests.patch import models

STEPS = 50
ADAM = {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-4, "weight_decay": 0.01}


def checkpoint(folder, seed):
    """transformers' model; the directory holds its weights."""
    return packs.checkpoint(folder, "qwen3_5_moe", seed=seed)[0]


def documents(seed, step):
    """Two packs of two documents, whose next token is told by the token that is there."""
    generator = torch.Generator().manual_seed(1000 * seed + step)

    def between(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    sizes = [
        (between(5, 24), ("image", 4, 4), between(4, 12)),
        (between(2, 70),),
        (between(1, 9),),
        (between(9, 30),),
    ]
    made = [packs.document(*parts, seed=1000 * step + 10 * seed + i) for i, parts in enumerate(sizes)]
    for document in made:
        ids, labels = document["input_ids"], document["labels"]
        document["labels"] = torch.where(labels >= 0, (3 * ids + 1) % 80, labels)
    return made[:2], made[2:]


def by_transformers(model, seed, steps=STEPS):
    """float64 [steps], in float64 throughout where the model is; each document alone."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), **ADAM), []
    exact = next(model.parameters()).dtype == torch.float64
    with models.Exact() if exact else contextlib.nullcontext():
        for step in range(steps):
            chosen = [one for pack in documents(seed, step) for one in pack]
            losses.append(packs.theirs(model, chosen)["loss"].double())
            optimizer.step()
    return torch.stack(losses)


def by_ours(folder, seed, shape, steps=STEPS):
    """The same on every rank of a mesh of `shape` (dp, cp), FSDP2 over all of it, each microbatch reduced."""
    runtime = runtime_over(shape, torch.device("cpu"))
    cp = ContextParallel(runtime.mesh["cp"].get_group()) if shape[1] > 1 else None
    model = qwen3_5.load(folder, cp=cp, activation_checkpointing=True)
    parallelize_qwen3_5(model, runtime.mesh, activation_checkpointing=True)
    install_reduction(model, runtime.device)
    optimizer, losses = FusedAdamW(model.parameters(), **ADAM), []
    for step in range(steps):
        both = documents(seed, step)
        count, loss = sum(packs.label_count(pack) for pack in both), torch.zeros((), dtype=torch.float64)
        for pack in both[runtime.dp_rank :: runtime.dp_size]:
            part, _ = model({**packs.pack(pack), "num_label_tokens": count})
            part.backward()
            loss += part.detach()
        dist.all_reduce(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return torch.stack(losses)
