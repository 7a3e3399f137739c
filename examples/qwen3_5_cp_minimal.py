"""Two ranks share one pack whose document lies on both: their parts of loss and gradients sum to those of one rank.

torchrun --nproc-per-node 2 examples/qwen3_5_cp_minimal.py
"""

import torch
import torch.distributed as dist

from automodel_c.models import qwen3_5
from automodel_c.parallel import ContextParallel, faults, wire

VIDEO = 91
CONFIG = {
    "model_type": "qwen3_5_moe", "image_token_id": 90, "video_token_id": VIDEO,
    "text_config": {
        "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "mtp_num_hidden_layers": 1,
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
    },
    "vision_config": {
        "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 4,
        "num_position_embeddings": 16,
    },
}  # fmt: skip


def main():
    torch.manual_seed(0)
    alone = qwen3_5.load(CONFIG, aux_loss="transformers")
    torch.manual_seed(0)
    cp, sharing = ContextParallel(dist.group.WORLD), {"enabled": True, "min_tokens": 0, "min_frames": 0}
    model = qwen3_5.load(CONFIG, aux_loss="transformers", cp=cp, frame_sharding=sharing, activation_checkpointing=True)

    ids = torch.randint(0, 80, (100,))
    ids[30:42] = ids[44:56] = VIDEO  # a clip of two frames of 6 x 8 patches, its tokens before and after the edge
    pixels = torch.randn(2 * 6 * 8, model.config.vision.patch_width)
    labels = torch.cat([ids[1:], torch.tensor([-100])]).where(ids < 80, -100)
    batch = {"input_ids": ids, "labels": labels, "cu_seqlens": torch.tensor([0, 10, 100])}
    batch |= {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor([[2, 6, 8]])}
    loss, _ = model(batch)
    loss.backward()
    total = loss.detach().clone()
    for part in (total, *(p.grad for p in model.parameters())):
        dist.all_reduce(part)
    expected, _ = alone(batch)
    expected.backward()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    worst = max(((p.grad - q.grad).norm() / q.grad.norm().clamp(min=1e-9)).item() for p, q in pairs)
    print(f"rank {dist.get_rank()}: its part {loss:.6f}, together {total:.6f}, one rank {expected:.6f}", end="; ")
    print(f"gradients differ by at most {worst:.1e}; {wire.sent} bytes sent in {wire.exchanges} exchanges")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    with faults.guard():
        main()
    dist.destroy_process_group()
