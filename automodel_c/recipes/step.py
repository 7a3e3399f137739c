"""One optimizer step over a global batch."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..data.encode import IGNORE_INDEX
from ..models.qwen3_5.pipeline import Stages
from ..parallel.pipeline import Pipeline
from . import parts
from .calls import calls_of
from .interrupt import NEVER, agreed
from .profile import span


@dataclass
class StepResult:
    """What one step did, the same on all ranks: loss is the mean cross-entropy a label over the global batch; aux_loss
    and mtp_loss are unweighted, None where the model has none; asked is the signal after which the run is to leave."""

    loss: float
    aux_loss: float | None
    mtp_loss: float | None
    grad_norm: float
    labels: int
    tokens: int
    asked: int | None = None


def global_counts(model, batches, runtime):
    """(labels, tokens) of a global batch: microbatches summed over all ranks, those that ranks share once."""
    return _global_counts(model, batches, runtime, NEVER)[:2]


def _global_counts(model, batches, runtime, interrupt):
    """(labels, tokens, the signal that any rank was sent)."""
    labels = sum(int((batch["labels"] != IGNORE_INDEX).sum()) for batch in batches)
    counts = torch.tensor([labels, sum(map(calls_of(model).tokens, batches))], device=runtime.device)
    counts = torch.cat([counts * runtime.speaks, interrupt.flags(counts)])
    dist.all_reduce(counts)
    labels, tokens, *flags = counts.tolist()
    return labels, tokens, agreed(flags)


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
    share = 1.0 / (len(batches) * runtime.dp_size)
    if runtime.pp.stages > 1:
        return _through_stages(model, batches, max(labels, 1), share, runtime, per_microbatch)
    losses = calls_of(model).losses
    sums = {}
    for index, batch in enumerate(batches):
        parts.set_grad_reduction(model, per_microbatch or index == len(batches) - 1)
        with span("forward"):
            found = losses(model, batch, max(labels, 1), share, runtime.device, fused)
        for name in ("lm", "aux", "mtp"):
            value = getattr(found, name)
            if value is not None:
                sums[name] = sums.get(name, 0.0) + value.float()
        with span("backward"):
            found.total.backward()
    return sums


def _through_stages(model, batches, count, share, runtime, per_microbatch):
    """`accumulate_gradients` of a model of which this rank holds some layers."""
    model.aux_share = share
    stages = Stages(model, [{**batch, "num_label_tokens": count} for batch in batches])
    pipeline = Pipeline(runtime.pp, runtime.channels, stages, runtime.device)
    pipeline.step(len(batches), lambda last: parts.set_grad_reduction(model, per_microbatch or last))
    sums = {"lm": stages.losses["lm_loss"]}
    if model.has_aux_loss:
        sums["aux"] = stages.losses["aux_loss"] * share
    if model.config.text.mtp_num_hidden_layers:
        sums["mtp"] = stages.losses["mtp_loss"]
    return sums


def _whose(losses, runtime):
    """Which ranks' parts of the losses are no numbers, in words, the same on all ranks."""
    told = [None] * runtime.world
    dist.all_gather_object(told, bool(torch.isfinite(losses).all()))
    ranks = [str(rank) for rank, finite in enumerate(told) if not finite]
    return f"the loss is not on rank {', '.join(ranks)}" if ranks else "the loss is on every rank"


def train_step(
    model, optimizer, batches, *, lr, max_norm, runtime, per_microbatch, fused=False, weight_decay=None, interrupt=NEVER
):  # fmt: skip
    """One step at learning rate `lr`, and with `weight_decay` (None: the optimizer's). Returns a StepResult; where any
    rank's `interrupt` had been asked before the step began, the signal, and nothing is done.

    FloatingPointError before the weights are touched when loss or gradient norm is not finite: it names the ranks whose
    part of the loss is not.
    """
    labels, tokens, asked = _global_counts(model, batches, runtime, interrupt)
    if asked:
        return asked
    sums = accumulate_gradients(model, batches, labels, runtime=runtime, per_microbatch=per_microbatch, fused=fused)
    with span("backward"):
        parts.finish_gradients(model)
    mine = torch.stack(list(sums.values()))  # the model decides which there are, so all ranks have the same
    losses = torch.cat([mine, interrupt.flags(mine)])
    dist.all_reduce(losses)
    trained = [p for p in model.parameters() if p.requires_grad]
    with span("clip"):
        grad_norm = parts.clip_gradients(trained, max_norm, group=runtime.pp_group)
    numbers = losses.tolist()
    told, asked = dict(zip(sums, numbers, strict=False)), agreed(numbers[len(sums) :])
    result = StepResult(told["lm"], told.get("aux"), told.get("mtp"), float(grad_norm), labels, tokens, asked)
    if not all(map(torch.isfinite, (losses.sum(), grad_norm))):
        found = f"loss {result.loss} and gradient norm {result.grad_norm} must be finite"
        raise FloatingPointError(f"{found}; {_whose(mine, runtime)}")
    for group in optimizer.param_groups:
        group["lr"] = lr
        if weight_decay is not None:
            group["weight_decay"] = weight_decay
    with span("optimizer"):
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return result
