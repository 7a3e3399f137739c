"""One optimizer step over a global batch."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from automodel_c import ops

from ..data.collate import as_images
from ..data.encode import IGNORE_INDEX
from . import parts


@dataclass
class StepResult:
    """What one step did, the same on all ranks: loss is the mean cross-entropy a label over the global batch."""

    loss: float
    aux_loss: float | None
    grad_norm: float
    labels: int
    tokens: int


def model_inputs(batch, device, config):
    """What transformers' forward takes of a batch of data.collate, on `device`. config: the model's.

    Videos go as images, so that the tower runs once on every rank, whatever the ranks drew."""
    batch = as_images(batch, config.image_token_id)
    names = ("input_ids", "position_ids", "attention_mask", "pixel_values", "image_grid_thw")
    inputs = {name: batch[name] for name in names if batch[name] is not None}
    return {name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}


def cross_entropy_sum(logits, labels):
    """Sum of cross-entropy over labels other than -100, in fp32: logits [B, L, V], labels int64 [B, L] -> scalar.

    Without such a label the sum is 0, and so are its gradients.
    """
    return ops.cross_entropy(logits.flatten(0, 1), labels.flatten(), num_label_tokens=1)


def global_counts(batches, device):
    """(labels, tokens) of a global batch: this rank's microbatches summed over all ranks."""
    labels = sum(int((batch["labels"] != IGNORE_INDEX).sum()) for batch in batches)
    tokens = sum(
        batch["input_ids"].numel() if batch["attention_mask"] is None else int((batch["attention_mask"] != 0).sum())
        for batch in batches
    )
    counts = torch.tensor([labels, tokens], device=device)
    dist.all_reduce(counts)
    return tuple(counts.tolist())


def accumulate_gradients(model, batches, labels, *, device, per_microbatch, world, fused=False):
    """Forward and backward of this rank's microbatches.

    labels: the label count of the whole global batch, by which the summed cross-entropy is divided; gradients sum
    over ranks. The router's auxiliary loss, where the model's configuration asks for it (output_router_logits),
    is transformers' formula a microbatch, averaged over all microbatches of the step and weighted by
    router_aux_loss_coef. fused: the model's own loss, without logits.
    Returns fp32 [2]: this rank's part of the loss, and of the unweighted auxiliary loss.
    """
    text = model.config.text_config
    with_aux = text.output_router_logits if hasattr(text, "router_aux_loss_coef") else False
    share = 1.0 / (len(batches) * world)
    parts_of_loss = torch.zeros(2, device=device)
    for index, batch in enumerate(batches):
        parts.set_grad_reduction(model, per_microbatch or index == len(batches) - 1)
        loss, aux = _losses(model, batch, labels, device, fused)
        parts_of_loss[0] += loss.detach()
        if with_aux:
            aux = aux * share
            parts_of_loss[1] += aux.detach()
            loss = loss + text.router_aux_loss_coef * aux
        loss.backward()
    return parts_of_loss


def _losses(model, batch, count, device, fused):
    """(summed cross-entropy over `count`, unweighted auxiliary loss or None) of a microbatch."""
    inputs, labels = model_inputs(batch, device, model.config), batch["labels"].to(device)
    if not fused:
        outputs = model(**inputs, use_cache=False)
        return cross_entropy_sum(outputs.logits, labels) / max(count, 1), getattr(outputs, "aux_loss", None)
    outputs = model(**inputs, labels=labels, shift_labels=labels, num_items_in_batch=count, use_cache=False)
    loss, aux = outputs.loss, getattr(outputs, "aux_loss", None)
    if aux is not None:  # the model has added its own, weighted for a step of one microbatch
        loss = loss - model.config.text_config.router_aux_loss_coef * aux
    return loss, aux


def train_step(model, optimizer, batches, *, lr, max_norm, device, per_microbatch, world, fused=False):
    """One step at learning rate `lr`. Returns a StepResult.

    FloatingPointError before the weights are touched when loss or gradient norm is not finite.
    """
    labels, tokens = global_counts(batches, device)
    losses = accumulate_gradients(
        model, batches, labels, device=device, per_microbatch=per_microbatch, world=world, fused=fused
    )
    dist.all_reduce(losses)
    grad_norm = parts.clip_gradients([p for p in model.parameters() if p.requires_grad], max_norm)
    loss, aux = losses.tolist()
    result = StepResult(loss, aux if _has_aux(model) else None, float(grad_norm), labels, tokens)
    if not all(map(torch.isfinite, (losses.sum(), grad_norm))):
        raise FloatingPointError(f"loss {result.loss} and gradient norm {result.grad_norm} must be finite")
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return result


def _has_aux(model):
    return bool(getattr(model.config.text_config, "output_router_logits", False))
