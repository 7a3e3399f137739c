"""The decoder: layers of a token mixer and an MLP around one stream of activations [T, H]."""

from torch import nn

from .attention import Attention
from .config import FULL
from .experts import SparseMoE
from .gated_delta_net import GatedDeltaNet
from .layers import MLP, RMSNorm
from .recompute import run
from .tensor import cut, splits


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

    def spread(self, tp, plan):
        """Over the ranks of a TensorParallel: keeps this one's part of the weights that `tensor.plan_of` splits."""
        for part in ("self_attn", "linear_attn", "mlp"):
            module = getattr(self, part, None)
            if module is None or isinstance(module, SparseMoE):
                continue
            split = splits(plan, part)
            if split:
                cut(module, part, tp)
            if split or part != "mlp":  # a whole MLP is each row's own
                module.tp = tp

    def forward(self, x, step, rows=None):
        """x [T, H] -> ([T, H], its router's statistics, None for a dense MLP). rows int64 [n]: only they go on from the
        mixer, [n, H] of them is what comes back. Under tensor parallelism x is this rank's rows of T."""
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
        self.recompute, self.depth = False, config.num_hidden_layers

    def keep(self, layers, first, last):
        """Drops what other stages of a pipeline hold: all layers but `layers`, the embedding unless it is the first
        stage's rank, the norm unless it is the last's. What is left keeps its names."""
        for i in set(range(self.depth)) - set(layers):
            delattr(self.layers, str(i))
        if not first:
            self.embed_tokens = None
        if not last:
            self.norm = None

    def forward(self, x, step, rows=None, layers=None):
        """x [T, H], embeddings with media in place -> (hidden states [T, H], normed; each layer's statistics). rows
        int64 [n], none of them padding: the only ones whose hidden states are wanted, [n, H]. layers: a range of them,
        None for all; hidden states are normed behind the last."""
        stats = []
        for i in range(self.depth) if layers is None else layers:
            wanted = rows if i == self.depth - 1 else None
            layer = getattr(self.layers, str(i))
            x, routed = run(layer, self.recompute, x, step, wanted, context_fn=step.checkpoint_context)
            stats.append(routed)
        return (self.norm(x) if i == self.depth - 1 else x), stats
