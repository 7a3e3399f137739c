"""Two ranks share one pack: the plan, attention over shards, its gradient, and recomputation that moves nothing.

torchrun --nproc-per-node 2 examples/exchange_minimal.py
"""

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import automodel_c as amc
from automodel_c.parallel import ContextParallel, checkpoint_context_fn, faults, wire

HEADS, KV_HEADS, DIM = 4, 2, 32


def main():
    torch.manual_seed(0)
    cu_seqlens = [0, 700, 760, 999]  # the first document lies on both ranks
    x = torch.randn(999, HEADS, DIM)
    weight = torch.randn(DIM, DIM) / DIM**0.5

    cp = ContextParallel(dist.group.WORLD)
    plan = cp.plan(cu_seqlens=cu_seqlens, scheme="heads")

    def layer(x):
        q = x @ weight
        return amc.parallel.attention(q, x[:, :KV_HEADS], q[:, :KV_HEADS], plan)

    shard = cp.shard(x, plan).requires_grad_()
    out = checkpoint(layer, shard, use_reentrant=False, context_fn=checkpoint_context_fn)
    forward = wire.sent
    out.square().sum().backward()
    whole, grad = cp.gather(out.detach(), plan), cp.gather(shard.grad, plan)

    alone = x.clone().requires_grad_()
    q = alone @ weight
    expected = amc.ops.attention(q, alone[:, :KV_HEADS], q[:, :KV_HEADS], cu_seqlens=cu_seqlens)
    expected.square().sum().backward()
    if dist.get_rank() == 0:
        print(plan.explain(HEADS, KV_HEADS, DIM, torch.float32))
        print(f"rank 0 sent {forward} bytes forward")
        print(f"largest difference from one rank: out {(whole - expected).abs().max():.1e}", end=", ")
        print(f"gradient {(grad - alone.grad).abs().max():.1e}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    with faults.guard():
        main()
    dist.destroy_process_group()
