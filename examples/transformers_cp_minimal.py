"""Two ranks share every batch of transformers' own Qwen3.5, under FSDP2: torchrun --nproc-per-node 2, then this file.

Each passes the whole batch and holds half of its tokens, whichever document the cut falls into."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

import automodel_c as amc

dist.init_process_group("gloo")
torch.manual_seed(0)  # the same weights on both
sizes = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16}
heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_5_text", **sizes, **heads)).train()

mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
report = amc.patch_transformers(model, cp=amc.parallel.ContextParallel(mesh.get_group()))
model.gradient_checkpointing_enable(
    {"use_reentrant": False, "context_fn": amc.parallel.checkpoint_context_fn}  # rows that came in are kept
)
for layer in (*model.model.layers, model):
    fully_shard(layer, mesh=mesh)
amc.parallel.sum_gradients(model)  # they are parts, as the losses are
optimizer = amc.optim.FusedAdamW(model.parameters(), lr=5e-3)

documents = [line for line in open(__file__, "rb") if line.strip()]  # a line is one, a byte is a token
ids = torch.tensor([list(b"".join(documents))])
cu_seqlens = torch.tensor([0, *map(len, documents)]).cumsum(0)
with amc.parallel.faults.guard():  # a rank that fails makes the other raise
    for step in range(10):
        loss = model(input_ids=ids, labels=ids, cu_seqlens=cu_seqlens).loss
        loss.backward()
        amc.optim.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {whole.item():.3f}, of which {loss.item():.3f} here")
dist.destroy_process_group()
