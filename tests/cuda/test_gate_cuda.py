"""gdn_gate on CUDA against float64, by the error rule, and what must hold to the bit."""

import pytest
import torch

import automodel_c as amc
from tests.cuda import device
from tests.cuda.device import on_cuda, same_bits
from tests.numerics import draws_for
from tests.ops.test_gate import compare, inputs_of, run

pytestmark = pytest.mark.cuda

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])


def draw(*arguments, **options):
    return on_cuda(inputs_of(*arguments, **options))


def ones():
    return on_cuda([torch.ones(1)] * 2)


@DTYPES
@pytest.mark.parametrize(
    ("rows", "heads"),
    [(1, 1), (1, 16), (15, 64), (16, 5), (33, 64), (40, 1025), (40, 1028), (500, 16), (9, 4096), (20_000, 64)],
)
def test_gate(seed, rows, heads, dtype):
    compare(*(draw(rows, heads, dtype) for _ in range(draws_for(heads))))


@DTYPES
@pytest.mark.parametrize("scale", [1e-3, 10.0, 100.0])
def test_small_and_large_values(seed, scale, dtype):
    compare(draw(50, 64, dtype, scale))


@pytest.mark.parametrize("center", [-120.0, -88.0, -60.0, -17.0, -5.0, 0.0, 5.0, 19.9, 20.1, 60.0, 1e4, 1e30])
def test_each_magnitude_alone(seed, center):
    a, b, A_log, dt_bias = draw(40, 64)
    compare([a + center, b + center, A_log, torch.zeros_like(dt_bias)])


def test_extremes_are_finite():
    a = torch.tensor([[-3e38, -1e4, -105.0, -88.0, -0.0, 0.0, 88.0, 105.0, 1e4, 3e38]])
    inputs = on_cuda([a, a, torch.zeros(10), torch.zeros(10)])
    g, beta, *gradients = run(amc.ops.gdn_gate, inputs, ones())
    assert all(x.isfinite().all() for x in (g, beta, *gradients))
    assert (g <= 0).all() and (beta >= 0).all() and (beta <= 1).all()
    infinite = torch.tensor([[-torch.inf, torch.inf, torch.nan]])
    g, beta = amc.ops.gdn_gate(*on_cuda([infinite, infinite, torch.zeros(3), torch.zeros(3)]))
    assert g[0, :2].tolist() == [0.0, -torch.inf] and beta[0, :2].tolist() == [0.0, 1.0]
    assert g[0, 2].isnan() and beta[0, 2].isnan()


@pytest.mark.parametrize("heads", [7, 8])
def test_padding_that_holds_nan_changes_nothing(seed, heads):
    a, b, A_log, dt_bias = draw(50, heads)
    upstream = on_cuda([torch.randn(50, heads), torch.randn(50, heads)])
    dirty, real = [a.clone(), b.clone()], torch.ones_like(a[:, 0], dtype=torch.bool)
    real[[0, 7, 8, 49]] = False
    for x in upstream:
        x[~real] = 0.0
    for x in dirty:
        x[~real] = torch.nan
    expected = run(amc.ops.gdn_gate, [a, b, A_log, dt_bias], upstream)
    found = run(amc.ops.gdn_gate, [*dirty, A_log, dt_bias], upstream)
    for x, y in zip(expected[:4], found[:4], strict=True):
        assert torch.equal(x[real], y[real])
    assert (found[2][~real] == 0).all() and (found[3][~real] == 0).all()
    assert torch.equal(expected[4], found[4]) and torch.equal(expected[5], found[5])


@DTYPES
def test_slices_of_one_projection(seed, dtype):
    """On whole words and off them."""
    both, (A_log, dt_bias) = torch.randn(900, 19).to(dtype).cuda(), draw(1, 8)[2:]
    wide = torch.cat([both, torch.zeros_like(both[:, :1])], 1)
    for source, start in ((wide, 8), (both, 8), (wide, 9)):
        views = source[:, :8], source[:, start : start + 8]
        expected = run(amc.ops.gdn_gate, [*(x.contiguous() for x in views), A_log, dt_bias], ones())
        leaf = source.clone().requires_grad_()
        vectors = [x.clone().requires_grad_() for x in (A_log, dt_bias)]
        outputs = amc.ops.gdn_gate(leaf[:, :8], leaf[:, start : start + 8], *vectors)
        grads = torch.autograd.grad(outputs, [leaf, *vectors], [torch.ones_like(x) for x in outputs])
        found = [*outputs, grads[0][:, :8], grads[0][:, start : start + 8]]
        assert same_bits(expected[:4], found)
        if source is wide and start == 8:
            assert same_bits(expected[4:], grads[1:])
        else:
            torch.testing.assert_close(expected[4:], list(grads[1:]))


