"""The operators: one file each, one public function, differentiable."""

from automodel_c.ops.attention import attention

__all__ = ["attention"]
