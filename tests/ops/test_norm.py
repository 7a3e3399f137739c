"""rms_norm, gated_rms_norm and layer_norm against float64, and what their callers rely on."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import automodel_c as amc
from automodel_c import _amcore
from automodel_c.reference import norm as reference
from tests.numerics import assert_as_good_as, draws_for, pool
from tests.strategies import LAYOUTS, tensors

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
SHAPES = pytest.mark.parametrize("shape", [(1, 2), (65,), (2, 3, 64), (5, 1023), (17, 1024), (2, 1025)], ids=str)


def naive_rms(x, weight, *, eps=1e-6, zero_centered=True):
    """transformers' eager code."""
    y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return (y * (weight.float() + float(zero_centered))).to(x.dtype)


def naive_residual(x, residual, weight, **options):
    return naive_rms(x + residual, weight, **options), x + residual


def naive_gated(x, z, weight, *, eps=1e-6):
    y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return (weight * y.to(x.dtype) * F.silu(z.float())).to(x.dtype)


def naive_layer(x, weight, bias, *, eps=1e-6):
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def residual(x, residual, weight, **options):
    return amc.ops.rms_norm(x, weight, residual=residual, **options)


def reference_residual(x, residual, weight, **options):
    return reference.rms_norm(x, weight, residual=residual, **options)


# name: ours, plain, oracle, count of inputs like x, count of vectors
FUNCTIONS = {
    "rms_norm": (amc.ops.rms_norm, naive_rms, reference.rms_norm, 1, 1),
    "residual": (residual, naive_residual, reference_residual, 2, 1),
    "gated_rms_norm": (amc.ops.gated_rms_norm, naive_gated, reference.gated_rms_norm, 2, 1),
    "layer_norm": (amc.ops.layer_norm, naive_layer, reference.layer_norm, 1, 2),
}
NAMES = pytest.mark.parametrize("name", FUNCTIONS)


def inputs_of(name, shape, dtype):
    _, _, _, rows, vectors = FUNCTIONS[name]
    return [torch.randn(shape).to(dtype) for _ in range(rows)] + [
        torch.randn(shape[-1:]).to(dtype) for _ in range(vectors)
    ]


