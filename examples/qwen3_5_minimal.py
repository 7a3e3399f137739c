"""A tiny Qwen3.5 vision-language model with experts on one pack: a text, an image with a question, padding."""

import torch

import automodel_c as amc
from automodel_c.models import qwen3_5

torch.manual_seed(0)
IMAGE, VOCAB = 90, 96
config = {
    "model_type": "qwen3_5_moe", "image_token_id": IMAGE, "video_token_id": 91,
    "text_config": {
        "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
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
model = qwen3_5.load(config)
print(f"{sum(p.numel() for p in model.parameters()):,} parameters, layers: {', '.join(model.config.text.layer_types)}")

text = torch.randint(0, 80, (20,))
question = torch.randint(0, 80, (12,))
question[2:8] = IMAGE  # an image of 4 x 6 patches is 2 x 3 tokens
ids = torch.cat([text, question, torch.zeros(3, dtype=torch.int64)])
labels = torch.cat([text[1:], torch.tensor([-100]), torch.full((8,), -100), question[9:], torch.full((4,), -100)])
batch = {
    "input_ids": ids,
    "labels": labels,  # already shifted inside each document
    "cu_seqlens": torch.tensor([0, 20, 32]),
    "pixel_values": torch.randn(4 * 6, model.config.vision.patch_width),
    "image_grid_thw": torch.tensor([[1, 4, 6]]),
}

optimizer = amc.optim.FusedAdamW(model.parameters(), lr=3e-3)
for step in range(10):
    loss, metrics = model(batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 3 == 0:
        print(f"step {step}: loss {loss.item():.4f}", {name: round(value.item(), 4) for name, value in metrics.items()})

answers = model.logits(batch, rows=[28, 29, 30]).argmax(-1)
print("after ten steps it says", answers.tolist(), "where the question ends with", question[9:].tolist())
