"""The head that predicts tokens beyond the next (multi-token prediction)."""

import dataclasses

import torch
from torch import nn

from .config import FULL
from .layers import RMSNorm
from .recompute import run
from .text import DecoderLayer

LOSS_SCALE = 0.1


class MTP(nn.Module):
    """Depth k of D has layer k; all depths share `fc`, the norms and the model's embeddings and head.

    h_0 is the decoder's output after its norm; h_k = norm(layer(fc([enorm(E(t + k)); hnorm(h_{k-1})]))) predicts the
    token k after the next.
    """

    def __init__(self, config):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding = RMSNorm(size, eps)
        self.pre_fc_norm_hidden = RMSNorm(size, eps)
        self.norm = RMSNorm(size, eps)
        self.layers = nn.ModuleList(DecoderLayer(config, FULL) for _ in range(config.mtp_num_hidden_layers))
        self.recompute = False

    def forward(self, hidden, embeddings, batch):
        """hidden [T, H], batch a `Batch`, embeddings of its embedded rows -> [(hidden states [T, H], labels [T]) of
        each depth]; under tensor parallelism of this rank's rows."""
        depths = []
        for k, layer in enumerate(self.layers, 1):
            ahead = batch.ahead(k)
            step = dataclasses.replace(batch.step, positions=ahead.positions)
            joined = [
                self.pre_fc_norm_embedding(embeddings.index_select(0, ahead.embedded)),
                self.pre_fc_norm_hidden(hidden),
            ]
            joined = self.fc(torch.cat(joined, -1))
            hidden, _ = run(layer, self.recompute, joined, step, context_fn=step.checkpoint_context)
            hidden = self.norm(hidden)
            depths.append((hidden, ahead.labels))
        return depths