def run(function, inputs, upstream, **options):
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = function(*inputs, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    upstream = [g.to(y.dtype) for g, y in zip(upstream, outputs, strict=False)]
    return [y.detach() for y in outputs] + list(torch.autograd.grad(outputs, inputs, upstream))


def results_of(name, inputs, options):
    """Outputs and gradients of ours, of the plain formula, and of the oracle."""
    ours, plain, oracle, *_ = FUNCTIONS[name]
    upstream = [torch.randn_like(inputs[0]) for _ in range(2)]
    doubles = [x.double() for x in inputs]
    return [run(f, x, upstream, **options) for f, x in ((ours, inputs), (plain, inputs), (oracle, doubles))]


def compare(name, *draws, **options):
    """The error rule over one or more draws of inputs."""
    results = [results_of(name, inputs, options) for inputs in draws]
    ours, plain, truth = (pool(part) for part in zip(*results, strict=True))
    for part, (a, b, c) in enumerate(zip(ours, plain, truth, strict=True)):
        assert_as_good_as(a, b, c, name=f"{name}[{part}]")


@DTYPES
@SHAPES
@NAMES
def test_norm(isa, seed, name, shape, dtype):
    compare(name, *(inputs_of(name, shape, dtype) for _ in range(draws_for(math.prod(shape)))))


@NAMES
def test_one_column(isa, seed, name):
    """The gradient of x is a difference of equals there, all rounding: the error rule has nothing to compare. All of
    one sign: of a residual that cancels x, rounding is what is left."""
    inputs = [x.abs() for x in inputs_of(name, (5, 1), torch.float32)]
    y, *rest = run(FUNCTIONS[name][0], inputs, [torch.ones(5, 1), torch.zeros(5, 1)])
    assert all(x.isfinite().all() for x in rest)
    truth = FUNCTIONS[name][2](*(x.double() for x in inputs))
    torch.testing.assert_close(y.double(), truth[0] if isinstance(truth, tuple) else truth)


@NAMES
@pytest.mark.parametrize("rows", [15, 16, 32, 2049])
def test_many_rows(seed, name, rows):
    compare(name, inputs_of(name, (rows, 40), torch.float32))


@DTYPES
@pytest.mark.parametrize("options", [{"eps": 0.5}, {"zero_centered": False}, {"eps": 0.0}], ids=str)
def test_rms_options(seed, options, dtype):
    compare("rms_norm", inputs_of("rms_norm", (9, 48), dtype), **options)
    compare("residual", inputs_of("residual", (9, 48), dtype), **options)


@NAMES
def test_large_offset_and_scale(isa, seed, name):
    for scale, offset in ((1e-4, 0.0), (1e4, 0.0), (1.0, 100.0)):
        x, *rest = inputs_of(name, (8, 96), torch.float32)
        compare(name, [x * scale + offset, *rest])


@NAMES
def test_float32_weight_of_bfloat16_rows(seed, name):
    inputs = inputs_of(name, (9, 64), torch.bfloat16)
    rows = FUNCTIONS[name][3]
    inputs = inputs[:rows] + [w.float() for w in inputs[rows:]]
    outputs = run(FUNCTIONS[name][0], inputs, [torch.ones(9, 64)] * 2)
    assert [x.dtype for x in outputs[-len(inputs) :]] == [x.dtype for x in inputs]
    narrow = run(FUNCTIONS[name][0], [x.bfloat16() for x in inputs], [torch.ones(9, 64)] * 2)
    assert torch.equal(narrow[-1], outputs[-1].bfloat16())


def test_gated_rounds_where_transformers_rounds(seed):
    x, z, weight = inputs_of("gated_rms_norm", (64, 128), torch.bfloat16)
    ours, plain = amc.ops.gated_rms_norm(x, z, weight), naive_gated(x, z, weight)
    assert (ours != plain).float().mean() < 0.01  # an ulp of the float32 mean may move a rounding


def test_residual_is_rounded_once(seed):
    x, other, weight = inputs_of("residual", (9, 64), torch.bfloat16)
    y, total = amc.ops.rms_norm(x, weight, residual=other)
    assert torch.equal(total, x + other) and torch.equal(y, amc.ops.rms_norm(total, weight))


@pytest.mark.parametrize("used", [0, 1])
def test_residual_with_one_output_used(seed, used):
    inputs = [x.requires_grad_() for x in inputs_of("residual", (9, 64), torch.float32)]
    result = residual(*inputs)[used]
    gradients = torch.autograd.grad(result.sum(), inputs, allow_unused=True)
    assert torch.equal(gradients[0], gradients[1])
    assert (gradients[2] is None) == (used == 1)


@NAMES
@settings(max_examples=20)
@given(data=st.data())
def test_layouts_and_threads_change_no_bit(name, data):
    ours, _, _, rows, vectors = FUNCTIONS[name]
    shape = data.draw(st.sampled_from([(5, 7), (40, 2, 16), (1, 64), (33, 65)]))
    layout = data.draw(st.sampled_from([x for x in LAYOUTS if x not in ("strided", "transposed")]))
    threads = data.draw(st.integers(1, 5))
    inputs = [data.draw(tensors(shape, layout)) for _ in range(rows)]
    inputs += [torch.randn(inputs[0].shape[-1]) for _ in range(vectors)]
    upstream = [torch.randn(inputs[0].shape)] * 2
    before = _amcore.build_info()["num_threads"]
    plain = run(ours, [x.clone(memory_format=torch.contiguous_format) for x in inputs], upstream)
    _amcore.set_num_threads(threads)
    outputs = ours(*inputs)
    _amcore.set_num_threads(before)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    assert all(map(torch.equal, plain, outputs))


@NAMES
@DTYPES
def test_gradients_do_not_depend_on_threads(seed, threads, name, dtype):
    inputs = inputs_of(name, (200, 33), dtype)
    upstream = [torch.randn(200, 33)] * 2
    found = run(FUNCTIONS[name][0], inputs, upstream)
    _amcore.set_num_threads(3)
    assert all(map(torch.equal, found, run(FUNCTIONS[name][0], inputs, upstream)))


@NAMES
def test_a_row_is_the_same_in_any_batch(seed, name):
    ours, _, _, rows, _ = FUNCTIONS[name]
    inputs = inputs_of(name, (37, 129), torch.float32)
    whole = ours(*inputs)
    part = ours(*(x[5:9] for x in inputs[:rows]), *inputs[rows:])
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (whole, part)), strict=True):
        assert torch.equal(a[5:9], b)


@NAMES
def test_strided_and_expanded_gradients(seed, name):
    ours = FUNCTIONS[name][0]
    inputs = inputs_of(name, (6, 8), torch.float32)
    expected = run(ours, inputs, [torch.ones(6, 8)] * 2)
    for upstream in (torch.ones(1, 1).expand(6, 8), torch.ones(8, 6).T, torch.ones(6, 16)[:, ::2]):
        assert all(map(torch.equal, expected, run(ours, inputs, [upstream] * 2)))