def test_two_dtypes(seed):
    a, b, A_log, dt_bias = draw(9, 4, BF16)
    expected = amc.ops.gdn_gate(a, b, A_log, dt_bias)
    g, beta = amc.ops.gdn_gate(a, b.float(), A_log, dt_bias)
    assert g.dtype == beta.dtype == F32 and torch.equal(g, expected[0]) and torch.equal(beta.bfloat16(), expected[1])
    compare([a, b.float(), A_log, dt_bias])
    compare([a.float(), b, A_log, dt_bias])


@DTYPES
@pytest.mark.parametrize(("rows", "heads"), [(32_768, 64), (4_001, 33), (70_000, 16)])
def test_repeats_to_the_bit(seed, rows, heads, dtype):
    inputs = draw(rows, heads, dtype)
    first = run(amc.ops.gdn_gate, inputs, ones())
    assert all(same_bits(first, run(amc.ops.gdn_gate, inputs, ones())) for _ in range(3))


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 5)], ids=str)
def test_empty(shape):
    g, beta, da, db, dA_log, ddt_bias = run(amc.ops.gdn_gate, draw(*shape), ones())
    assert g.numel() == beta.numel() == da.numel() == db.numel() == 0
    assert (dA_log == 0).all() and (ddt_bias == 0).all()


def test_beyond_two_to_the_31_elements(seed, plain_memory):
    rows, heads = 34_000_000, 64
    a, b = (torch.randn(rows, heads, dtype=BF16, device="cuda") for _ in range(2))
    vectors = draw(1, heads)[2:]
    leaves = [x.requires_grad_() for x in (a, b, *vectors)]
    outputs = amc.ops.gdn_gate(*leaves)
    da, db, *_ = torch.autograd.grad(outputs, leaves, [torch.ones_like(x) for x in outputs])
    for start in (0, 16_777_213, rows - 9):
        part = [x.detach()[start : start + 9] for x in (a, b)]
        alone = run(amc.ops.gdn_gate, [*part, *(x.detach() for x in vectors)], ones())
        assert same_bits([x.detach()[start : start + 9] for x in (*outputs, da, db)], alone[:4])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("heads", [64, 33])
def test_stream_waiting_and_capture(seed, heads, plain_memory):
    inputs, others = draw(500, heads, BF16), draw(500, heads, BF16)
    upstream = on_cuda([torch.randn(500, heads), torch.randn(500, heads)])
    call = lambda *x: run(amc.ops.gdn_gate, x, upstream)  # noqa: E731
    device.assert_goes_to_the_current_stream(call, inputs)
    device.assert_does_not_wait(call, inputs)
    device.assert_can_be_captured(call, inputs, others)


def test_other_devices_and_dtypes_are_refused():
    a, b, A_log, dt_bias = draw(2, 4)
    with pytest.raises(ValueError, match=r"^gdn_gate: b is on cpu"):
        amc.ops.gdn_gate(a, b.cpu(), A_log, dt_bias)
    for dtype in (torch.float16, torch.float64):
        with pytest.raises(TypeError, match="float32 or bfloat16 is needed"):
            amc.ops.gdn_gate(a.to(dtype), b, A_log, dt_bias)


def test_compile_and_second_derivative(seed):
    inputs = draw(6, 16)
    expected = run(amc.ops.gdn_gate, inputs, ones())
    assert same_bits(
        expected, run(torch.compile(amc.ops.gdn_gate, fullgraph=True, backend="aot_eager"), inputs, ones())
    )
    inputs = [x.requires_grad_() for x in inputs]
    first = torch.autograd.grad(amc.ops.gdn_gate(*inputs)[0].sum(), inputs[0], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="second derivative"):
        first.sum().backward()
