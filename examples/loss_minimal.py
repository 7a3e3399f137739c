"""Cross-entropy over a large vocabulary without its logits, beside torch with them."""

import torch
import torch.nn.functional as F

import automodel_c as amc

torch.manual_seed(0)
tokens, vocab, size = 64, 20_000, 32
hidden = torch.randn(tokens, size, requires_grad=True)
weight = torch.randn(vocab, size, requires_grad=True)
labels = torch.randint(0, vocab, (tokens,))
labels[:16] = -100  # a prompt

loss = amc.ops.linear_cross_entropy(hidden, weight, labels)
ours = torch.autograd.grad(loss, [hidden, weight])

whole = F.cross_entropy(F.linear(hidden, weight), labels)
theirs = torch.autograd.grad(whole, [hidden, weight])

print(f"loss {loss.item():.6f}, with whole logits {whole.item():.6f}")
for name, a, b in zip(("hidden", "weight"), ours, theirs, strict=True):
    print(f"largest difference of the gradient of {name}: {(a - b).abs().max():.1e}")
print(
    "divided by the global batch's labels:", amc.ops.linear_cross_entropy(hidden, weight, labels, num_label_tokens=4096)
)
