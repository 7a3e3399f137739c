"""Log decay and write strength of a gated delta net layer."""

import torch
import torch.nn.functional as F

import automodel_c as amc

torch.manual_seed(0)
projected = torch.randn(5, 2 * 8, requires_grad=True)  # a and b of 8 heads, made by one matrix
a, b = projected.chunk(2, dim=-1)
A_log, dt_bias = torch.rand(8, requires_grad=True), torch.ones(8, requires_grad=True)
g, beta = amc.ops.gdn_gate(a, b, A_log, dt_bias)
print("log decay:", (g + A_log.exp() * F.softplus(a + dt_bias)).abs().max().item())
print("strength:", (beta - b.sigmoid()).abs().max().item())
(g.sum() + beta.sum()).backward()
print("gradients:", tuple(projected.grad.shape), tuple(A_log.grad.shape), tuple(dt_bias.grad.shape))
