"""The norms on CUDA against float64, by the error rule, and what must hold to the bit."""

import pytest
import torch

import automodel_c as amc
from tests.cuda import device
from tests.cuda.device import on_cuda, same_bits
from tests.numerics import assert_as_good_as, draws_for
from tests.ops.test_norm import FUNCTIONS, compare, inputs_of, naive_gated, run

pytestmark = pytest.mark.cuda

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
NAMES = pytest.mark.parametrize("name", FUNCTIONS)
# the edges of what 16, 32, .. lanes hold of 8 or 4 elements a word, and rows that are no whole words
LENGTHS = [
    3, 8, 60, 64, 120, 128, 132, 136, 256, 260, 264, 512, 516, 520, 1023, 1024, 1028, 1152, 1536, 1544, 2048, 2056,
    3072, 3076, 3080, 5120, 6144, 6148, 9001,
]  # fmt: skip


def draw(name, shape, dtype):
    return on_cuda(inputs_of(name, shape, dtype))


@DTYPES
@pytest.mark.parametrize("length", LENGTHS)
@NAMES
def test_norm_error_rule(seed, name, length, dtype):
    compare(name, *(draw(name, (37, length), dtype) for _ in range(draws_for(37 * length))))


@DTYPES
@pytest.mark.parametrize("shape", [(1, 8), (65,), (2, 3, 64), (1, 3072), (3, 1, 1, 256)], ids=str)
@NAMES
def test_few_rows(seed, name, shape, dtype):
    compare(name, *(draw(name, shape, dtype) for _ in range(draws_for(torch.Size(shape).numel()))))


@DTYPES
@pytest.mark.parametrize("shape", [(2049, 40), (40_000, 128), (9_999, 256), (5_003, 1152), (3_001, 3072)], ids=str)
@NAMES
def test_many_rows(seed, name, shape, dtype):
    compare(name, draw(name, shape, dtype))


@DTYPES
@pytest.mark.parametrize("length", [48, 100, 3072])
@pytest.mark.parametrize("options", [{"eps": 0.5}, {"zero_centered": False}, {"eps": 0.0}], ids=str)
def test_rms_options(seed, options, length, dtype):
    for name in ("rms_norm", "residual"):
        compare(name, draw(name, (9, length), dtype), **options)


@pytest.mark.parametrize("length", [96, 99, 1152])
@NAMES
def test_large_offset_and_scale(seed, name, length):
    for scale, offset in ((1e-4, 0.0), (1e4, 0.0), (1.0, 100.0)):
        x, *rest = draw(name, (8, length), F32)
        compare(name, [x * scale + offset, *rest])


@pytest.mark.parametrize("length", [64, 128, 1152, 3072, 33])
@NAMES
def test_float32_weight_of_bfloat16_rows(seed, name, length):
    inputs = draw(name, (9, length), BF16)
    rows = FUNCTIONS[name][3]
    inputs = inputs[:rows] + [w.float() for w in inputs[rows:]]
    upstream = [torch.ones(9, length, device="cuda")] * 2
    outputs = run(FUNCTIONS[name][0], inputs, upstream)
    assert [x.dtype for x in outputs[-len(inputs) :]] == [x.dtype for x in inputs]
    narrow = run(FUNCTIONS[name][0], [x.bfloat16() for x in inputs], upstream)
    assert torch.equal(narrow[-1], outputs[-1].bfloat16())


def test_gated_rounds_where_transformers_rounds(seed):
    x, z, weight = draw("gated_rms_norm", (4096, 128), BF16)
    ours, plain = amc.ops.gated_rms_norm(x, z, weight), naive_gated(x, z, weight)
    assert (ours != plain).float().mean() < 0.01  # an ulp of the float32 mean may move a rounding


@pytest.mark.parametrize("length", [64, 65, 3072])
def test_residual_is_rounded_once(seed, length):
    x, other, weight = draw("residual", (9, length), BF16)
    y, total = amc.ops.rms_norm(x, weight, residual=other)
    assert torch.equal(total, x + other) and torch.equal(y, amc.ops.rms_norm(total, weight))


