"""comm_reduce_parts against float64 and the plain sum of its parts."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from automodel_c import _amcore
from automodel_c.reference import comm as reference
from tests.numerics import assert_as_good_as
from tests.strategies import LAYOUTS, shard_sizes, with_layout

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = pytest.mark.parametrize(
    ("dtype", "out_dtype"), [(F32, F32), (F32, BF16), (BF16, F32), (BF16, BF16)], ids=["f-f", "f-b", "b-f", "b-b"]
)


def in_rank_order(parts, scale, out_dtype):
    """What the contract says to the bit: float32 sums from rank 0 on, one scaling, one rounding."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return (total * float(np.float32(scale))).to(out_dtype)


@DTYPES
@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("n", [0, 1, 15, 255, 256, 257, 16_385])
def test_reduce_parts(isa, guarded, seed, dtype, out_dtype, ranks, n):
    parts = torch.randn(ranks, n).to(dtype)
    out = guarded(n, out_dtype)
    _amcore.comm_reduce_parts(out, parts, scale=1 / ranks)
    truth = reference.reduce_parts(parts, 1 / ranks)
    plain = (parts.float().sum(0) / ranks).to(out_dtype)
    assert_as_good_as(out, plain, truth, name=f"{ranks} parts of {n}")
    assert torch.equal(out, in_rank_order(parts, 1 / ranks, out_dtype))


@DTYPES
def test_reduce_parts_threads(isa, threads, guarded, seed, dtype, out_dtype):
    parts, out = torch.randn(5, 50_003).to(dtype), guarded(50_003, out_dtype)
    _amcore.comm_reduce_parts(out, parts, scale=0.3)
    assert torch.equal(out, in_rank_order(parts, 0.3, out_dtype))


@DTYPES
def test_reduce_parts_extremes(isa, guarded, dtype, out_dtype):
    """Infinities, NaN, subnormals, signed zeros, sums that round to even or overflow, each beside ordinary values."""
    odd = [float("inf"), float("-inf"), float("nan"), 1e-40, -1e-40, -0.0, 0.0, 3e38, 1 + 2**-8, 1 + 3 * 2**-8, 1.0]
    pairs = torch.tensor([[a, b] for a in odd for b in odd], dtype=F32).repeat(5, 1).T.contiguous().to(dtype)
    out = guarded(pairs.shape[1], out_dtype)
    _amcore.comm_reduce_parts(out, pairs, scale=1.0)
    want = in_rank_order(pairs, 1.0, out_dtype)
    assert torch.equal(out.isnan(), want.isnan())
    bits = torch.int32 if out_dtype == F32 else torch.int16
    assert torch.equal(out.view(bits)[~want.isnan()], want.view(bits)[~want.isnan()])


@DTYPES
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name in ("contiguous", "rows", "offset")])
def test_reduce_parts_layouts(isa, guarded, seed, dtype, out_dtype, layout):
    parts = with_layout(torch.randn(3, 517).to(dtype), layout)
    out = guarded(518, out_dtype)[1:]
    _amcore.comm_reduce_parts(out, parts, scale=2.0)
    assert torch.equal(out, in_rank_order(parts, 2.0, out_dtype))


def test_reduce_parts_of_one_row_over_and_over(isa, guarded, seed):
    row, out = torch.randn(300), guarded(300)
    _amcore.comm_reduce_parts(out, row.expand(4, 300), scale=1.0)
    assert torch.equal(out, in_rank_order([row] * 4, 1.0, F32))


def test_reduce_parts_takes_numpy(isa, rng):
    parts, out = rng.standard_normal((3, 40)).astype(np.float32), np.full(40, np.nan, np.float32)
    _amcore.comm_reduce_parts(out, parts, scale=1.0)
    assert np.array_equal(out, (parts[0] + parts[1]) + parts[2])


