"""Routed experts beside one that every token takes."""

from typing import NamedTuple

import torch
from torch import nn

from automodel_c import ops

from .layers import MLP


class Routing(NamedTuple):
    """What the auxiliary loss needs of a layer, over real tokens: counts [E], how often each expert was chosen;
    probabilities [E], the sums of the router's, which carry the gradient. float32."""

    counts: torch.Tensor
    probabilities: torch.Tensor


class Router(nn.Module):
    """Holds weight [E, H]."""

    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.num_experts, config.hidden_size))


class Experts(nn.Module):
    """Holds gate_up_proj [E, 2I, H], the gate first, and down_proj [E, H, I]."""

    def __init__(self, config):
        super().__init__()
        experts, size, width = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.zeros(experts, 2 * width, size))
        self.down_proj = nn.Parameter(torch.zeros(experts, size, width))


class SparseMoE(nn.Module):
    """Each token's `top_k` of E experts by a softmax over all, and sigmoid(shared_expert_gate(x)) times a shared one."""

    def __init__(self, config):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.gate = Router(config)
        self.experts = Experts(config)
        self.shared_expert = MLP(config.hidden_size, config.shared_expert_intermediate_size)
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, x, padding):
        """x [T, H], padding bool [T] or None -> ([T, H], Routing)."""
        out, *routing = ops.moe(
            x, self.gate.weight, self.experts.gate_up_proj, self.experts.down_proj, top_k=self.top_k,
            padding=padding, return_router_stats=True,
        )  # fmt: skip
        shared = torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return out + shared, Routing(*routing)


def auxiliary_loss(routings, top_k, tokens, per_layer):
    """How unevenly the tokens spread over the experts: a float32 scalar with gradient through the probabilities.

    routings: a Routing for each layer. tokens: real tokens a layer saw. Joined over layers, E sum_e f_e P_e with the
    assignments and the mean probability of each expert a token and layer, is `top_k` under uniform routing, as in
    transformers; per layer it is the sum over layers of that divided by `top_k`, 1 each.
    """
    counts = torch.stack([r.counts for r in routings])
    probabilities = torch.stack([r.probabilities for r in routings])
    experts, rows = counts.shape[1], max(tokens, 1)
    if per_layer:
        return (counts * probabilities).sum() * (experts / (top_k * rows * rows))
    rows *= len(routings)
    return (counts.sum(0) / rows * (probabilities.sum(0) / rows)).sum() * experts