@pytest.mark.parametrize("length", [64, 65, 3072])
@pytest.mark.parametrize("used", [0, 1])
def test_residual_with_one_output_used(seed, used, length):
    inputs = [x.requires_grad_() for x in draw("residual", (9, length), F32)]
    result = FUNCTIONS["residual"][0](*inputs)[used]
    gradients = torch.autograd.grad(result.sum(), inputs, allow_unused=True)
    truth = [x.detach().double().requires_grad_() for x in inputs]
    wanted = torch.autograd.grad(FUNCTIONS["residual"][2](*truth)[used].sum(), truth, allow_unused=True)
    assert torch.equal(gradients[0], gradients[1]) and (gradients[2] is None) == (used == 1)
    torch.testing.assert_close(gradients[0].double(), wanted[0], rtol=1e-4, atol=1e-5)


@DTYPES
@pytest.mark.parametrize("length", [128, 256, 1152, 3072])
@NAMES
def test_strided_rows(seed, name, length, dtype):
    """Slices on whole words are the same rows to the bit; slices off them take other kernels."""
    ours, plain, oracle, rows, _ = FUNCTIONS[name]
    inputs = draw(name, (10, 6, length), dtype)
    vectors = inputs[rows:]
    whole = ours(*inputs)
    whole = whole if isinstance(whole, tuple) else (whole,)
    for start, wide in ((64, length + 128), (0, length + 8), (1, length + 2)):
        views = []
        for x in inputs[:rows]:
            buffer = torch.full((10, 7, wide), torch.nan, dtype=dtype, device="cuda")
            views.append(buffer[:, 1:, start : start + length].copy_(x))
        made = ours(*views, *vectors)
        made = made if isinstance(made, tuple) else (made,)
        if start != 1:
            assert same_bits(whole, made)
            continue
        truth, naive = oracle(*(x.double() for x in inputs)), plain(*inputs)
        for a, b, c in zip(made, *(x if isinstance(x, tuple) else (x,) for x in (naive, truth)), strict=True):
            assert_as_good_as(a, b, c, name=f"{name} off the words")


@pytest.mark.parametrize("length", [8, 256, 3072])
@NAMES
def test_strided_and_expanded_gradients(seed, name, length):
    ours = FUNCTIONS[name][0]
    inputs = draw(name, (6, length), F32)
    ones = torch.ones(6, length, device="cuda")
    expected = run(ours, inputs, [ones] * 2)
    spread = torch.ones(6, 2 * length, device="cuda")[:, ::2]
    for upstream in (ones[:1, :1].expand(6, length), ones.T.contiguous().T, spread):
        assert same_bits(expected, run(ours, inputs, [upstream] * 2))


@DTYPES
@pytest.mark.parametrize("shape", [(2_000, 3072), (30_000, 128), (4_001, 99)], ids=str)
@NAMES
def test_repeats_to_the_bit(seed, name, shape, dtype):
    inputs = draw(name, shape, dtype)
    upstream = [torch.randn(shape, device="cuda").to(dtype)] * 2
    first = run(FUNCTIONS[name][0], inputs, upstream)
    assert all(same_bits(first, run(FUNCTIONS[name][0], inputs, upstream)) for _ in range(3))


@pytest.mark.parametrize("length", [129, 128, 3072])
@NAMES
def test_a_row_is_the_same_in_any_batch_and_beside_nan(seed, name, length):
    ours, _, _, rows, _ = FUNCTIONS[name]
    inputs = draw(name, (37, length), F32)
    whole = ours(*inputs)
    for x in inputs[:rows]:
        x[20:].fill_(torch.nan)
    for part in (ours(*inputs), ours(*(x[5:9] for x in inputs[:rows]), *inputs[rows:])):
        for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (whole, part)), strict=True):
            assert torch.equal(a[5:9], b[5:9] if len(b) > 4 else b)


