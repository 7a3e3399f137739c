"""Rotary embeddings in float64."""

import torch

from automodel_c.reference.norm import rms_norm


def mrope_axis(i, section):
    """The axis (0 T, 1 H, 2 W) that frequency index i reads."""
    axis = i % 3
    return axis if axis and i < 3 * section[axis] else 0


def mrope(q, k, position_ids, *, rotary_dim, theta, section):
    """Interleaved partial mRoPE of q, k [T, H, D] by position_ids [3, T] or [T]; float64."""
    positions = position_ids.expand(3, -1).double()
    pairs = range(rotary_dim // 2)
    angle = torch.stack([positions[mrope_axis(i, section)] * theta ** (-2.0 * i / rotary_dim) for i in pairs], -1)
    return _turn(q, angle), _turn(k, angle)


def qk_norm_mrope(q, k, q_weight, k_weight, position_ids, *, rotary_dim, theta, section, eps=1e-6, zero_centered=True):
    """`mrope` of the RMSNorm of every head of q and k; float64."""
    q, k = (rms_norm(x, w, eps=eps, zero_centered=zero_centered) for x, w in ((q, q_weight), (k, k_weight)))
    return mrope(q, k, position_ids, rotary_dim=rotary_dim, theta=theta, section=section)


def vision_rope(q, k, position_ids, *, theta=10000.0):
    """Axial rotary of whole heads q, k [T, H, D] by position_ids [2, T] or [T]; float64."""
    positions = position_ids.expand(2, -1).double()
    count = q.shape[-1] // 4
    angle = torch.stack([positions[a] * theta ** (-4.0 * j / q.shape[-1]) for a in range(2) for j in range(count)], -1)
    return _turn(q, angle), _turn(k, angle)


def _turn(x, angle):
    """Pair (i, i + n) of each head [T, H, D] turns by angle [T, n]; the elements from 2 n on stay."""
    n = angle.shape[-1]
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    low, high, rest = x[..., :n].double(), x[..., n : 2 * n].double(), x[..., 2 * n :].double()
    return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], -1)
