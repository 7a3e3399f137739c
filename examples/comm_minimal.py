"""Two ranks train one sharded layer: our reduce-scatter, summed gradients, every microbatch reduced, failures named.

torchrun --nproc-per-node 2 examples/comm_minimal.py
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from automodel_c.parallel import faults, install_comm_hooks, set_grad_reduction, sum_gradients


def main():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 33), torch.nn.Tanh(), torch.nn.Linear(33, 1))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in (model[0], model[2], model):
        fully_shard(unit, mp_policy=policy)
    install_comm_hooks(model, wire_dtype=torch.bfloat16)  # bf16 travels, float32 is summed
    sum_gradients(model)  # the loss below is divided by the global count
    set_grad_reduction(model, per_microbatch=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    torch.manual_seed(1 + dist.get_rank())
    microbatches, rows = 2, 16
    for step in range(60):
        total = torch.zeros(())
        for _ in range(microbatches):
            x = torch.randn(rows, 8)
            error = model(x).float().squeeze(-1) - x.sum(-1).sin()
            loss = error.square().sum() / (microbatches * rows * dist.get_world_size())
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        if dist.get_rank() == 0 and step % 20 == 19:
            print(f"step {step + 1}: loss {total.item():.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    with faults.guard():
        main()
    dist.destroy_process_group()
