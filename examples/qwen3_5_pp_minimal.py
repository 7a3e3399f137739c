"""Two ranks hold two stages each of a model's layers; four packs of other lengths run through them. Losses and updates
are those of one rank.

torchrun --nproc-per-node 2 examples/qwen3_5_pp_minimal.py
"""

import torch
import torch.distributed as dist
from qwen3_5_tp_minimal import CONFIG
from torch.distributed.device_mesh import init_device_mesh

from automodel_c.models import qwen3_5
from automodel_c.models.parallelize import parallelize_qwen3_5
from automodel_c.models.qwen3_5.pipeline import Stages
from automodel_c.optim import FusedAdamW, clip_grad_norm_
from automodel_c.parallel import PipelineParallel, faults, install_comm_hooks, set_grad_reduction, sum_gradients
from automodel_c.parallel.pipeline import Channels, Pipeline


def main():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    pp = PipelineParallel(mesh.get_local_rank("pp"), ranks=2, chunks=2)
    channels = Channels(torch.tensor([[0, 1]]), pp.chunks)
    torch.manual_seed(0)
    alone = qwen3_5.load(CONFIG)
    torch.manual_seed(0)
    model = qwen3_5.load(CONFIG, pp=pp)  # the same weights, those of its layers
    parallelize_qwen3_5(model, mesh["dp"])
    install_comm_hooks(model)
    sum_gradients(model)
    optimizers = [FusedAdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (model, alone)]
    packs = [torch.randint(0, 96, (n,)) for n in (71, 39, 20, 50)]
    batches = [{"input_ids": ids, "labels": ids.roll(-1), "num_label_tokens": 180} for ids in packs]
    for step in range(1, 4):
        stages = Stages(model, batches)
        pipeline = Pipeline(pp, channels, stages, torch.device("cpu"))
        pipeline.step(len(batches), lambda last: set_grad_reduction(model, True))
        losses = torch.stack([stages.losses["lm_loss"], torch.zeros(())])
        dist.all_reduce(losses)  # the last stage's rank has it
        for batch in batches:
            loss, _ = alone(batch)
            loss.backward()
            losses[1] += loss.detach()
        norms = [clip_grad_norm_(model.parameters(), 1.0, group=mesh.get_group("pp"))]
        norms.append(clip_grad_norm_(alone.parameters(), 1.0))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {losses[0]:.6f}, one rank {losses[1]:.6f}; norm", *(f"{n:.5f}" for n in norms))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    with faults.guard():
        main()
    dist.destroy_process_group()
