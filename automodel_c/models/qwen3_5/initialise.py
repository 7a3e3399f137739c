"""Random weights, drawn as transformers draws them."""

import copy

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..gates import HOLDER
from .experts import Experts, Router
from .gated_delta_net import GatedDeltaNet
from .layers import GatedRMSNorm, LayerNorm, RMSNorm
from .shards import Part


@torch.no_grad()
def initialise(model, whole):
    """Fills every parameter of a Qwen3_5 from torch's generator: equal seeds give equal models, whatever ranks share
    their experts, layers or, under FSDP2, all weights. whole: the model with all layers, on the meta device. No more
    than one weight is whole at a time."""
    text, vision = model.config.text.initializer_range, model.config.vision.initializer_range
    held, device = dict(model.named_modules()), _drawn_on(model)
    for name, module in whole.named_modules():
        std = vision if name.startswith("model.visual") else text
        if name in held:
            _fill(held[name], std)
        elif any(True for _ in module.parameters(recurse=False)):
            _fill(_alone(module, device), std)  # another rank's: drawn, so that the generator goes on as there


def _drawn_on(model):
    """Where `_draw` has numbers made: shards of a whole on the host, else where the weights are."""
    weight = next(model.parameters())
    return torch.device("cpu") if isinstance(weight, DTensor) else weight.device


def _alone(module, device):
    """A module's own parameters with memory, for a moment."""
    other = copy.copy(module)
    other._parameters = {
        name: None
        if p is None
        else nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device=device), requires_grad=False)
        for name, p in module._parameters.items()
    }
    return other


def _fill(module, std):
    if isinstance(module, nn.Linear | nn.Embedding | nn.Conv1d | nn.Conv3d):
        _draw(module.weight, lambda weight: weight.normal_(0.0, std))
        if getattr(module, "bias", None) is not None:
            module.bias.zero_()
    elif isinstance(module, Router):
        _draw(module.weight, lambda weight: weight.normal_(0.0, std))
    elif isinstance(module, Experts):
        for weight in module.parameters():
            rows = len(weight) if isinstance(weight, DTensor) else len(weight) * module.ep.ranks
            _draw(weight, lambda weight: weight.normal_(0.0, std), module.ep.range(rows)[0], rows)
    elif isinstance(module, GatedDeltaNet):
        gates = getattr(module, HOLDER, module)
        _draw(gates.A_log, lambda weight: weight.uniform_(0.01, 16).log_())  # away from 0, whose log is -inf
        gates.dt_bias.fill_(1.0)
    elif isinstance(module, RMSNorm):
        module.weight.zero_()
    elif isinstance(module, GatedRMSNorm | LayerNorm):
        module.weight.fill_(1.0)
        if getattr(module, "bias", None) is not None:
            module.bias.zero_()


def _draw(weight, draw, first=0, rows=None):
    """Lets `draw` fill a weight, of which a rank that holds a part keeps that part; see `Part.of`. Shards are drawn on
    the CPU, so that they do not depend on the device."""
    part = Part.of(weight, first, rows)
    if part.whole and not isinstance(weight, DTensor):
        draw(weight)
        return
    device = "cpu" if isinstance(weight, DTensor) else weight.device
    whole = torch.empty(part.shape, dtype=weight.dtype, device=device)
    draw(whole)
    part.tensor.copy_(whole[part.slices])
