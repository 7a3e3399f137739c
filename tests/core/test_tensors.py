"""Tensors of torch and arrays of NumPy at the door: every kind that exists, and those that are refused."""

import sys

import numpy as np
import pytest
import torch

from automodel_c import _amcore

read = _amcore.index_array


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    "view",
    [lambda x: x, lambda x: x[1:], lambda x: x[::2], lambda x: x[:0], lambda x: x[2:3], lambda x: x[:1].expand(6)],
    ids=["all", "offset", "strided", "empty", "one", "expanded"],
)
def test_torch_views(dtype, view):
    x = view(torch.arange(10, dtype=dtype))
    assert read(x).tolist() == x.tolist()


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.intc, np.longlong], ids=lambda d: d.__name__)
@pytest.mark.parametrize(
    "view",
    [lambda x: x, lambda x: x[1:], lambda x: x[::2], lambda x: x[:0], lambda x: x[2:3], lambda x: x[5:5:-1]],
    ids=["all", "offset", "strided", "empty", "one", "empty-backwards"],
)
def test_numpy_views(dtype, view):
    x = view(np.arange(10, dtype=dtype))
    assert read(x).tolist() == x.tolist()


def test_numpy_read_only_is_read():
    x = np.arange(3)
    x.flags.writeable = False
    assert read(x).tolist() == [0, 1, 2]
    assert read(np.broadcast_to(np.int64(4), (3,))).tolist() == [4, 4, 4]


def unaligned():
    return np.zeros(17, np.uint8)[1:].view(np.int64)


@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        (np.arange(4)[::-1], ValueError, r"'index' has the stride -8 bytes on axis 0: negative or not a multiple of 8"),
        (unaligned(), ValueError, "'index' is not aligned to its 8-byte elements"),
        (np.zeros(3, np.dtype("i8,i1"))["f0"], ValueError, "stride 9 bytes on axis 0"),
        (np.arange(3).astype(">i8"), TypeError, r"NumPy dtype that is not known here \(dtype\('>i8'\)\)"),
        (np.arange(3, dtype=np.uint64), TypeError, "not known here"),
        (np.arange(3, dtype=np.int16), TypeError, "must be int32 or int64, not int16"),
        (np.zeros(3, np.complex64), TypeError, "not known here"),
        (np.array(["1"]), TypeError, "not known here"),
        (np.array([1, None]), TypeError, "not known here"),
        (np.zeros(3, "M8[s]"), TypeError, "not known here"),
        (np.zeros((1,) * 7, np.int64), ValueError, "has 7 axes, at most 6 are supported"),
        (np.array(3), ValueError, "must have one axis, not 0"),
        (np.int64(3), TypeError, "must be a tensor"),
        (torch.arange(4, dtype=torch.int16), TypeError, "must be int32 or int64, not int16"),
        (torch.ones(2, dtype=torch.bool), TypeError, "must be int32 or int64, not bool"),
        (torch.ones(2, dtype=torch.bfloat16), TypeError, "must be int32 or int64, not bfloat16"),
        (torch.ones(2, dtype=torch.complex64), TypeError, "dtype that is not known here"),
        (torch.ones(2, dtype=torch.uint16), TypeError, "dtype that is not known here"),
        (torch.ones(2, dtype=torch.float8_e4m3fn), TypeError, "dtype that is not known here"),
        (torch.nn.Parameter(torch.ones(2)), TypeError, "must be int32 or int64, not float32"),
        (torch.ones(2, requires_grad=True), TypeError, "must be int32 or int64, not float32"),
        (torch.tensor(3), ValueError, "must have one axis, not 0"),
        (torch.ones((1,) * 7, dtype=torch.int64), ValueError, "has 7 axes, at most 6 are supported"),
        (torch.arange(4, device="meta"), ValueError, r"'index' has no memory that can be read here \(a meta"),
    ],
    ids=lambda value: None,
)
def test_refuse(x, error, words):
    with pytest.raises(error, match=words):
        read(x)


def test_parameter_is_read():
    assert read(torch.nn.Parameter(torch.arange(3), requires_grad=False)).tolist() == [0, 1, 2]


def test_sparse_is_refused():
    sparse = torch.eye(3, dtype=torch.int64).to_sparse()
    with pytest.raises(ValueError, match="'index' has no memory that can be read here") as caught:
        read(sparse)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_fake_tensor_is_refused():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.arange(4)
    with pytest.raises(ValueError, match=r"'index' has (no memory|4 elements but no storage)"):
        read(fake)


def test_dtensor_is_refused_with_advice(tmp_path):
    from torch import distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", [0])
        x = distribute_tensor(torch.arange(4), mesh, [Shard(0)])
        with pytest.raises(ValueError, match=r"'index' has 4 elements but no storage of its own .*pass \.to_local\(\)"):
            read(x)
        assert read(x.to_local()).tolist() == [0, 1, 2, 3]
    finally:
        dist.destroy_process_group()


def test_storage_freed_is_refused():
    x = torch.arange(4)
    x.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="no storage of its own"):
        read(x)


def test_no_reference_to_tensors_is_kept():
    x, y = torch.arange(4), np.arange(4)
    before = sys.getrefcount(x), sys.getrefcount(y)
    for _ in range(50):
        read(x), read(y)
    assert (sys.getrefcount(x), sys.getrefcount(y)) == before
