"""Routed experts, the shared expert's join, and both auxiliary losses."""

import torch
import torch.nn.functional as F

import automodel_c as amc

torch.manual_seed(0)
tokens, size, inner, experts, k = 12, 32, 16, 6, 2
hidden = torch.randn(tokens, size, requires_grad=True)
router = torch.randn(experts, size, requires_grad=True)
gate_up = (torch.randn(experts, 2 * inner, size) / size**0.5).requires_grad_()  # the gate is the first half
down = (torch.randn(experts, size, inner) / inner**0.5).requires_grad_()
padding = torch.arange(tokens) >= 10  # the last two rows are never routed

out, load, prob_sum, rows = amc.ops.moe(
    hidden, router, gate_up, down, top_k=k, padding=padding, return_router_stats=True
)
print("tokens of each expert:", load.tolist(), "of", int(rows), "tokens with", k, "experts each")
print("padding gives:", out[10:].abs().max().item())

plain = torch.zeros_like(out[:10])
weights, chosen = torch.topk(torch.softmax(hidden[:10] @ router.T, -1), k)
for t in range(10):
    for w, e in zip(weights[t] / weights[t].sum(), chosen[t], strict=True):
        gate, up = (gate_up[e] @ hidden[t]).chunk(2)
        plain[t] += w * (down[e] @ (F.silu(gate) * up))
print("difference from a loop over tokens:", (out[:10] - plain).abs().max().item())

per_layer = amc.ops.per_layer_aux_loss(load, prob_sum, rows, top_k=k)
whole_model = amc.ops.load_balancing_loss([(load, prob_sum, rows)])  # a list of the layers' statistics
print(f"auxiliary loss: {per_layer:.4f} (1 is even), transformers' {whole_model:.4f} ({k} is even)")
shared, gate = torch.randn(tokens, size), torch.randn(tokens, 1)
(amc.ops.add_shared_expert(out, shared, gate).sum() + 0.01 * per_layer).backward()
print("router's gradient:", router.grad.norm().item())
