"""Forwards of the vision tower; `self` is transformers' module. T patches."""

import sys

import torch
from transformers import vision_utils

from automodel_c import ops
from automodel_c.partition import Pack

from .request import REQUEST

PLAN = "amcore_tower"


class TowerPlan:
    """A batch's frames. Attributes: pack, Pack over T; positions, int [2, T]; theta, None where transformers'
    cosines are used."""

    def __init__(self, pack, positions, theta):
        self.pack, self.positions, self.theta = pack, positions, theta


def vision_model(self, hidden_states, grid_thw, **kwargs):
    """Hands the blocks a TowerPlan; arguments and results are transformers'."""
    kwargs.pop(REQUEST, None)
    kwargs[PLAN] = _plan(self, grid_thw, dict(kwargs))
    return type(self).forward(self, hidden_states, grid_thw, **kwargs)


@torch.compiler.disable(recursive=True)  # NumPy on the host
def _plan(self, grid_thw, known):
    cu_seqlens = vision_utils.get_vision_cu_seqlens(grid_thw.cpu(), kwargs=known)
    positions = vision_utils.get_vision_position_ids(grid_thw, self.spatial_merge_size, kwargs=known)
    pack = Pack(cu_seqlens=cu_seqlens.cpu(), device=positions.device)
    return TowerPlan(pack, positions.t().contiguous(), rope_theta(self)[0])


def rope_theta(tower):
    """(theta of ops.vision_rope, None), or (None, why the operator does not fit)."""
    rope = getattr(tower.config, "rope_parameters", None) or {}
    if rope.get("rope_type", "axial") not in ("axial", "default"):
        return None, f"rope_type {rope['rope_type']!r}"
    head_dim = tower.config.hidden_size // tower.config.num_heads
    if head_dim % 4:
        return None, f"head dim {head_dim} is no multiple of 4"
    return float(getattr(tower.rotary_pos_emb, "theta", None) or rope["rope_theta"]), None


def vision_attention(self, hidden_states, *args, position_embeddings=None, **kwargs):
    """hidden_states [T, hidden size] -> the same; transformers' own code where no TowerPlan comes along."""
    plan = kwargs.pop(PLAN, None)
    if plan is None:
        return type(self).forward(self, hidden_states, *args, position_embeddings=position_embeddings, **kwargs)
    q, k, v = self.qkv(hidden_states).view(len(hidden_states), 3, self.num_heads, -1).unbind(1)
    if plan.theta is not None:
        q, k = ops.vision_rope(q, k, plan.positions, theta=plan.theta)
    else:
        module = next(c for c in type(self).__mro__ if c.__module__.startswith("transformers.")).__module__
        q, k = sys.modules[module].apply_rotary_pos_emb_vision(q, k, *position_embeddings)
    out = ops.attention(q, k, v, pack=plan.pack, causal=False, scale=self.scaling)
    return self.proj(out.flatten(1))
