"""Attention over a pack of three documents, with gradients: nothing crosses a document's edge."""

import torch

import automodel_c as amc

torch.manual_seed(0)
lengths = [5, 0, 12]
tokens = 20  # three tokens of padding at the end
pack = amc.Pack(cu_seqlens=[0, 5, 5, 17])

# Eight query heads read two key heads; slices of one buffer are fine.
qkv = torch.randn(tokens, 8 + 2 + 2, 64, requires_grad=True)
q, k, v = qkv.split([8, 2, 2], dim=1)
out, lse = amc.ops.attention(q, k, v, pack=pack, return_lse=True)
out.square().sum().backward()
print(f"out {tuple(out.shape)}, lse {tuple(lse.shape)}, gradient norm {qkv.grad.norm():.4f}")

# The second document alone gives the same bits.
alone = amc.ops.attention(q[5:17], k[5:17], v[5:17])
assert torch.equal(alone, out[5:17])

# Padding: out 0, lse -inf, gradient 0.
assert not out[17:].any() and not qkv.grad[17:].any() and lse[17:].eq(-torch.inf).all()

# Five new queries against seventeen keys: causal masks align at the last token.
step = amc.ops.attention(q[:5], k[:17], v[:17])
print(f"five queries, seventeen keys: {tuple(step.shape)}")
