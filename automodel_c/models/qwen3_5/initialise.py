"""Random weights, drawn as transformers draws them."""

import torch
from torch import nn

from .experts import Experts, Router
from .gated_delta_net import GatedDeltaNet
from .layers import GatedRMSNorm, LayerNorm, RMSNorm


@torch.no_grad()
def initialise(model):
    """Fills every parameter of a Qwen3_5 from torch's generator: equal seeds give equal models, whatever ranks share
    their experts."""
    text, vision = model.config.text.initializer_range, model.config.vision.initializer_range
    for name, module in model.named_modules():
        _fill(module, vision if name.startswith("model.visual") else text)


def _fill(module, std):
    if isinstance(module, nn.Linear | nn.Embedding | nn.Conv1d | nn.Conv3d):
        module.weight.normal_(0.0, std)
        if getattr(module, "bias", None) is not None:
            module.bias.zero_()
    elif isinstance(module, Router):
        module.weight.normal_(0.0, std)
    elif isinstance(module, Experts):
        for weight in module.parameters():
            whole = weight.new_empty(len(weight) * module.ep.ranks, *weight.shape[1:])
            first, end = module.ep.range(len(whole))
            weight.copy_(whole.normal_(0.0, std)[first:end])
    elif isinstance(module, GatedDeltaNet):
        module.A_log.uniform_(0.01, 16).log_()  # away from 0, whose log is -inf
        module.dt_bias.fill_(1.0)
    elif isinstance(module, RMSNorm):
        module.weight.zero_()
    elif isinstance(module, GatedRMSNorm | LayerNorm):
        module.weight.fill_(1.0)
        if getattr(module, "bias", None) is not None:
            module.bias.zero_()
