"""The elementwise gates on CUDA against float64, by the error rule, and what must hold to the bit."""

import math

import pytest
import torch

import automodel_c as amc
from tests.cuda import device
from tests.cuda.device import on_cuda, same_bits
from tests.numerics import assert_as_good_as, draws_for
from tests.ops.test_mlp import FUNCTIONS, compare, inputs_of, run

pytestmark = pytest.mark.cuda

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
NAMES = pytest.mark.parametrize("name", FUNCTIONS)
ONE = torch.ones(1)


def draw(name, shape, dtype=F32, scale=1.0):
    return on_cuda(inputs_of(name, shape, dtype, scale))


def ones():
    return ONE.cuda()


@DTYPES
@pytest.mark.parametrize(
    "shape",
    [(2,), (1, 2), (3, 62), (2, 5, 64), (5, 130), (3, 2048), (2, 2050), (7, 16), (1, 4096), (1_000, 2048), (4_097, 48)],
    ids=str,
)
@NAMES
def test_gate_error_rule(seed, name, shape, dtype):
    compare(name, *(draw(name, shape, dtype) for _ in range(draws_for(math.prod(shape)))))


@DTYPES
@NAMES
@pytest.mark.parametrize("scale", [1e-3, 10.0, 100.0])
def test_small_and_large_values(seed, name, scale, dtype):
    for last in (500, 512):
        compare(name, draw(name, (4, last), dtype, scale))


@DTYPES
@NAMES
def test_extremes(name, dtype):
    row = [-3e18, -1e4, -105.0, -88.0, -0.0, 0.0, 88.0, 105.0, 1e4, 3e18, 1.0, -1.0, 5.0, -5.0, 20.0, -20.0]
    x = torch.tensor([row], device="cuda").to(dtype)
    for values in run(FUNCTIONS[name][0], [x] * FUNCTIONS[name][3], ones()):
        assert values.isfinite().all() or name in ("swiglu", "swiglu-two", "sigmoid_gate")
        assert not values.isnan().any()
    nan = torch.full((2, 16), math.nan, dtype=dtype, device="cuda")
    assert all(values.isnan().all() for values in run(FUNCTIONS[name][0], [nan] * FUNCTIONS[name][3], ones()))


