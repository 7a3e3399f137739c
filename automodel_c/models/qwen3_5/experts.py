"""Routed experts beside one that every token takes."""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from automodel_c import ops
from automodel_c.parallel.exchange import exchange
from automodel_c.parallel.experts import ExpertParallel, moe_over_ranks

from .layers import MLP, own_part
from .recompute import made_again


class Router(nn.Module):
    """Holds weight [E, H]."""

    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.num_experts, config.hidden_size))


class Experts(nn.Module):
    """Holds gate_up_proj [e, 2I, H], the gate first, and down_proj [e, H, I]: e of all E experts are this rank's."""

    def __init__(self, config):
        super().__init__()
        experts, size, width = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.ep = ExpertParallel()
        self.weight_grads = None  # see `ops.moe`
        self.gate_up_proj = nn.Parameter(torch.zeros(experts, 2 * width, size))
        self.down_proj = nn.Parameter(torch.zeros(experts, size, width))

    def spread(self, ep):
        """Keeps the experts of this rank of `ep`, an ExpertParallel whose ranks divide E."""
        self.ep = ep
        for name, weight in list(self.named_parameters()):
            first, end = ep.range(len(weight))
            setattr(self, name, nn.Parameter(weight.detach()[first:end].clone()))

    def forward(self, x, router_weight, padding, top_k, beside):
        """(`ops.moe` with the router's statistics, over the ranks that hold experts; beside()). Made again, its output
        goes into sums alone, whose gradients do not need it."""
        weights = router_weight, own_part(self.gate_up_proj), own_part(self.down_proj)
        options = {"need_output": not made_again(), "weight_grads": self.weight_grads}
        if self.ep.group is not None:
            return moe_over_ranks(x, *weights, padding, lambda: top_k, self.ep.group, meanwhile=beside, **options)
        options |= {"top_k": top_k, "padding": padding, "return_router_stats": True}
        return ops.moe(x, *weights, **options), beside()


def whole_experts(model):
    """(name, tensor) of the state dict of `model` with the experts of all ranks, which gather them layer by layer; what
    is a DTensor stays one."""
    spread = {}
    for prefix, module in model.named_modules():
        if isinstance(module, Experts) and module.ep.group is not None:
            spread |= {f"{prefix}.{name}": module.ep for name, _ in module.named_parameters()}
    for name, tensor in model.state_dict().items():
        if name in spread and not isinstance(tensor, DTensor):
            parts = [torch.empty_like(tensor) for _ in range(spread[name].ranks)]
            dist.all_gather(parts, tensor.detach().contiguous(), group=spread[name].group)
            tensor = torch.cat(parts)
        yield name, tensor


class SparseMoE(nn.Module):
    """Each token's `top_k` of E experts, and sigmoid(shared_expert_gate(x)) times a shared one."""

    def __init__(self, config):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.gate = Router(config)
        self.experts = Experts(config)
        self.shared_expert = MLP(config.hidden_size, config.shared_expert_intermediate_size)
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, x, padding):
        """x [T, H], padding bool [T] or None -> ([T, H], the router's statistics for `auxiliary_loss`)."""

        def shared():
            return self.shared_expert(x), self.shared_expert_gate(x)

        (out, *stats), others = self.experts(x, self.gate.weight, padding, self.top_k, shared)
        return ops.add_shared_expert(out, *others), tuple(stats)


def auxiliary_loss(stats, top_k, per_layer):
    """How unevenly tokens spread over the experts, a float32 scalar: transformers' value, `top_k` when all layers use
    their experts alike, or the sum of the layers' own, 1 each. stats: those of every layer."""
    if per_layer:
        return sum(ops.per_layer_aux_loss(*layer, top_k=top_k) for layer in stats)
    return ops.load_balancing_loss(stats)


def over_ranks(stats, plan, real_rows, tp):
    """Every layer's statistics with the load and the real rows of the whole pack, beside this rank's own prob_sum.
    plan: ContextPlan of several ranks, or None; tp: TensorParallel.

    An auxiliary loss is linear in prob_sum, so that what it makes of these is this rank's part: values and gradients
    sum over the group to those of one rank. Loads travel once for all layers, and nothing in backward.
    """
    loads = torch.stack([load for load, _, _ in stats])
    if tp.group is not None:
        dist.all_reduce(loads, group=tp.group)
    if plan is not None:
        loads = exchange(loads[None], _to_all(plan), plan.group).sum(0)
    rows = torch.tensor(real_rows, device=loads.device)
    return [(load, prob_sum, rows) for load, (_, prob_sum, _) in zip(loads, stats, strict=True)]


def _to_all(plan):
    """The Route of every rank's one row to all ranks."""
    src, dst = (x.flatten() for x in np.meshgrid(np.arange(plan.ranks), np.arange(plan.ranks)))
    zeros = np.zeros_like(src)
    return plan.route(np.stack([src, dst, zeros, src, zeros + 1], axis=1), 1, plan.ranks, "loads of experts")
