"""Interleaved partial mRoPE of a text with one image, its norms in the same pass, and the tower's axial rotary."""

import torch

import automodel_c as amc

torch.manual_seed(0)
# Three tokens of text, an image of 2 x 3 merged patches at position 3, then text again.
text = torch.arange(3).expand(3, 3)
rows, columns = torch.meshgrid(torch.arange(2), torch.arange(3), indexing="ij")
image = 3 + torch.stack([torch.zeros(6, dtype=torch.int64), rows.flatten(), columns.flatten()])
after = torch.arange(6, 8).expand(3, 2)
position_ids = torch.cat([text, image, after], dim=1)

q, k = torch.randn(11, 8, 256), torch.randn(11, 2, 256)
turned_q, turned_k = amc.ops.mrope(q, k, position_ids, rotary_dim=64, theta=1e7, section=[11, 11, 10])
print("positions (T, H, W):", position_ids.tolist())
print("beyond the rotary part nothing moves:", torch.equal(turned_q[..., 64:], q[..., 64:]))
print("lengths stay:", (turned_q.norm(dim=-1) - q.norm(dim=-1)).abs().max().item())

weights = torch.randn(256) / 10, torch.randn(256) / 10
in_one = amc.ops.qk_norm_mrope(q, k, *weights, position_ids, rotary_dim=64, theta=1e7, section=[11, 11, 10])
normed = [amc.ops.rms_norm(x, weight) for x, weight in zip((q, k), weights, strict=True)]
in_two = amc.ops.mrope(*normed, position_ids, rotary_dim=64, theta=1e7, section=[11, 11, 10])
print(
    "norm and turn in one pass, off by:", max((a - b).abs().max().item() for a, b in zip(in_one, in_two, strict=True))
)

patches = torch.stack([rows.flatten(), columns.flatten()])
q = torch.randn(6, 16, 72)
print("tower:", amc.ops.vision_rope(q, q, patches)[0].shape)
