"""Other people's code that does the same, at its best setting. A missing peer is a line with its reason."""

import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass


def always():
    return None


@dataclass(frozen=True)
class Peer:
    """`available()` is None, or why the peer is missing; `make(inputs)` gives the callable that is timed."""

    name: str
    version: str
    make: Callable
    available: Callable[[], str | None] = always


def version_of(package):
    """The installed version of a distribution, or '' without it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def needs_module(module):
    """An `available` that asks for an importable module."""
    return lambda: None if importlib.util.find_spec(module) else f"{module} is not installed"


def needs_cuda():
    import torch

    return None if torch.cuda.is_available() else "no CUDA device is visible"