@NAMES
def test_empty(name):
    for shape in ((0, 8), (3, 0, 3072), (0, 9)):
        upstream = [torch.zeros(shape, device="cuda")] * 2
        results = run(FUNCTIONS[name][0], draw(name, shape, F32), upstream)
        assert all((x == 0).all() for x in results)


@NAMES
def test_frozen_vectors(seed, name):
    ours, _, _, rows, _ = FUNCTIONS[name]
    inputs = draw(name, (200, 128), F32)
    upstream = [torch.ones(200, 128, device="cuda")] * 2
    expected = run(ours, inputs, upstream)
    found = run(lambda *x: ours(*x, *inputs[rows:]), inputs[:rows], upstream)
    assert same_bits(expected[: len(found)], found)


@pytest.mark.parametrize("shape", [(70_000, 1024), (2_200_000, 128), (200_000, 33)], ids=str)
@NAMES
def test_more_rows_than_a_grid_axis(seed, name, shape):
    ours, _, _, rows, _ = FUNCTIONS[name]
    inputs = draw(name, shape, BF16)
    whole = ours(*inputs)
    for start in (0, 65_534, shape[0] - 7):
        part = ours(*(x[start : start + 7] for x in inputs[:rows]), *inputs[rows:])
        for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (whole, part)), strict=True):
            assert torch.equal(a[start : start + 7], b)


@NAMES
def test_beyond_two_to_the_31_elements(seed, name, plain_memory):
    ours, _, _, rows, vectors = FUNCTIONS[name]
    shape = (720_000, 3072)
    inputs = [torch.randn(shape, dtype=BF16, device="cuda") for _ in range(rows)]
    inputs += [torch.randn(shape[1:], dtype=BF16, device="cuda") for _ in range(vectors)]
    leaves = [x.requires_grad_() for x in inputs]
    outputs = ours(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    gradients = torch.autograd.grad(outputs, leaves, [torch.ones_like(y) for y in outputs])
    for start in (0, 699_048, shape[0] - 9):
        part = [x.detach()[start : start + 9] for x in inputs[:rows]] + [x.detach() for x in inputs[rows:]]
        alone = run(ours, part, [torch.ones(9, 3072, device="cuda")] * 2)
        found = [x[start : start + 9] for x in (*outputs, *gradients[:rows])]
        assert same_bits(found, alone[: len(found)])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("length", [128, 3072, 99])
@NAMES
def test_stream_waiting_and_capture(seed, name, length, plain_memory):
    inputs, others = draw(name, (500, length), BF16), draw(name, (500, length), BF16)
    upstream = [torch.randn(500, length, device="cuda", dtype=BF16)] * 2
    call = lambda *x: run(FUNCTIONS[name][0], x, upstream)  # noqa: E731
    device.assert_goes_to_the_current_stream(call, inputs)
    device.assert_does_not_wait(call, inputs)
    device.assert_can_be_captured(call, inputs, others)


@NAMES
def test_other_devices_are_refused(name):
    inputs = draw(name, (3, 8), F32)
    for i in range(1, len(inputs)):
        with pytest.raises(ValueError, match="on cpu"):
            FUNCTIONS[name][0](*(x.cpu() if i == j else x for j, x in enumerate(inputs)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(TypeError, match="float32 or bfloat16 is needed"):
        amc.ops.rms_norm(torch.zeros(2, 4, dtype=dtype, device="cuda"), torch.zeros(4, device="cuda"))


@NAMES
def test_compile_and_second_derivative(seed, name):
    ours = FUNCTIONS[name][0]
    inputs, upstream = draw(name, (6, 16), F32), [torch.randn(6, 16, device="cuda")] * 2
    expected = run(ours, inputs, upstream)
    compiled = run(torch.compile(ours, fullgraph=True, backend="aot_eager"), inputs, upstream)
    assert same_bits(expected, compiled)
    inputs = [x.requires_grad_() for x in inputs]
    outputs = ours(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    first = torch.autograd.grad(sum(y.sum() for y in outputs), inputs[0], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="second derivative"):
        first.sum().backward()
