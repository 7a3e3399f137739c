"""Qwen3.5 vision-language models, dense and with experts, on packs: activations are [T, H], without a batch axis.

    model = automodel_c.models.qwen3_5.load(directory)
    loss, metrics = model(batch)

Needs torch and safetensors; configurations and checkpoints are transformers' without its code.
"""

from .checkpoint import Files
from .config import CONFIGS, Config, read_config
from .model import Qwen3_5, load, materialise, whole_on_meta

__all__ = ["CONFIGS", "Config", "Files", "Qwen3_5", "load", "materialise", "read_config", "whole_on_meta"]
