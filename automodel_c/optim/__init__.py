"""Optimizer and gradient clipping for any list of parameters, tensors without elements and DTensors included."""

from automodel_c.optim.clip import clip_grad_norm_
from automodel_c.optim.fused_adamw import FusedAdamW

__all__ = ["FusedAdamW", "clip_grad_norm_"]
