"""What a rank does in test_eight_ranks: steps of training, a checkpoint, and a death."""

import os
import signal
from unittest import mock

import torch
import torch.distributed as dist

from automodel_c.models.gates import published_name
from automodel_c.models.qwen3_5.shards import Part
from automodel_c.optim import FusedAdamW, clip_grad_norm_
from automodel_c.parallel import set_grad_reduction
from automodel_c.recipes import checkpoint
from automodel_c.recipes.checkpoint import Checkpoints, load_checkpoint, step_folder
from automodel_c.recipes.parts import install_reduction
from tests.models import ep_worker
from tests.models.cp_worker import PACKS


def started(seed, shape, ep):
    where = ep_worker.runtime(shape, ep)
    model = ep_worker.sharded("experts", seed, shape, ep, checkpointing="full")
    install_reduction(model, where.device)
    return where, model, FusedAdamW(model.parameters(), lr=1e-3, eps=1e-4)


def step(where, model, optimizer, chosen, count, per_microbatch):
    """(weights, gradients, loss), this rank's parts of the first two: of the packs of a global batch, which the ranks
    of dp deal out among them; then the weights are stepped."""
    weights, mine, total = _parts(model), chosen[where.dp_rank :: where.dp_size], torch.zeros(())
    for index, pack in enumerate(mine):
        set_grad_reduction(model, per_microbatch or index == len(mine) - 1)
        loss, _ = model({**PACKS[pack], "num_label_tokens": count})
        loss.backward()
        total += loss.detach()
    dist.all_reduce(total)
    found = weights, _parts(model, of=lambda p: p.grad), total
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return found


def _parts(model, of=lambda p: p):
    parts = ((published_name(key), Part.of(of(p).detach())) for key, p in model.named_parameters())
    return {key: (part.tensor.clone(), part.offsets, part.shape) for key, part in parts}


def joined(ranks):
    """{key: whole tensor} of what `_parts` told of every rank."""
    whole = {key: torch.full(shape, torch.nan) for key, (_, _, shape) in ranks[0].items()}
    for parts in ranks:
        for key, (tensor, offsets, _) in parts.items():
            whole[key][tuple(slice(o, o + n) for o, n in zip(offsets, tensor.shape, strict=True))] = tensor
    return whole


def trained(seed, shape, ep, chosen, count, folder, steps, saved):
    """`step` again and again, reducing in every second one in each microbatch, with a checkpoint in the background
    after step `saved`."""
    where, model, optimizer = started(seed, shape, ep)
    checkpoints, found = Checkpoints(folder, where, background=True), []
    for number in range(1, steps + 1):
        found.append(step(where, model, optimizer, chosen, count, number % 2 == 0))
        if number == saved:
            checkpoints.save(number, model, optimizer, data={"seed": seed})
    checkpoints.close()
    return found


def killed(seed, shape, ep, folder):
    """Dies while a later checkpoint is written."""
    where, model, optimizer = started(seed, shape, ep)
    checkpoints = Checkpoints(folder, where, background=True)
    save = checkpoint.dcp.save

    def die(state, **options):
        if dist.get_rank() == 0:
            options["process_group"] = None
            save(state, **options, no_dist=True)  # its own file is there
        os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(checkpoint.dcp, "save", die):
        checkpoints.save(9, model, optimizer, data={"seed": seed})
        checkpoints.wait()


def resumed(seed, shape, ep, chosen, count, folder, steps):
    """As `trained`, from the checkpoint that LATEST names on to step `steps`; the weights were others before."""
    where, model, optimizer = started(seed + 1, shape, ep)
    first = load_checkpoint(step_folder("LATEST", folder), model, optimizer, where, data={"seed": seed})
    return first, [step(where, model, optimizer, chosen, count, n % 2 == 0) for n in range(first, steps)]
