"""Fine-tune Qwen3.5 vision-language models on long, packed, multimodal sequences.

`frame_partition`, `docs_from_ids` and `Pack` need NumPy alone; `ops`, `optim`, `parallel`, `models` and
`patch_transformers` need torch and are imported at first use.
"""

import importlib

from automodel_c._amcore import build_info
from automodel_c.diagnosis import doctor
from automodel_c.partition import Pack, docs_from_ids, frame_partition

__all__ = ["Pack", "build_info", "docs_from_ids", "doctor", "frame_partition"]

__version__ = build_info()["version"]

_TORCH_MODULES = ("ops", "optim", "parallel", "models")
_TORCH_NAMES = {"patch_transformers": "automodel_c.models.patch"}


def __getattr__(name):
    if name in _TORCH_MODULES:
        return importlib.import_module(f"automodel_c.{name}")
    if name in _TORCH_NAMES:
        return getattr(importlib.import_module(_TORCH_NAMES[name]), name)
    raise AttributeError(f"module 'automodel_c' has no attribute {name!r}")


def __dir__():
    return sorted([*__all__, *_TORCH_MODULES, *_TORCH_NAMES])
