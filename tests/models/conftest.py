"""Whole models allocate by the thousand: the operators' own tests hand them guarded memory."""

import pytest


@pytest.fixture(autouse=True)
def _poisoned_operators():
    """Instead of the guard of tests/conftest.py, which looks at all earlier allocations at each."""
