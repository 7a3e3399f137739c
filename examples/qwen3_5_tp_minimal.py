"""Two ranks split the heads of attention and the width of every MLP, and each pack's rows between these. Losses and
updates are those of one rank.

torchrun --nproc-per-node 2 examples/qwen3_5_tp_minimal.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from automodel_c.models import qwen3_5
from automodel_c.models.parallelize import parallelize_qwen3_5
from automodel_c.optim import FusedAdamW, clip_grad_norm_
from automodel_c.parallel import TensorParallel, faults, install_comm_hooks, sum_gradients

CONFIG = {
    "model_type": "qwen3_5",
    "text_config": {
        "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "intermediate_size": 128,
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
    },
    "vision_config": {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 4},
}  # fmt: skip


def main():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    alone = qwen3_5.load(CONFIG)
    torch.manual_seed(0)
    model = qwen3_5.load(CONFIG, tp=TensorParallel(mesh["tp"]))
    parallelize_qwen3_5(model, mesh, activation_checkpointing=True)
    install_comm_hooks(model)
    sum_gradients(model)  # losses are divided by the labels of all packs
    optimizers = [FusedAdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (model, alone)]
    packs = [torch.randint(0, 96, (n,)) for n in (71, 39)]
    for step in range(1, 4):
        losses, norms = torch.zeros(2), []
        for i, m in enumerate((model, alone)):
            for ids in packs:  # both ranks pass the whole pack, and get a part of its loss
                loss, _ = m({"input_ids": ids, "labels": ids.roll(-1), "num_label_tokens": 110})
                loss.backward()
                losses[i] += loss.detach()
            norms.append(clip_grad_norm_(m.parameters(), 1.0))
            optimizers[i].step()
            optimizers[i].zero_grad()
        dist.all_reduce(losses[:1])
        if dist.get_rank() == 0:
            print(f"step {step}: loss {losses[0]:.6f}, one rank {losses[1]:.6f}; norm", *(f"{n:.5f}" for n in norms))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    with faults.guard():
        main()
    dist.destroy_process_group()
