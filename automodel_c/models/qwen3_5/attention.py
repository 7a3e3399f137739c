"""Full attention with a sigmoid gate on its output and interleaved rotary positions."""

from torch import nn

from automodel_c import ops
from automodel_c.parallel.tensor import TensorParallel

from .layers import RMSNorm, own_part
from .tensor import is_split


class Attention(nn.Module):
    """Letters: T tokens, Hq query heads and Hk key heads of D. q_proj holds [query | gate] of each head. tp: the
    TensorParallel whose ranks share the heads, where they split them, and the rows of x in any case; asynchronous:
    whether rows travel while products are computed, see `TensorParallel.products`."""

    def __init__(self, config):
        super().__init__()
        self.head_dim, self.tp, self.asynchronous = config.head_dim, TensorParallel(), False
        query, key = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.rope = {"rotary_dim": config.rotary_dim, "theta": config.rope_theta, "section": config.mrope_section}
        self.q_proj = nn.Linear(config.hidden_size, 2 * query, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key, bias=False)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, x, step):
        """x [T / R, H], this rank's rows of R ranks of tp -> their [T / R, H]."""
        weights = [own_part(linear.weight) for linear in (self.q_proj, self.k_proj, self.v_proj)]
        q, k, v = self.tp.products(x, weights, self.asynchronous)
        q, gate = q.unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in (k, v))
        q, k = self._normed_and_turned(q, k, step.positions)
        out = ops.sigmoid_gate(step.attention(q, k, v), gate).flatten(1)
        if is_split(self):
            return self.tp.product(out, own_part(self.o_proj.weight), self.asynchronous)
        return self.o_proj(self.tp.own(out))

    def _normed_and_turned(self, q, k, positions):
        # where ranks of tp split the heads the norms are FSDP2 units of their own, which gather when they are called
        if is_split(self):
            return ops.mrope(self.q_norm(q), self.k_norm(k), positions, **self.rope)
        weights = self.q_norm.weight, self.k_norm.weight
        return ops.qk_norm_mrope(q, k, *weights, positions, eps=self.q_norm.eps, **self.rope)
