"""Forwards of the whole model and its head: labels become a loss without logits."""

import dataclasses

import torch

from automodel_c import ops
from automodel_c.models.qwen3_5.experts import over_ranks
from automodel_c.parallel import TensorParallel

from .request import REQUEST, keep_mask, on_every_rank, shared_by, take_request


@on_every_rank
def inner_model(self, *args, attention_mask=None, **kwargs):
    """The multimodal model below the head: carries the request to the text model."""
    request, kwargs = take_request(kwargs)
    args, attention_mask = _mask_from(args, attention_mask)
    attention_mask = request.attention_mask if attention_mask is None else attention_mask
    kwargs |= {"attention_mask": keep_mask(request, attention_mask), REQUEST: request}
    return type(self).forward(self, *args, **kwargs)


@on_every_rank
def causal_lm(self, *args, attention_mask=None, labels=None, logits_to_keep=0, return_dict=None, **kwargs):
    """transformers' forward; with labels, `loss` is `ops.linear_cross_entropy` per document and `logits` is None.

    labels: int [B, L], aligned with input_ids: the token of row i is what token i - 1 of its document predicts, and
    nothing predicts a document's first. shift_labels: int [B, L], used as they are. num_items_in_batch: what the sum
    is divided by; the labels' own count when None.
    """
    request, kwargs = take_request(kwargs)
    args, attention_mask = _mask_from(args, attention_mask)
    mask, shared = keep_mask(request, attention_mask), shared_by(self) is not None
    if shared:  # goes around transformers' auxiliary loss, which would weigh a rank's rows by it
        request.attention_mask, mask = mask if request.attention_mask is None else request.attention_mask, None
    kwargs |= {"attention_mask": mask, REQUEST: request}
    if labels is None and not shared:
        return type(self).forward(self, *args, logits_to_keep=logits_to_keep, return_dict=return_dict, **kwargs)
    request.keep = []
    if labels is None:
        outputs = type(self).forward(self, *args, logits_to_keep=logits_to_keep, return_dict=True, **kwargs)
        return _changed(self, outputs, return_dict, aux_loss=_aux_loss(self, outputs, request.keep[0][1]))
    if not isinstance(logits_to_keep, int) or logits_to_keep:
        raise ValueError("logits_to_keep goes without labels: a patched model makes no logits for its loss")
    if "_amcore_report" not in vars(self.lm_head):
        return _transformers_loss(self, args, labels, return_dict, request, kwargs)
    request.makes_loss = True
    shifted, count = kwargs.pop("shift_labels", None), kwargs.pop("num_items_in_batch", None)
    ignore_index = kwargs.pop("ignore_index", -100)
    nothing = torch.empty(0, dtype=torch.int64, device=labels.device)
    outputs = type(self).forward(self, *args, logits_to_keep=nothing, return_dict=True, **kwargs)
    ((hidden, plan),) = request.keep
    if shifted is None:
        shifted = shift_in_documents(labels, plan.pack, ignore_index)
    if count is None and shared:
        count = (shifted != ignore_index).sum()
    own = plan.take(shifted.reshape(-1), ignore_index)
    loss = self.lm_head(hidden.flatten(0, 1), labels=own, count=count, ignore_index=ignore_index)
    aux_loss = _aux_loss(self, outputs, plan)
    if aux_loss is not None:
        loss = loss + self.config.get_text_config().router_aux_loss_coef * aux_loss
    return _changed(self, outputs, return_dict, loss=loss, logits=None, aux_loss=aux_loss)


def _changed(self, outputs, return_dict, **fields):
    """transformers' outputs with other `fields`, as a tuple where that is asked for."""
    there = {f.name: getattr(outputs, f.name) for f in dataclasses.fields(outputs)}
    outputs = type(outputs)(**there | {name: value for name, value in fields.items() if name in there})
    wants_dict = self.config.return_dict if return_dict is None else return_dict
    return outputs if wants_dict else outputs.to_tuple()


def _aux_loss(self, outputs, plan):
    """transformers' auxiliary loss; over ranks this rank's part of it, for transformers' own is of its rows alone."""
    found = getattr(outputs, "aux_loss", None)
    if found is None or plan.cp is None:
        return found
    config = self.config.get_text_config()
    stats = [_router_stats(logits, config.num_experts_per_tok, plan.padding) for logits in outputs.router_logits]
    return ops.load_balancing_loss(over_ranks(stats, plan.over, plan.pack.num_real, TensorParallel()))


@torch.compiler.disable(recursive=True)
def _router_stats(logits, top_k, padding):
    """(load int64 [E], prob_sum float32 [E], real rows) of a layer's logits [T, E], as `ops.moe` returns them."""
    logits = logits.reshape(-1, logits.shape[-1])
    if padding is not None:
        logits = logits[~padding]
    probs = logits.float().softmax(-1)
    load = probs.topk(top_k, dim=-1).indices.flatten().bincount(minlength=probs.shape[-1])
    return load, probs.sum(0), torch.tensor(len(probs), device=logits.device)


def _transformers_loss(self, args, labels, return_dict, request, kwargs):
    outputs = type(self).forward(self, *args, labels=labels, return_dict=return_dict, **kwargs)
    if request.keep[0][1].packed and kwargs.get("shift_labels") is None:
        raise NotImplementedError(
            "labels: this model's loss is not swapped (see the report), transformers' predicts across the documents "
            "of a pack: give shift_labels"
        )
    return outputs


def _mask_from(args, attention_mask):
    """(args, mask): the mask may stand second among the positional arguments."""
    if len(args) < 2:
        return args, attention_mask
    if len(args) > 2:
        raise TypeError("a patched model takes its arguments after attention_mask by name")
    return args[:1], args[1]


@torch.compiler.disable(recursive=True)  # by the host's list of documents
def shift_in_documents(labels, pack, ignore_index=-100):
    """labels int [B, L] -> [B, L]: each token's next of its own document; ignore_index at a document's end and in
    padding."""
    flat = torch.full_like(labels, ignore_index).view(-1)
    follows = torch.zeros(labels.numel(), dtype=torch.bool)
    for start, end in pack.docs.tolist():
        follows[start : max(start, end - 1)] = True
    at = follows.nonzero().flatten().to(labels.device)
    flat[at] = labels.reshape(-1)[at + 1]
    return flat.view(labels.shape)


def head(self, x, labels=None, count=None, ignore_index=-100):
    """x [.., H] -> logits [.., V]; with labels [T] and x [T, H], the loss, a scalar float32."""
    if labels is None:
        return type(self).forward(self, x)
    return ops.linear_cross_entropy(
        x, self.weight, labels.to(x.device), num_label_tokens=count, ignore_index=ignore_index
    )
