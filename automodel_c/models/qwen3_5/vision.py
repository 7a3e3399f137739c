"""The vision tower: patches of images and video frames to embeddings that take the place of tokens.

Letters: P patches (rows of pixel_values), n images or videos, m the merge size; one embedding is m * m patches.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from automodel_c import ops
from automodel_c.partition import Pack

from .layers import LayerNorm
from .recompute import run


class Frames:
    """What the blocks need to know of the patches, from grids int64 [n, 3] (frames, rows, columns) on the host.

    Patches lie frame after frame, within a frame by blocks of m * m: block row, block column, row, column.

    Attributes:
        pack: Pack over P, a frame a document.
        positions: int64 [2, P], row and column of each patch.
        corners, weights: int64 and float32 [P, 4], the entries of the learned positions [side * side] around each
            patch when they are stretched over its frame, and their bilinear shares.
    """

    def __init__(self, grids, merge, side, device):
        grids = np.asarray(grids, dtype=np.int64).reshape(-1, 3)
        sizes = np.repeat(grids[:, 1:], grids[:, 0], axis=0)
        areas = sizes.prod(1)
        starts = np.concatenate([[0], areas.cumsum()])
        self.pack = Pack(cu_seqlens=starts, device=device)
        height, width = sizes.repeat(areas, axis=0).T
        at = np.arange(starts[-1]) - starts[:-1].repeat(areas)
        block, inner = np.divmod(at, merge * merge)
        across = width // merge
        row = block // np.maximum(across, 1) * merge + inner // merge
        column = block % np.maximum(across, 1) * merge + inner % merge
        rows, row_shares = _neighbours(row, height, side)
        columns, column_shares = _neighbours(column, width, side)
        corners = (rows[:, :, None] * side + columns[:, None, :]).reshape(-1, 4)
        weights = (row_shares[:, :, None] * column_shares[:, None, :]).reshape(-1, 4)
        self.positions = torch.from_numpy(np.stack([row, column])).to(device)
        self.corners, self.weights = torch.from_numpy(corners).to(device), torch.from_numpy(weights).to(device)


def _neighbours(index, size, side):
    """Two entries of a table of `side` and their shares, for place `index` of `size` with the corners aligned."""
    place = index.astype(np.float32) * np.float32(side - 1) / np.maximum(size - 1, 1).astype(np.float32)
    low = np.floor(place)
    share = place - low
    entries = np.stack([low, low + 1], axis=1).astype(np.int64)
    return entries.clip(0, side - 1), np.stack([1 - share, share], axis=1)


class PatchEmbed(nn.Module):
    """A convolution whose kernel is its stride: one product with the flattened patches."""

    def __init__(self, config):
        super().__init__()
        kernel = (config.temporal_patch_size, config.patch_size, config.patch_size)
        self.proj = nn.Conv3d(config.in_channels, config.hidden_size, kernel, stride=kernel)

    def forward(self, pixel_values):
        return F.linear(pixel_values, self.proj.weight.flatten(1), self.proj.bias)


class VisionAttention(nn.Module):
    """Attention of the patches of a frame to each other."""

    def __init__(self, config):
        super().__init__()
        self.num_heads, self.theta = config.num_heads, config.rope_theta
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x, frames):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        q, k = ops.vision_rope(q, k, frames.positions, theta=self.theta)
        return self.proj(ops.attention(q, k, v, pack=frames.pack, causal=False).flatten(1))


class VisionMLP(nn.Module):
    def __init__(self, size, width, out, approximate):
        super().__init__()
        self.approximate = approximate
        self.linear_fc1 = nn.Linear(size, width)
        self.linear_fc2 = nn.Linear(width, out)

    def forward(self, x):
        return self.linear_fc2(ops.gelu(self.linear_fc1(x), approximate=self.approximate))


class VisionBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm1 = LayerNorm(config.hidden_size)
        self.norm2 = LayerNorm(config.hidden_size)
        self.attn = VisionAttention(config)
        self.mlp = VisionMLP(config.hidden_size, config.intermediate_size, config.hidden_size, "tanh")

    def forward(self, x, frames):
        x = x + self.attn(self.norm1(x), frames)
        return x + self.mlp(self.norm2(x))


class Merger(VisionMLP):
    """m * m neighbouring patches to one embedding of the decoder."""

    def __init__(self, config):
        joined = config.hidden_size * config.spatial_merge_size**2
        super().__init__(joined, joined, config.out_hidden_size, "none")
        self.norm = LayerNorm(config.hidden_size)

    def forward(self, x):
        return super().forward(self.norm(x).view(-1, self.linear_fc1.in_features))


class VisionModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.merge = config.spatial_merge_size
        self.side = int(config.num_position_embeddings**0.5)
        self.patch_embed = PatchEmbed(config)
        self.pos_embed = nn.Embedding(config.num_position_embeddings, config.hidden_size)
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.depth))
        self.merger = Merger(config)
        self.recompute = False

    def forward(self, pixel_values, grid_thw):
        """pixel_values [P, patch width], grid_thw int [n, 3] -> [P / m^2, out_hidden_size]."""
        weight = self.pos_embed.weight
        frames = Frames(grid_thw, self.merge, self.side, weight.device)
        x = self.patch_embed(pixel_values.to(weight.device, weight.dtype))
        learned = F.embedding_bag(frames.corners, weight.float(), per_sample_weights=frames.weights, mode="sum")
        x = x + learned.to(x.dtype)
        for block in self.blocks:
            x = run(block, self.recompute, x, frames)
        return self.merger(x)
