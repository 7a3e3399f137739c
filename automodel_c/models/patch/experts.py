"""Forwards of the sparse MoE block and of the layer that tells it what is padding; `self` is transformers' module."""

import functools

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from automodel_c import ops

from .documents import PLAN

SILU = ("SiLU", "SiLUActivation")


def misfit(self):
    """Why the operator does not run this block, None where it does."""
    experts, gate = self.experts, self.gate
    act = type(getattr(experts, "act_fn", None)).__name__
    if act not in SILU:
        return f"the experts' activation is {act}, not silu"
    if getattr(experts, "_is_expert_parallel", False):
        return "the experts are spread over ranks"
    count, size = gate.weight.shape
    width = getattr(experts, "intermediate_dim", None)
    shapes = {"gate_up_proj": (count, 2 * (width or 0), size), "down_proj": (count, size, width)}
    for name, shape in shapes.items():
        weight = getattr(experts, name, None)
        if not isinstance(weight, nn.Parameter) or tuple(weight.shape) != shape:
            return f"{name} of the {type(experts).__name__} is no parameter {list(shape)}"
        if weight.dtype != gate.weight.dtype:
            return f"{name} is {weight.dtype}, the router {gate.weight.dtype}"
    return None


def sparse_moe(self, hidden_states, plan=None):
    """hidden_states [B, L, H] -> the same; padding's rows are routed nowhere."""
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    if plan is not None and plan.router_logits:
        self.gate(x)  # transformers records what this returns; the operator makes the same logits again
    out = ops.moe(
        x, self.gate.weight, self.experts.gate_up_proj, self.experts.down_proj, top_k=self.gate.top_k,
        padding=None if plan is None else plan.padding,
    )  # fmt: skip
    return ops.add_shared_expert(out, self.shared_expert(x), self.shared_expert_gate(x)).view(hidden_states.shape)


def decoder_layer(self, hidden_states, *args, attention_mask=None, **kwargs):
    """transformers' layer, whose experts get the TextPlan too; its own code where none comes along."""
    plan = kwargs.get(PLAN)
    if plan is None or args:
        return type(self).forward(self, hidden_states, *args, attention_mask=attention_mask, **kwargs)
    if _checkpoints_its_forward(self):
        kwargs |= {name: None for name in ("cache", "past_key_values") if name in kwargs}
        run = functools.partial(_layer, self, plan, attention_mask=attention_mask, **kwargs)
        return self._gradient_checkpointing_func(run, hidden_states)
    return _layer(self, plan, hidden_states, attention_mask=attention_mask, **kwargs)


def _checkpoints_its_forward(self):
    """Newer transformers checkpoints inside the forward that this module's replaces, older around it."""
    inside = "__call__" not in vars(GradientCheckpointingLayer)
    return inside and self.gradient_checkpointing and self.training and torch.is_grad_enabled()


def _layer(self, plan, hidden_states, *, attention_mask, **kwargs):
    normed = self.input_layernorm(hidden_states)
    if hasattr(self, "linear_attn"):
        kwargs = {k: v for k, v in kwargs.items() if k not in ("position_embeddings", "position_ids")}
        if "past_key_values" in kwargs:  # the layer's name for it, cache_params is its mixer's
            kwargs["cache_params"] = kwargs.pop("past_key_values")
        mixed = self.linear_attn(normed, attention_mask=attention_mask, **kwargs)
    else:
        mixed, _ = self.self_attn(hidden_states=normed, attention_mask=attention_mask, **kwargs)
    hidden_states = hidden_states + mixed
    return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states), plan=plan)
