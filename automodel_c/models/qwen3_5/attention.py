"""Full attention with a sigmoid gate on its output and interleaved rotary positions."""

from torch import nn

from automodel_c import ops
from automodel_c.parallel.tensor import TensorParallel

from .layers import Linear, RMSNorm
from .tensor import is_split


class Attention(nn.Module):
    """Letters: T tokens, Hq query heads and Hk key heads of D. q_proj holds [query | gate] of each head. tp: the
    TensorParallel whose ranks share the heads, where they split them, and the rows of x in any case."""

    def __init__(self, config):
        super().__init__()
        self.head_dim, self.tp = config.head_dim, TensorParallel()
        query, key = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.rope = {"rotary_dim": config.rotary_dim, "theta": config.rope_theta, "section": config.mrope_section}
        self.q_proj = Linear(config.hidden_size, 2 * query)
        self.k_proj = Linear(config.hidden_size, key)
        self.v_proj = Linear(config.hidden_size, key)
        self.o_proj = Linear(query, config.hidden_size)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, x, step):
        """x [T / R, H], this rank's rows of R ranks of tp -> their [T / R, H]."""
        x = self.tp.gather(x)
        q, gate = self.q_proj(x).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.k_proj, self.v_proj))
        q, k = ops.mrope(self.q_norm(q), self.k_norm(k), step.positions, **self.rope)
        out = self.o_proj(ops.sigmoid_gate(step.attention(q, k, v), gate).flatten(1))
        return self.tp.scatter(out) if is_split(self, "self_attn") else self.tp.own(out)
