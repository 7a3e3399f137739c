"""Norms and the dense MLP, on this package's operators. [.., H] in and out."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from automodel_c import ops
from automodel_c.parallel.tensor import TensorParallel

from .tensor import split


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


def own_part(weight):
    """What this rank has of a weight: under FSDP2 that is a DTensor over the ranks that share it."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


class Head(nn.Linear):
    """From hidden states to words. tp: the TensorParallel whose ranks share these, where the weight is a DTensor."""

    def __init__(self, size, vocab):
        super().__init__(size, vocab, bias=False)
        self.tp = TensorParallel()

    def spread(self, tp):
        """Keeps this rank's words."""
        self.tp, self.weight = tp, split(self.weight, 0, tp)

    def forward(self, hidden, labels=None, **options):
        """Of lists of hidden states [n, H] and labels [n] the list of losses, `options` are the operator's; of hidden
        states alone, logits [n, V]. Over tp a rank's losses are of its own rows, its logits of the same rows as theirs.
        One call makes all of a forward, so that FSDP2 gathers the weight once."""
        return through_head(own_part(self.weight), self.tp, hidden, labels, **options)


def through_head(weight, tp, hidden, labels=None, extra_bytes=None, **options):
    """What `Head` makes of them with this rank's words, weight [V / R, H]. extra_bytes: the operator's, None for as
    much as a float32 gradient of the weight."""
    if labels is None:
        logits = F.linear(hidden, weight)
        return logits if tp.group is None else tp.gather(logits.t()).t()
    extra_bytes = 4 * weight.numel() if extra_bytes is None else extra_bytes
    shared = {"tp_group": tp.group, "vocab_size": len(weight) * tp.ranks, "extra_bytes": extra_bytes}
    return [ops.linear_cross_entropy(h, weight, y, **shared, **options) for h, y in zip(hidden, labels, strict=True)]


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)). tp: the TensorParallel whose ranks split the width, and x's rows;
    asynchronous: whether they do so while they compute, see `TensorParallel.products`."""

    def __init__(self, size, width):
        super().__init__()
        self.tp, self.asynchronous = TensorParallel(), False
        self.gate_proj = nn.Linear(size, width, bias=False)
        self.up_proj = nn.Linear(size, width, bias=False)
        self.down_proj = nn.Linear(width, size, bias=False)

    def forward(self, x):
        gate, up, down = (own_part(linear.weight) for linear in (self.gate_proj, self.up_proj, self.down_proj))
        hidden = ops.swiglu(*self.tp.products(x, [gate, up], self.asynchronous))
        return self.tp.product(hidden, down, self.asynchronous)