@given(st.data(), st.integers(1, 5), st.sampled_from([F32, BF16]))
def test_reduce_scatter_is_a_slice_of_the_all_reduce(data, ranks, dtype):
    """Shards of any sizes, empty on some ranks: each owner's slice has the bits that a whole reduction puts there."""
    sizes = data.draw(shard_sizes(ranks, 700))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    whole = torch.randn(ranks, sum(sizes), generator=generator).to(dtype)
    reduced = torch.empty(sum(sizes))
    _amcore.comm_reduce_parts(reduced, whole, scale=1 / ranks)
    for owned, part in zip(whole.split(sizes, dim=1), reduced.split(sizes), strict=True):
        out = torch.full_like(part, float("nan"))
        _amcore.comm_reduce_parts(out, owned, scale=1 / ranks)
        assert torch.equal(out, part)


def test_reference_reduce_scatter():
    buffers = [torch.arange(6.0) + 10 * r for r in range(3)]
    slices = [reference.reduce_scatter(buffers, rank, 0.5) for rank in range(3)]
    assert torch.equal(torch.cat(slices), sum(b.double() for b in buffers) * 0.5)


REFUSED = {
    "out-dtype": (lambda o, p: (o.double(), p, 1.0), TypeError, "out is float64"),
    "parts-dtype": (lambda o, p: (o, p.half(), 1.0), TypeError, "parts is float16"),
    "out-axes": (lambda o, p: (o[None], p, 1.0), ValueError, "out has 2 axes"),
    "parts-axes": (lambda o, p: (o, p[0], 1.0), ValueError, "parts has 1 axes"),
    "no-rows": (lambda o, p: (o, p[:0], 1.0), ValueError, "parts has 0 rows"),
    "length": (lambda o, p: (o[:7], p, 1.0), ValueError, "a row of parts has 8 elements, out has 7"),
    "out-stride": (lambda o, p: (o[::2], p[:, :4], 1.0), ValueError, "out has stride 2"),
    "parts-stride": (lambda o, p: (o[:4], p[:, ::2], 1.0), ValueError, "last axis of parts has stride 2"),
    "scale-nan": (lambda o, p: (o, p, float("nan")), ValueError, "scale is nan"),
    "scale-large": (lambda o, p: (o, p, 1e39), ValueError, r"scale is 1e\+39"),
    "overlap": (lambda o, p: (p[1], p, 1.0), ValueError, "share memory"),
    "scale-kind": (lambda o, p: (o, p, "1"), TypeError, "scale"),
    "parts-kind": (lambda o, p: (o, None, 1.0), TypeError, "parts"),
}


@pytest.mark.parametrize(("call", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_reduce_parts_refuses(call, error, words):
    out, parts = torch.full((8,), 7.0), torch.ones(2, 8)
    o, p, scale = call(out, parts)
    with pytest.raises(error, match=words):
        _amcore.comm_reduce_parts(o, p, scale=scale)
    assert torch.equal(out, torch.full((8,), 7.0)) and torch.equal(parts, torch.ones(2, 8))


@pytest.mark.parametrize(("call", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_sum_refuses(call, error, words):
    """As comm_reduce_parts, whose parts are called sent here; before it looks for its communicator."""
    o, p, scale = call(torch.full((8,), 7.0), torch.ones(2, 8))
    with pytest.raises(error, match=words.replace("parts", "sent")):
        _amcore.comm_sum(o, p, comm=1, scale=scale)


def test_windows_refuse():
    with pytest.raises(NotImplementedError, match="comm_sum: windows are on CUDA, sent is on the CPU"):
        _amcore.comm_sum(torch.zeros(4), torch.zeros(2, 4), comm=1, scale=1.0)
    for chunk in (0, -4096, 4097, 1 << 40):
        with pytest.raises(ValueError, match=f"comm_window: chunk is {chunk}, a multiple of 4096"):
            _amcore.comm_window(1, chunk=chunk)
    with pytest.raises(ValueError, match="comm_attach: handles has 191 letters, each rank's has 192"):
        _amcore.comm_attach(1, handles="a" * 191)


@pytest.mark.cuda
def test_reduce_parts_on_cuda():
    with pytest.raises(NotImplementedError, match="CPU kernel only"):
        _amcore.comm_reduce_parts(torch.empty(8, device="cuda"), torch.ones(2, 8, device="cuda"), scale=1.0)
