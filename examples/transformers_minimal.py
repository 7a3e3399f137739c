"""Trains transformers' own Qwen3.5 on a pack of documents; one call puts the operators under it."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import automodel_c as amc

torch.manual_seed(0)
sizes = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16}
heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_5_text", **sizes, **heads))  # or from_pretrained
print(amc.patch_transformers(model.train()))
optimizer = amc.optim.FusedAdamW(model.parameters(), lr=5e-3)

documents = [line for line in open(__file__, "rb") if line.strip()]  # a line is one, a byte is a token
ids = torch.tensor([list(b"".join(documents))])
cu_seqlens = torch.tensor([0, *map(len, documents)]).cumsum(0)
for step in range(20):
    loss = model(input_ids=ids, labels=ids, cu_seqlens=cu_seqlens).loss
    loss.backward()
    amc.optim.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1}: loss {loss.item():.3f}")
