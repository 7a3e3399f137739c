"""Full attention with a sigmoid gate on its output and interleaved rotary positions."""

from torch import nn

from automodel_c import ops

from .layers import RMSNorm


class Attention(nn.Module):
    """Letters: T tokens, Hq query heads and Hk key heads of D. q_proj holds [query | gate] of each head."""

    def __init__(self, config):
        super().__init__()
        self.head_dim = config.head_dim
        query, key = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.rope = {"rotary_dim": config.rotary_dim, "theta": config.rope_theta, "section": config.mrope_section}
        self.q_proj = nn.Linear(config.hidden_size, 2 * query, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key, bias=False)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, x, step):
        """x [T, H] -> [T, H]."""
        q, gate = self.q_proj(x).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.k_proj, self.v_proj))
        q, k = self._normed_and_turned(q, k, step.positions)
        return self.o_proj(ops.sigmoid_gate(step.attention(q, k, v), gate).flatten(1))

    def _normed_and_turned(self, q, k, positions):
        if q.is_cuda:  # in one pass as well, once its kernel has run on a GPU: it was compiled and emulated
            return ops.mrope(self.q_norm(q), self.k_norm(k), positions, **self.rope)
        weights = self.q_norm.weight, self.k_norm.weight
        return ops.qk_norm_mrope(q, k, *weights, positions, eps=self.q_norm.eps, **self.rope)
