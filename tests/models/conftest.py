"""Whole models allocate by the thousand: the operators' own tests hand them guarded memory."""

import pytest

from tests.ranks import rank_pools, ranks  # noqa: F401


@pytest.fixture(autouse=True)
def _poisoned_operators():
    """Instead of the guard of tests/conftest.py, which looks at all earlier allocations at each."""
