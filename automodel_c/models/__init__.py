"""Models that the recipes train."""

from automodel_c.models import qwen3_5

__all__ = ["qwen3_5"]
