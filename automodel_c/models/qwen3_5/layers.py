"""Norms and the dense MLP, on this package's operators. [.., H] in and out."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from automodel_c import ops
from automodel_c.parallel.tensor import TensorParallel


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


class Linear(nn.Linear):
    """Without a bias. Its weight may be this rank's part of one that ranks of tensor parallelism split."""

    def __init__(self, size, width):
        super().__init__(size, width, bias=False)

    def forward(self, x):
        return F.linear(x, own_part(self.weight))


def own_part(weight):
    """What this rank has of a weight: under FSDP2 that is a DTensor over the ranks that share it."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)). tp: the TensorParallel whose ranks split the width, and x's rows."""

    def __init__(self, size, width):
        super().__init__()
        self.tp = TensorParallel()
        self.gate_proj = Linear(size, width)
        self.up_proj = Linear(size, width)
        self.down_proj = Linear(width, size)

    def forward(self, x):
        x = self.tp.gather(x)
        return self.tp.scatter(self.down_proj(ops.swiglu(self.gate_proj(x), self.up_proj(x))))
