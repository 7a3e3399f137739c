"""Fixtures of the CUDA tests."""

import pytest
import torch

from automodel_c.ops import _alloc


@pytest.fixture
def plain_memory(monkeypatch):
    """torch's allocator: looking after canaries waits for the device."""
    monkeypatch.setattr(_alloc, "empty", lambda shape, dtype, device: torch.empty(shape, dtype=dtype, device=device))
    monkeypatch.setattr(_alloc, "workspace", lambda n, device: torch.empty(n, dtype=torch.uint8, device=device))
