"""SwiGLU, the gate of attention's output, and GELU."""

import torch
import torch.nn.functional as F

import automodel_c as amc

torch.manual_seed(0)
gate_up = torch.randn(4, 2 * 96, requires_grad=True)  # one linear layer makes both; the gate is the first half
y = amc.ops.swiglu(gate_up)
gate, up = gate_up.chunk(2, dim=-1)
print("swiglu:", (y - F.silu(gate) * up).abs().max().item())
y.sum().backward()
print("one gradient tensor for both halves:", tuple(gate_up.grad.shape))

attended, gate = torch.randn(4, 8, 64), torch.randn(4, 8, 64)
print("gated attention output:", (amc.ops.sigmoid_gate(attended, gate) - attended * gate.sigmoid()).abs().max().item())
for kind in ("none", "tanh"):
    print("gelu", kind, (amc.ops.gelu(attended, kind) - F.gelu(attended, approximate=kind)).abs().max().item())
