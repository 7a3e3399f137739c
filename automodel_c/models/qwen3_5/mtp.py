"""The head that predicts tokens beyond the next (multi-token prediction)."""

import dataclasses

import numpy as np
import torch
from torch import nn

from .config import FULL
from .layers import RMSNorm
from .step import IGNORE
from .text import DecoderLayer, run

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
        """hidden, embeddings [T, H], batch a `Batch` -> [(hidden states [T, H], labels [T]) of each depth]."""
        depths = []
        for k, layer in enumerate(self.layers, 1):
            ahead, inside = _ahead(batch.ends, k, hidden.device)
            step = dataclasses.replace(batch.step, positions=batch.step.positions.index_select(1, ahead))
            joined = [
                self.pre_fc_norm_embedding(embeddings.index_select(0, ahead)),
                self.pre_fc_norm_hidden(hidden),
            ]
            hidden, _ = run(layer, self.recompute, self.fc(torch.cat(joined, -1)), step)
            hidden = self.norm(hidden)
            depths.append((hidden, batch.labels.index_select(0, ahead).masked_fill(~inside, IGNORE)))
        return depths


def _ahead(ends, k, device):
    """(int64 [T] the token k further, the document's last where it ends before; bool [T] where it does not)."""
    here = np.arange(len(ends))
    inside = here + k < ends
    ahead = np.where(inside, here + k, np.where(ends > 0, ends - 1, here))
    return torch.from_numpy(ahead).to(device), torch.from_numpy(inside).to(device)