@NAMES
def test_empty(name):
    for shape in ((0, 8), (3, 0, 8)):
        results = run(FUNCTIONS[name][0], inputs_of(name, shape, torch.float32), [torch.zeros(shape)] * 2)
        assert all((x == 0).all() for x in results)


@NAMES
def test_frozen_vectors(seed, name):
    ours, _, _, rows, _ = FUNCTIONS[name]
    inputs = inputs_of(name, (20, 8), torch.float32)
    expected = run(ours, inputs, [torch.ones(20, 8)] * 2)
    found = run(lambda *x: ours(*x, *inputs[rows:]), inputs[:rows], [torch.ones(20, 8)] * 2)
    assert all(map(torch.equal, expected, found))


@NAMES
def test_checkpoint_compile_and_meta(seed, name):
    ours = FUNCTIONS[name][0]
    inputs, upstream = inputs_of(name, (6, 16), torch.float32), [torch.randn(6, 16)] * 2
    expected = run(ours, inputs, upstream)
    again = run(lambda *a: checkpoint(ours, *a, use_reentrant=False), inputs, upstream)
    compiled = run(torch.compile(ours, fullgraph=True, backend="aot_eager"), inputs, upstream)
    assert all(map(torch.equal, expected, again)) and all(map(torch.equal, expected, compiled))
    meta = ours(*(x.to("meta") for x in inputs))
    assert (meta[0] if isinstance(meta, tuple) else meta).shape == (6, 16)


@NAMES
def test_second_derivative_is_refused(name):
    inputs = [x.requires_grad_() for x in inputs_of(name, (6, 16), torch.float32)]
    outputs = FUNCTIONS[name][0](*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    first = torch.autograd.grad(sum(y.sum() for y in outputs), inputs[0], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="second derivative"):
        first.sum().backward()


X, W = torch.zeros(2, 4), torch.zeros(4)


@pytest.mark.parametrize(
    ("function", "arguments", "options", "error", "words"),
    [
        ("rms_norm", (X, torch.zeros(5)), {}, ValueError, "weight has 5 elements, the last axis of x has 4"),
        ("rms_norm", (X, X), {}, ValueError, "weight has 2 axes, 1 is needed"),
        ("rms_norm", (X, torch.zeros(8)[::2]), {}, ValueError, "weight has stride 2, 1 is needed"),
        ("rms_norm", (X.double(), W), {}, TypeError, "x is float64, float32 or bfloat16 is needed"),
        ("rms_norm", (X, W.long()), {}, TypeError, "weight is int64"),
        ("rms_norm", (X, W), {"eps": -1.0}, ValueError, "eps is -1"),
        ("rms_norm", (X, W), {"eps": float("nan")}, ValueError, "eps is nan"),
        ("rms_norm", (torch.zeros(4, 4).T, W), {}, ValueError, "x has stride 4 on its last axis, 1 is needed"),
        ("rms_norm", (torch.zeros(()), W), {}, ValueError, "x has no axes"),
        ("rms_norm", (torch.zeros(2, 0), torch.zeros(0)), {}, ValueError, "the last axis of x has 0 elements"),
        ("rms_norm", (X, W), {"residual": X.bfloat16()}, TypeError, "residual is bfloat16, x is float32"),
        ("rms_norm", (X, W), {"residual": X[:1]}, ValueError, "residual has extent 1 on axis 0, x has 2"),
        ("rms_norm", ([1.0], W), {}, TypeError, "argument 'x' must be a torch tensor, not list"),
        ("gated_rms_norm", (X, X[0], W), {}, ValueError, "z has 1 axes, x has 2"),
        ("layer_norm", (X, W, torch.zeros(3)), {}, ValueError, "bias has 3 elements, the last axis of x has 4"),
        ("rms_norm", (X, W), {"residual": X.to("meta")}, ValueError, "residual is on meta, x on cpu"),
        ("layer_norm", (X, W, None), {}, TypeError, "argument 'bias' must be a torch tensor, not NoneType"),
    ],
)
def test_errors(function, arguments, options, error, words):
    with pytest.raises(error, match=f"^{function}: {words}"):
        getattr(amc.ops, function)(*arguments, **options)


@NAMES
def test_reference_gradient(name):
    inputs = [x.requires_grad_() for x in inputs_of(name, (2, 3), torch.float64)]
    assert torch.autograd.gradcheck(FUNCTIONS[name][2], inputs)
