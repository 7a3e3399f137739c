"""Normalisation over the last axis in float64."""

import torch


def rms_norm(x, weight, *, eps=1e-6, zero_centered=True, residual=None):
    """s / sqrt(mean(s^2) + eps) * (1 + weight), s = x or x + residual; with a residual also s. float64."""
    s = x.double() if residual is None else x.double() + residual.double()
    scale = weight.double() + (1.0 if zero_centered else 0.0)
    y = s * torch.rsqrt((s * s).mean(-1, keepdim=True) + eps) * scale
    return y if residual is None else (y, s)


def gated_rms_norm(x, z, weight, *, eps=1e-6):
    """x / sqrt(mean(x^2) + eps) * weight * z * sigmoid(z), float64."""
    z = z.double()
    return rms_norm(x, weight, eps=eps, zero_centered=False) * z * torch.sigmoid(z)


def layer_norm(x, weight, bias, *, eps=1e-6):
    """(x - mean) / sqrt(var + eps) * weight + bias, float64."""
    x = x.double()
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    return centred * torch.rsqrt(variance + eps) * weight.double() + bias.double()
