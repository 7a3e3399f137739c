"""The test ground itself: guards catch, layouts are what they say, strategies stay in their bounds."""

import math

import pytest
import torch
from hypothesis import given

from automodel_c import _amcore
from automodel_c.ops import _alloc
from tests import strategies as sts
from tests.guards import Guards


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool], ids=str)
def test_guarded_is_poisoned_and_aligned(guarded, dtype):
    out = guarded((3, 5), dtype)
    assert out.shape == (3, 5) and out.dtype == dtype and out.is_contiguous() and out.data_ptr() % 64 == 0
    if dtype.is_floating_point:
        assert out.isnan().all()
    elif dtype == torch.int32:
        assert (out == 0x7F7F7F7F).all()


@pytest.mark.parametrize("at", [-1, 15], ids=["before", "after"])
def test_guards_catch_a_stray_write(at):
    guards = Guards()
    out = guards((15,), torch.float32)
    guards.check()
    out.as_strided((1,), (1,), out.storage_offset() + at).fill_(0)
    with pytest.raises(AssertionError, match="before" if at < 0 else "after"):
        guards.check()
    assert out.isnan().all()


def test_operators_allocate_poisoned():
    assert math.isnan(_alloc.empty((1,), torch.float32, "cpu").item())
    assert _alloc.workspace(7, "cpu").tolist() == [0x7F] * 7
    assert _alloc.empty((0, 4), torch.bfloat16, "cpu").shape == (0, 4)


@pytest.mark.parametrize("layout", sts.LAYOUTS)
@pytest.mark.parametrize("shape", [(), (4,), (3, 4), (2, 1, 5)], ids=str)
def test_with_layout_keeps_values(layout, shape):
    x = torch.randn(shape)
    y = sts.with_layout(x, layout)
    if layout == "empty":
        assert y.numel() == 0
    else:
        assert torch.equal(y.reshape(shape), x) and y.data_ptr() != x.data_ptr()
    if layout == "offset":
        assert y.data_ptr() % 8 == 4
    if layout == "strided" and shape:
        assert y.stride(-1) == 2


def test_isa_fixture(isa):
    assert _amcore.build_info()["isa"] == isa


def test_threads_fixture(threads):
    assert _amcore.build_info()["num_threads"] == threads


@given(sts.packed_docs(100), sts.doc_ids(100), sts.shard_sizes(3), sts.tensors((2, 3)))
def test_strategies_stay_in_bounds(docs, ids, sizes, x):
    assert docs.cu_seqlens[0] == 0 and docs.cu_seqlens == sorted(docs.cu_seqlens)
    assert sum(docs.lengths) <= docs.tokens <= 100
    assert len(ids) <= 100 and len(sizes) == 3 and min(sizes) >= 0 and x.dtype == torch.float32
