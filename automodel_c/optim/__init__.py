"""Optimizer and gradient clipping for any list of parameters, tensors without elements and DTensors included."""

from automodel_c.optim.fused_adamw import FusedAdamW

__all__ = ["FusedAdamW"]