@NAMES
def test_every_bfloat16(name):
    """Each value of the dtype, the second input at 1."""
    ours, plain, oracle, count = FUNCTIONS[name]
    x = torch.arange(1 << 16).to(torch.int16).view(BF16).cuda()
    x = x[x.isfinite() & (x.abs() < 1e4)]
    x = x[: x.numel() // 16 * 16].view(-1, 16)
    inputs = [x] if count == 1 else [x, torch.ones_like(x)]
    for scale in (1.0, 10.0, 1e4):
        near = inputs[0].abs().amax(-1) < scale
        a, b, c = (f(*(y[near].to(d) for y in inputs)) for f, d in ((ours, BF16), (plain, BF16), (oracle, F32)))
        assert_as_good_as(a, b, c, name=f"{name} below {scale}")


@DTYPES
@NAMES
def test_strided_rows(seed, name, dtype):
    """Slices on whole words are the same to the bit; others go one element at a time, by the rule."""
    ours, plain, oracle, _ = FUNCTIONS[name]
    inputs = draw(name, (9, 5, 96), dtype)
    whole = ours(*inputs)
    for start, wide in ((32, 160), (1, 98)):
        views = []
        for x in inputs:
            buffer = torch.full((9, 6, wide), math.nan, dtype=dtype, device="cuda")
            views.append(buffer[:, 1:, start : start + 96].copy_(x))
        made = ours(*views)
        if start == 32:
            assert torch.equal(whole, made)
        else:
            assert_as_good_as(made, plain(*inputs), oracle(*inputs), name=name)


def test_gate_of_an_attention_output(seed):
    """x [T, H, D] beside the second halves of [T, H, 2 D]."""
    x, joint = torch.randn(33, 4, 64, device="cuda"), torch.randn(33, 4, 128, device="cuda")
    assert torch.equal(
        amc.ops.sigmoid_gate(x, joint.chunk(2, -1)[1]), amc.ops.sigmoid_gate(x, joint[..., 64:].contiguous())
    )


@pytest.mark.parametrize("last", [40, 64, 2048])
def test_swiglu_forms_agree(seed, last):
    gate_up = torch.randn(7, last, device="cuda")
    joined = run(amc.ops.swiglu, [gate_up], ones())
    apart = run(amc.ops.swiglu, gate_up.chunk(2, dim=-1), ones())
    assert torch.equal(joined[0], apart[0]) and torch.equal(joined[1], torch.cat(apart[1:], -1))


@NAMES
def test_strided_gradients_and_empty(seed, name):
    ours, _, _, count = FUNCTIONS[name]
    inputs = draw(name, (6, 64))
    y = ours(*inputs)
    dense = torch.ones(y.shape, device="cuda")
    expected = run(ours, inputs, dense)
    spread = torch.ones(6, 128, device="cuda")[:, ::2][:, : y.shape[1]]
    for upstream in (ones(), dense.T.contiguous().T, spread):
        assert same_bits(expected, run(ours, inputs, upstream))
    for shape in ((0, 8), (3, 0)):
        assert all(x.numel() == 0 for x in run(ours, [torch.zeros(shape, device="cuda")] * count, ones()))


@DTYPES
@NAMES
def test_repeats_to_the_bit(seed, name, dtype):
    inputs = draw(name, (3_000, 1_000), dtype)
    first = run(FUNCTIONS[name][0], inputs, ones())
    assert all(same_bits(first, run(FUNCTIONS[name][0], inputs, ones())) for _ in range(3))


@pytest.mark.parametrize("shape", [(70_000, 2048), (3_000_000, 34)], ids=str)
@NAMES
def test_more_blocks_than_a_grid_axis(seed, name, shape):
    ours, inputs = FUNCTIONS[name][0], draw(name, shape, BF16)
    whole = ours(*inputs)
    for start in (0, 65_534, shape[0] - 7):
        assert torch.equal(whole[start : start + 7], ours(*(x[start : start + 7] for x in inputs)))


@pytest.mark.parametrize("last", [2048, 2046])
@NAMES
def test_beyond_two_to_the_31_elements(seed, name, last, plain_memory):
    """On whole words, and one element at a time in several launches."""
    ours, _, _, count = FUNCTIONS[name]
    inputs = [torch.randn(1_100_000, last, dtype=BF16, device="cuda").requires_grad_() for _ in range(count)]
    y = ours(*inputs)
    gradients = torch.autograd.grad(y, inputs, torch.ones_like(y))
    for start in (0, 524_280, 1_048_570, 1_100_000 - 9):
        alone = run(ours, [x.detach()[start : start + 9] for x in inputs], ones())
        assert same_bits([x.detach()[start : start + 9] for x in (y, *gradients)], alone)


def test_a_row_longer_than_a_launch(plain_memory):
    x = torch.randn((1 << 30) + 1001, dtype=BF16, device="cuda")
    y = amc.ops.gelu(x)
    for start in (0, (1 << 30) - 999, x.numel() - 999):
        assert torch.equal(y[start : start + 999], amc.ops.gelu(x[start : start + 999].clone()))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("last", [2048, 66])
@NAMES
def test_stream_waiting_and_capture(seed, name, last, plain_memory):
    inputs, others = draw(name, (300, last), BF16), draw(name, (300, last), BF16)
    upstream = torch.ones_like(FUNCTIONS[name][0](*inputs))
    call = lambda *x: run(FUNCTIONS[name][0], x, upstream)  # noqa: E731
    device.assert_goes_to_the_current_stream(call, inputs)
    device.assert_does_not_wait(call, inputs)
    device.assert_can_be_captured(call, inputs, others)


def test_other_devices_and_dtypes_are_refused():
    x = torch.zeros(2, 4, device="cuda")
    with pytest.raises(ValueError, match=r"^swiglu: up is on cpu"):
        amc.ops.swiglu(x, x.cpu())
    with pytest.raises(ValueError, match=r"^sigmoid_gate: gate is on cpu"):
        amc.ops.sigmoid_gate(x, x.cpu())
    for dtype in (torch.float16, torch.float64):
        with pytest.raises(TypeError, match="float32 or bfloat16 is needed"):
            amc.ops.gelu(x.to(dtype))


@NAMES
def test_compile_and_second_derivative(seed, name):
    ours, inputs = FUNCTIONS[name][0], draw(name, (6, 16))
    compiled = run(torch.compile(ours, fullgraph=True, backend="aot_eager"), inputs, ones())
    assert same_bits(run(ours, inputs, ones()), compiled)
    inputs = [x.requires_grad_() for x in inputs]
    first = torch.autograd.grad(ours(*inputs).sum(), inputs[0], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="second derivative"):
        first.sum().backward()
