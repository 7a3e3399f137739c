"""RMSNorm with a residual, gated RMSNorm and LayerNorm."""

import torch

import automodel_c as amc

torch.manual_seed(0)
x, residual, gate = (torch.randn(6, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
weight = torch.zeros(64, requires_grad=True)  # zero-centred: scales by 1 + weight

y, total = amc.ops.rms_norm(x, weight, residual=residual)
print("root mean square of each row:", y.float().pow(2).mean(-1).sqrt().tolist())
print("the sum is the next residual:", torch.equal(total, x + residual))

(y.float().sum() + total.float().sum()).backward()
print("one gradient for both:", torch.equal(x.grad, residual.grad), "weight's dtype:", weight.grad.dtype)

print("gated:", amc.ops.gated_rms_norm(x, gate, torch.ones(64)).shape)
print("layer:", amc.ops.layer_norm(x, torch.ones(64), torch.zeros(64)).float().mean(-1).abs().max().item())
