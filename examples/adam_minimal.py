"""Train a bfloat16 model with float32 masters, clip its gradients, and carry on from a checkpoint."""

import io

import torch

import automodel_c as amc

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)).to(torch.bfloat16)
x = torch.randn(256, 16)
y = torch.sin(x.sum(-1, keepdim=True))

# One call a step for every parameter; a shard without elements would be an ordinary parameter.
groups = [
    {"params": [p for p in model.parameters() if p.ndim > 1]},
    {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
]
optimizer = amc.optim.FusedAdamW(groups, lr=1e-2, weight_decay=0.1, master_weights="remainder")


def train(steps):
    for _ in range(steps):
        loss = (model(x.bfloat16()).float() - y).square().mean()
        loss.backward()
        norm = amc.optim.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss {loss.item():.4f}, gradient norm {norm.item():.3f}")


train(1)
train(100)

file = io.BytesIO()
torch.save(optimizer.state_dict(), file)
file.seek(0)
optimizer = amc.optim.FusedAdamW(groups, master_weights="remainder")
optimizer.load_state_dict(torch.load(file, weights_only=True))
state = optimizer.state[model[0].weight]
print({name: (tuple(t.shape), t.dtype) for name, t in state.items()})
train(100)
