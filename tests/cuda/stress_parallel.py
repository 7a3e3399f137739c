"""FSDP2, experts over ranks, attention and the gated delta rule over ranks, all at once on two or more GPUs:
python -m tests.cuda.stress_parallel --seconds 600

Each has its own process group and its messages their own streams. Every round draws nothing new, so that outputs and
gradients are those of the first round to the bit, or something met what it should not have.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import automodel_c as amc
from automodel_c.parallel import ContextParallel, install_comm_hooks
from tests.ranks import RankPool, here

SIZE, INNER, EXPERTS = 512, 256, 8
LENGTHS = [700, 3000, 4300, 192]


def randn(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device=here(), dtype=dtype)


class Block(nn.Module):
    """A product of FSDP2's, attention and the gated delta rule over `plan`, experts over another group."""

    def __init__(self, plan, ep_group):
        super().__init__()
        self.plan, self.ep_group = plan, ep_group
        self.inner = nn.Linear(SIZE, 4 * SIZE, dtype=torch.bfloat16, device=here())
        self.experts = nn.ParameterList(
            0.05 * randn(*shape) for shape in ((EXPERTS, SIZE), (4, 2 * INNER, SIZE), (4, SIZE, INNER))
        )

    def forward(self, x, gate):
        rows = self.inner(x)
        q, k, v = (rows[:, n * SIZE : (n + 1) * SIZE].unflatten(1, (-1, 128)) for n in range(3))
        x = x + amc.parallel.attention(q, k[:, :2], v[:, :2], self.plan).flatten(1)
        beta = torch.sigmoid(rows[:, 3 * SIZE : 3 * SIZE + 4])
        x = x + amc.parallel.gated_delta_rule(q, k, v, gate, beta, self.plan).flatten(1)
        return x + amc.ops.moe(x, *self.experts, top_k=2, ep_group=self.ep_group)


def build():
    ranks = list(range(dist.get_world_size()))
    cp, ep_group = ContextParallel(dist.new_group(ranks)), dist.new_group(ranks)
    offsets = (torch.tensor([0, *LENGTHS]).cumsum(0) // (1 if here().type == "cuda" else 64)).numpy()
    plan = cp.plan(cu_seqlens=offsets, scheme="balanced")
    mesh = init_device_mesh(here().type, (len(ranks),))
    torch.manual_seed(7)
    model = nn.Sequential(*(Block(plan, ep_group) for _ in range(3)))
    for block in model:
        experts = set(block.experts)
        fully_shard(block, mesh=mesh, ignored_params=experts)
    install_comm_hooks(model)
    return model, plan


def numbers(model, x, gate):
    for parameter in model.parameters():
        parameter.grad = None
    out = x
    for block in model:
        out = block(out, gate)
    out.float().square().mean().backward()
    grads = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in model.parameters()]
    return [out.detach(), *grads]


def stress(seconds):
    """How many rounds there were; AssertionError where one differs from the first."""
    model, plan = build()
    torch.manual_seed(dist.get_rank())
    x, gate = randn(plan.local, SIZE), -0.1 * torch.rand(plan.local, 4, device=here())
    first, began, rounds = numbers(model, x, gate), time.monotonic(), 0
    while True:
        again = numbers(model, x, gate)
        rounds += 1
        if rounds % 16:
            continue
        same = all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert same and all(bool(t.isfinite().all()) for t in first), f"round {rounds} differs from the first"
        late = torch.tensor(time.monotonic() - began > seconds, device=here()).int()
        dist.broadcast(late, 0)
        if late:
            return rounds


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cpu", action="store_true", help="over gloo")
    options = parser.parse_args()
    pool = RankPool(options.ranks, *(("gloo", "cpu") if options.cpu else ("nccl", "cuda")))
    try:
        print("rounds", pool.run(stress, options.seconds, timeout=options.seconds + 120))
    finally:
        pool.close()
