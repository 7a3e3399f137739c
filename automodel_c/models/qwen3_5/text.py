"""The decoder: layers of a token mixer and an MLP around one stream of activations [T, H]."""

from torch import nn

from .attention import Attention
from .config import FULL
from .experts import SparseMoE
from .gated_delta_net import GatedDeltaNet
from .layers import MLP, RMSNorm
from .recompute import run


class DecoderLayer(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config, layer_type):
        super().__init__()
        if layer_type == FULL:
            self.self_attn = Attention(config)
        else:
            self.linear_attn = GatedDeltaNet(config)
        self.mlp = SparseMoE(config) if config.num_experts else MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, step, rows=None):
        """x [T, H] -> ([T, H], its router's statistics, None for a dense MLP). rows int64 [n]: only they go on from the
        mixer, [n, H] of them is what comes back."""
        mixer = self.self_attn if hasattr(self, "self_attn") else self.linear_attn
        mixed, padding = mixer(self.input_layernorm(x), step), step.padding
        if rows is not None:
            mixed, x, padding = mixed.index_select(0, rows), x.index_select(0, rows), None
        normed, x = self.post_attention_layernorm(mixed, residual=x)
        out = self.mlp(normed, padding) if isinstance(self.mlp, SparseMoE) else (self.mlp(normed), None)
        return x + out[0], out[1]


class TextModel(nn.Module):
    """Embeddings, decoder layers, final norm."""

    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer_type) for layer_type in config.layer_types)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.recompute = False

    def forward(self, x, step, rows=None):
        """x [T, H], embeddings with media in place -> (hidden states [T, H], normed; each layer's statistics). rows
        int64 [n], none of them padding: the only ones whose hidden states are wanted, [n, H]."""
        stats, last = [], len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            wanted = rows if i == last else None
            x, routed = run(layer, self.recompute, x, step, wanted, context_fn=step.checkpoint_context)
            stats.append(routed)
        return self.norm(x), stats
