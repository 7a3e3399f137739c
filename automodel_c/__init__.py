"""automodel_c: fine-tune Qwen3.5 vision-language models."""
