"""One optimizer step over a global batch."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..data.encode import IGNORE_INDEX
from . import parts
from .calls import calls_of


@dataclass
class StepResult:
    """What one step did, the same on all ranks: loss is the mean cross-entropy a label over the global batch; aux_loss
    and mtp_loss are unweighted, None where the model has none; stop is whether any rank was asked to."""

    loss: float
    aux_loss: float | None
    mtp_loss: float | None
    grad_norm: float
    labels: int
    tokens: int
    stop: bool = False


def global_counts(model, batches, runtime):
    """(labels, tokens) of a global batch: microbatches summed over all ranks, those that ranks share once."""
    labels = sum(int((batch["labels"] != IGNORE_INDEX).sum()) for batch in batches)
    counts = torch.tensor([labels, sum(map(calls_of(model).tokens, batches))], device=runtime.device)
    counts *= runtime.speaks
    dist.all_reduce(counts)
    return tuple(counts.tolist())


def accumulate_gradients(model, batches, labels, *, runtime, per_microbatch, fused=False):
    """Forward and backward of this rank's microbatches.

    labels: the label count of the whole global batch, by which summed cross-entropies are divided; gradients sum
    over ranks, and so do the parts that ranks make of a microbatch they share. The router's auxiliary loss, where the
    model has one, is transformers' formula a microbatch, averaged over all microbatches of the step and weighted by
    router_aux_loss_coef; multi-token prediction's is what the model gives it. fused: transformers' model patched makes
    no logits; ours never does.
    Returns {"lm": .., "aux": .., "mtp": ..}, this rank's parts of the step's losses, fp32 scalars, unweighted; no key
    where the model has no such loss.
    """
    losses = calls_of(model).losses
    share = 1.0 / (len(batches) * runtime.dp_size)
    sums = {}
    for index, batch in enumerate(batches):
        parts.set_grad_reduction(model, per_microbatch or index == len(batches) - 1)
        found = losses(model, batch, max(labels, 1), share, runtime.device, fused)
        for name in ("lm", "aux", "mtp"):
            value = getattr(found, name)
            if value is not None:
                sums[name] = sums.get(name, 0.0) + value.float()
        found.total.backward()
    return sums


def _whose(losses, runtime):
    """Which ranks' parts of the losses are no numbers, in words, the same on all ranks."""
    told = [None] * runtime.world
    dist.all_gather_object(told, bool(torch.isfinite(losses).all()))
    ranks = [str(rank) for rank, finite in enumerate(told) if not finite]
    return f"the loss is not on rank {', '.join(ranks)}" if ranks else "the loss is on every rank"


def train_step(
    model, optimizer, batches, *, lr, max_norm, runtime, per_microbatch, fused=False, weight_decay=None,
    stop=False,
):  # fmt: skip
    """One step at learning rate `lr`, and with `weight_decay` (None: the optimizer's). Returns a StepResult. stop:
    whether this rank was asked to.

    FloatingPointError before the weights are touched when loss or gradient norm is not finite: it names the ranks whose
    part of the loss is not.
    """
    labels, tokens = global_counts(model, batches, runtime)
    sums = accumulate_gradients(model, batches, labels, runtime=runtime, per_microbatch=per_microbatch, fused=fused)
    mine = torch.stack(list(sums.values()))  # the model decides which there are, so all ranks have the same
    losses = torch.cat([mine, mine.new_full((1,), float(stop))])
    dist.all_reduce(losses)
    grad_norm = parts.clip_gradients([p for p in model.parameters() if p.requires_grad], max_norm)
    *values, asked = losses.tolist()
    told = dict(zip(sums, values, strict=True))
    result = StepResult(told["lm"], told.get("aux"), told.get("mtp"), float(grad_norm), labels, tokens, asked > 0)
    if not all(map(torch.isfinite, (losses.sum(), grad_norm))):
        found = f"loss {result.loss} and gradient norm {result.grad_norm} must be finite"
        raise FloatingPointError(f"{found}; {_whose(mine, runtime)}")
    for group in optimizer.param_groups:
        group["lr"] = lr
        if weight_decay is not None:
            group["weight_decay"] = weight_decay
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return result
