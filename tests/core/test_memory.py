"""Out of memory is a MemoryError that says for what, and torch's own as well."""

import pytest
import torch

from automodel_c.ops._alloc import empty, workspace  # before the tests' guard takes their place

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: empty((2**20, 2**20), torch.float32, CPU), r"cpu for \[1048576, 1048576\] of float32, 4,096.0 GiB"),
        (lambda: workspace(2**45, CPU), r"cpu for \[35184372088832\] of uint8, 32,768.0 GiB"),
    ],
)  # fmt: skip
def test_out_of_memory(call, message):
    for kind in (MemoryError, torch.OutOfMemoryError):
        with pytest.raises(kind, match=f"no memory on {message}") as caught:
            call()
        assert isinstance(caught.value.__cause__, RuntimeError)


def test_other_failures_stay():
    with pytest.raises(RuntimeError, match="negative dimension") as caught:
        empty((-1,), torch.float32, CPU)
    assert not isinstance(caught.value, MemoryError)
