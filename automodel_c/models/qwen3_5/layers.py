"""Norms and the dense MLP, on this package's operators. [.., H] in and out."""

import torch
from torch import nn

from automodel_c import ops


class RMSNorm(nn.Module):
    """Zero-centred: multiplies by 1 + weight."""

    def __init__(self, size, eps):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x, residual=None):
        """y, or (y, x + residual)."""
        return ops.rms_norm(x, self.weight, eps=self.eps, residual=residual)


class GatedRMSNorm(nn.Module):
    """RMSNorm of x times SiLU of z."""

    def __init__(self, size, eps):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x, z):
        return ops.gated_rms_norm(x, z, self.weight, eps=self.eps)


class LayerNorm(nn.LayerNorm):
    """The tower's, eps 1e-6."""

    def __init__(self, size):
        super().__init__(size, eps=1e-6)

    def forward(self, x):
        return ops.layer_norm(x, self.weight, self.bias, eps=self.eps)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, size, width):
        super().__init__()
        self.gate_proj = nn.Linear(size, width, bias=False)
        self.up_proj = nn.Linear(size, width, bias=False)
        self.down_proj = nn.Linear(width, size, bias=False)

    def forward(self, x):
        return self.down_proj(ops.swiglu(self.gate_proj(x), self.up_proj(x)))
