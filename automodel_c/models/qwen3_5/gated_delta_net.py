"""The gated delta net: attention in linear time, whose state starts at zero in every document."""

import torch
from torch import nn

from automodel_c import ops
from automodel_c.parallel.tensor import TensorParallel

from .layers import GatedRMSNorm

GATES = ("A_log", "dt_bias")


class GatedDeltaNet(nn.Module):
    """Letters: T tokens, Hk key heads of Dk, Hv value heads of Dv; Hv is a multiple of Hk.

    A_log and dt_bias [Hv] are float32 whatever the model is cast to. tp: the TensorParallel whose ranks hold the rows;
    each runs the recurrence over all of them and keeps its own.
    """

    def __init__(self, config):
        super().__init__()
        self.tp = TensorParallel()
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        keys, values = config.linear_num_key_heads * self.key_dim, config.linear_num_value_heads * self.value_dim
        self.split = [keys, keys, values]
        channels, width, hidden = 2 * keys + values, config.linear_conv_kernel_dim, config.hidden_size
        self.in_proj_qkv = nn.Linear(hidden, channels, bias=False)
        self.in_proj_z = nn.Linear(hidden, values, bias=False)
        self.in_proj_b = nn.Linear(hidden, config.linear_num_value_heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, config.linear_num_value_heads, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, width, groups=channels, bias=False)  # holds its weight [C, 1, W]
        self.A_log = nn.Parameter(torch.zeros(config.linear_num_value_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.ones(config.linear_num_value_heads, dtype=torch.float32))
        self.norm = GatedRMSNorm(self.value_dim, config.rms_norm_eps)
        self.out_proj = nn.Linear(values, hidden, bias=False)

    def forward(self, x, step):
        """x [T / R, H], this rank's rows of R ranks of tp -> their [T / R, H]."""
        own, x = x, self.tp.gather(x)
        qkv = step.causal_conv1d(self.in_proj_qkv(x), self.conv1d.weight.squeeze(1))
        q, k, v = qkv.split(self.split, dim=-1)
        q, k = (part.unflatten(-1, (-1, self.key_dim)) for part in (q, k))
        v = v.unflatten(-1, (-1, self.value_dim))
        g, beta = ops.gdn_gate(self.in_proj_a(x), self.in_proj_b(x), self.A_log, self.dt_bias)
        out = self.tp.own(step.gated_delta_rule(q, k, v, g, beta))
        out = self.norm(out, self.in_proj_z(own).view(out.shape))
        return self.out_proj(out.flatten(1))

    def _apply(self, fn, recurse=True):
        """Moves everything, and casts everything but the gates' parameters."""
        gates = [p for name, p in self._parameters.items() if name in GATES]

        def move(tensor):
            if not any(tensor is p or tensor is p.grad for p in gates):
                return fn(tensor)
            moved = fn(tensor.new_empty(0))
            return fn(tensor) if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(move, recurse)
