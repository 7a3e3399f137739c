"""TRL's SFTTrainer on transformers' Qwen3.5, whose layers run on the operators; needs `pip install trl`.

TRL packs documents and tells them by restarting positions, which the patched layers keep apart on any device. Its loss
is its own: it calls the model below the head."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import automodel_c as amc

torch.manual_seed(0)
alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # a byte is a token
letters = Tokenizer(models.BPE({c: i for i, c in enumerate([*alphabet, "<end>"])}, []))
letters.pre_tokenizer, letters.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<end>", pad_token="<end>")

sizes = {"vocab_size": 257, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16}
heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_5_text", **sizes, **heads))
print(amc.patch_transformers(model))

lines = [line for line in open(__file__) if line.strip()]
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(
        output_dir="runs/trl_sft", max_steps=6, per_device_train_batch_size=2, learning_rate=5e-3, logging_steps=2,
        packing=True, max_length=512, gradient_checkpointing=True, report_to="none", save_strategy="no", bf16=False,
    ),
    train_dataset=Dataset.from_dict({"text": lines}),
    processing_class=tokenizer,
)  # fmt: skip
trainer.train()
print(f"{len(lines)} documents, {trainer.state.log_history[-1]['train_loss']:.3f} is the mean loss")
