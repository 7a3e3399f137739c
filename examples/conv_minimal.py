"""A causal convolution over packed documents, and one that goes on from a state."""

import torch
import torch.nn.functional as F

import automodel_c as amc

torch.manual_seed(0)
x, weight = torch.randn(9, 6, requires_grad=True), torch.randn(6, 4, requires_grad=True)
y, _ = amc.ops.causal_conv1d(x, weight, cu_seqlens=[0, 2, 2, 9])  # three documents, one of them empty
for start, end in ((0, 2), (2, 9)):
    z = F.conv1d(F.pad(x[start:end].T, (3, 0))[None], weight[:, None], groups=6)[0]
    print(f"rows {start} to {end} against F.conv1d:", (y[start:end] - F.silu(z).T).abs().max().item())
y.sum().backward()
print("gradients:", tuple(x.grad.shape), tuple(weight.grad.shape))

first, state = amc.ops.causal_conv1d(x[:5], weight, output_final_state=True)
second, _ = amc.ops.causal_conv1d(x[5:], weight, initial_state=state)  # raw inputs of the last three rows
print("in two parts as in one:", torch.equal(torch.cat([first, second]), amc.ops.causal_conv1d(x, weight)[0]))
