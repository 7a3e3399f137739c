"""How a training step and an evaluation call a model: ours on one axis of documents, transformers' on padded rows.

`calls_of(model)` gives the functions of either: `collate(samples, processor, *, max_length)` makes a microbatch,
`tokens(batch)` counts its real tokens, `losses(...)` and `answers(...)` run the model on it.
"""

from dataclasses import dataclass

import torch

from automodel_c import ops

from ..data.collate import as_images, collate, collate_packed
from ..data.encode import IGNORE_INDEX
from ..models import qwen3_5
from ..models.qwen3_5.pipeline import Answers
from ..parallel.pipeline import Pipeline


@dataclass
class Losses:
    """Of a microbatch: `total`, whose gradient is wanted; `lm`, its cross-entropy's part of the step's mean; `aux` and
    `mtp`, its parts of the step's unweighted auxiliary and multi-token losses, None where the model has none."""

    total: torch.Tensor
    lm: torch.Tensor
    aux: torch.Tensor | None = None
    mtp: torch.Tensor | None = None


def calls_of(model):
    """OwnCalls or TransformersCalls."""
    return OwnCalls if isinstance(model, qwen3_5.Qwen3_5) else TransformersCalls


class OwnCalls:
    """models.qwen3_5.Qwen3_5."""

    @staticmethod
    def collate(samples, processor, *, max_length=None):
        """max_length: tokens that each sample or pack takes up, filled with padding behind the last; None: its own."""
        if max_length is None:
            return collate_packed(samples, processor)
        longest = max(sample["input_ids"].numel() for sample in samples)
        if longest > max_length:
            raise ValueError(f"packed_sequence.collate_max_length={max_length}: a pack has {longest} tokens")
        return collate_packed(samples, processor, max_length=len(samples) * max_length)

    @staticmethod
    def tokens(batch):
        return int(batch["cu_seqlens"][-1])

    @staticmethod
    def losses(model, batch, count, share, device, fused):
        """count: what cross-entropies are divided by; share: this microbatch's of the step's auxiliary loss. The loss
        never makes the logits whole, whatever `fused` says."""
        model.aux_share = share
        total, metrics = model({**batch, "num_label_tokens": count})
        aux = metrics["aux_loss"] * share if model.has_aux_loss else None
        return Losses(total, metrics["lm_loss"], aux, metrics["mtp_loss"] if model.mtp is not None else None)

    @staticmethod
    def answers(model, batch, runtime):
        """Where there is a label: (logits [n, V], labels [n], the document that each is of [n]); of a pipeline on the
        ranks of the last stage alone, None on others."""
        device, rows = runtime.device, (batch["labels"] != IGNORE_INDEX).nonzero().flatten()
        document = torch.bucketize(rows, batch["cu_seqlens"][1:].long(), right=True)
        if runtime.pp.stages > 1:
            stages = Answers(model, batch, rows)
            Pipeline(runtime.pp, runtime.channels, stages, device).forward(0)
            logits = stages.logits
            if logits is None:
                return None
        else:
            logits = model.logits(batch, rows=rows)
        return logits, batch["labels"][rows].to(device), document.to(device)


class TransformersCalls:
    """transformers' Qwen3_5(Moe)ForConditionalGeneration, as it comes or patched."""

    collate = staticmethod(collate)

    @staticmethod
    def tokens(batch):
        mask = batch["attention_mask"]
        return batch["input_ids"].numel() if mask is None else int((mask != 0).sum())

    @staticmethod
    def losses(model, batch, count, share, device, fused):
        """As OwnCalls; fused: the patched model's own loss, without logits."""
        inputs, labels = model_inputs(batch, device, model.config), batch["labels"].to(device)
        text = model.config.text_config
        if fused:
            outputs = model(**inputs, labels=labels, shift_labels=labels, num_items_in_batch=count, use_cache=False)
            lm, aux = outputs.loss, getattr(outputs, "aux_loss", None)
            if aux is not None:  # the model has added its own, weighted for a step of one microbatch
                lm = lm - text.router_aux_loss_coef * aux
        else:
            outputs = model(**inputs, use_cache=False)
            lm, aux = cross_entropy_sum(outputs.logits, labels) / count, getattr(outputs, "aux_loss", None)
        if aux is None or not text.output_router_logits:
            return Losses(lm, lm.detach())
        aux = aux * share
        return Losses(lm + text.router_aux_loss_coef * aux, lm.detach(), aux.detach())

    @staticmethod
    def answers(model, batch, runtime):
        device = runtime.device
        logits, labels = model(**model_inputs(batch, device, model.config), use_cache=False).logits, batch["labels"]
        rows, places = (labels != IGNORE_INDEX).nonzero(as_tuple=True)
        return logits[rows, places], labels[rows, places].to(device), rows.to(device)


def model_inputs(batch, device, config):
    """What transformers' forward takes of a batch of data.collate.collate, on `device`. config: the model's.

    Videos go as images, so that the tower runs once on every rank, whatever the ranks drew."""
    batch = as_images(batch, config.image_token_id)
    names = ("input_ids", "position_ids", "attention_mask", "pixel_values", "image_grid_thw")
    inputs = {name: batch[name] for name in names if batch[name] is not None}
    return {name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}


def cross_entropy_sum(logits, labels):
    """Sum of cross-entropy over labels other than -100, in fp32: logits [.., V], labels int64 [..] -> scalar.

    Without such a label the sum is 0, and so are its gradients.
    """
    return ops.cross_entropy(logits.flatten(0, -2), labels.flatten(), num_label_tokens=1)
