"""swiglu, sigmoid_gate and gelu against float64, and what their callers rely on."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import automodel_c as amc
from automodel_c import _amcore
from automodel_c.reference import mlp as reference
from tests.numerics import assert_as_good_as, draws_for, pool
from tests.strategies import LAYOUTS, tensors

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
SHAPES = pytest.mark.parametrize("shape", [(2,), (1, 2), (3, 62), (2, 5, 64), (5, 130), (3, 2048), (2, 2050)], ids=str)


def naive_joined(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh(x):
    return amc.ops.gelu(x, "tanh")


# name: ours, transformers' eager code, oracle, count of inputs
FUNCTIONS = {
    "swiglu": (amc.ops.swiglu, naive_joined, reference.swiglu, 1),
    "swiglu-two": (amc.ops.swiglu, lambda g, u: F.silu(g) * u, reference.swiglu, 2),
    "sigmoid_gate": (amc.ops.sigmoid_gate, lambda x, g: x * torch.sigmoid(g), reference.sigmoid_gate, 2),
    "gelu": (amc.ops.gelu, F.gelu, reference.gelu, 1),
    "gelu-tanh": (
        gelu_tanh,
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: reference.gelu(x, "tanh"),
        1,
    ),
}
NAMES = pytest.mark.parametrize("name", FUNCTIONS)


def inputs_of(name, shape, dtype=torch.float32, scale=1.0):
    return [(scale * torch.randn(shape)).to(dtype) for _ in range(FUNCTIONS[name][3])]


def run(function, inputs, upstream):
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    y = function(*inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs, upstream.to(y.dtype).expand(y.shape))]


def results_of(name, inputs):
    """Output and gradients of ours, of the plain formula, and of the oracle."""
    ours, plain, oracle, _ = FUNCTIONS[name]
    upstream = torch.randn_like(ours(*inputs))
    return (
        run(ours, inputs, upstream),
        run(plain, inputs, upstream),
        run(oracle, [x.double() for x in inputs], upstream),
    )


def compare(name, *draws):
    """The error rule over one or more draws of inputs."""
    ours, plain, truth = (pool(part) for part in zip(*(results_of(name, inputs) for inputs in draws), strict=True))
    for part, (a, b, c) in enumerate(zip(ours, plain, truth, strict=True)):
        assert_as_good_as(a, b, c, name=f"{name}[{part}]")


@DTYPES
@SHAPES
@NAMES
def test_gate(isa, seed, name, shape, dtype):
    compare(name, *(inputs_of(name, shape, dtype) for _ in range(draws_for(math.prod(shape)))))


@DTYPES
@NAMES
@pytest.mark.parametrize("scale", [1e-3, 10.0, 100.0])
def test_small_and_large_values(isa, seed, name, scale, dtype):
    compare(name, inputs_of(name, (4, 500), dtype, scale))


@DTYPES
@pytest.mark.parametrize("sign", [-1.0, 1.0], ids=["negative", "positive"])
def test_gelu_on_every_piece(isa, sign, dtype):
    """Its polynomials' pieces of |x| one by one, their edges included, and what lies behind the last."""
    step = 0.4140625
    for piece in range(20):
        x = sign * torch.linspace((piece - 0.5) * step, (piece + 0.5) * step, 801).clamp(min=0.0)
        compare("gelu", [x.to(dtype)])


def test_gelu_where_the_last_piece_begins(isa):
    """The slope at exactly minus 14.5 pieces was 0, its neighbours' was not."""
    edge = torch.tensor(-14.5 * 0.4140625)
    x = torch.stack([edge, edge.nextafter(torch.tensor(0.0)), edge.nextafter(torch.tensor(-9.0))])
    y, dx = run(FUNCTIONS["gelu"][0], [x.repeat(12)], torch.ones(36))
    for ours, truth in zip((y, dx), run(reference.gelu, [x.double()], torch.ones(3)), strict=True):
        torch.testing.assert_close(ours.view(12, 3).double(), truth.expand(12, 3), rtol=1e-4, atol=0.0)


def test_gelu_of_nan_and_infinity(isa):
    x = torch.tensor([torch.nan, torch.inf, 1.0] * 7)
    y, dx = run(FUNCTIONS["gelu"][0], [x], torch.ones(21))
    assert torch.equal(y.isnan(), x.isnan()) and torch.equal(dx.isnan(), x.isnan())
    assert (y[1::3] == torch.inf).all() and (dx[1::3] == 1.0).all()


@NAMES
def test_extremes_are_finite(isa, name):
    x = torch.tensor([[-3e18, -1e4, -105.0, -88.0, -0.0, 0.0, 88.0, 105.0, 1e4, 3e18]])
    for values in run(FUNCTIONS[name][0], [x] * FUNCTIONS[name][3], torch.ones(1)):
        assert values.isfinite().all() or name in ("swiglu", "swiglu-two", "sigmoid_gate")
        assert not values.isnan().any()


@NAMES
@given(data=st.data())
def test_layouts_and_threads_change_no_bit(name, data):
    ours, _, _, count = FUNCTIONS[name]
    shape = data.draw(st.sampled_from([(5, 6), (4, 3, 16), (64,), (33, 130)]))
    layout = data.draw(st.sampled_from([x for x in LAYOUTS if x not in ("strided", "transposed")]))
    inputs = [data.draw(tensors(shape, layout)) for _ in range(count)]
    before = _amcore.build_info()["num_threads"]
    plain = ours(*(x.clone(memory_format=torch.contiguous_format) for x in inputs))
    _amcore.set_num_threads(data.draw(st.integers(1, 5)))
    found = ours(*inputs)
    _amcore.set_num_threads(before)
    assert torch.equal(plain, found)


@NAMES
def test_gradients_do_not_depend_on_threads(seed, threads, name):
    inputs, upstream = inputs_of(name, (300, 130)), torch.ones(1)
    found = run(FUNCTIONS[name][0], inputs, upstream)
    _amcore.set_num_threads(3)
    assert all(map(torch.equal, found, run(FUNCTIONS[name][0], inputs, upstream)))


def test_swiglu_forms_agree(seed):
    gate_up = torch.randn(7, 40)
    joined = run(amc.ops.swiglu, [gate_up], torch.ones(1))
    apart = run(amc.ops.swiglu, gate_up.chunk(2, dim=-1), torch.ones(1))
    assert torch.equal(joined[0], apart[0]) and torch.equal(joined[1], torch.cat(apart[1:], -1))


@NAMES
def test_strided_gradients_and_empty(seed, name):
    ours, _, _, count = FUNCTIONS[name]
    inputs = inputs_of(name, (6, 8))
    y = ours(*inputs)
    expected = run(ours, inputs, torch.ones(y.shape))
    for upstream in (
        torch.ones(1, 1).expand(y.shape),
        torch.ones(*y.shape[::-1]).T,
        torch.ones(6, 16)[:, ::2][:, : y.shape[1]],
    ):
        assert all(map(torch.equal, expected, run(ours, inputs, upstream)))
    for shape in ((0, 8), (3, 0)):
        assert all(x.numel() == 0 for x in run(ours, [torch.zeros(shape)] * count, torch.ones(1)))


@NAMES
def test_checkpoint_compile_and_meta(seed, name):
    ours, inputs = FUNCTIONS[name][0], inputs_of(name, (6, 16))
    expected = run(ours, inputs, torch.ones(1))
    again = run(lambda *a: checkpoint(ours, *a, use_reentrant=False), inputs, torch.ones(1))
    compiled = run(torch.compile(ours, fullgraph=True, backend="aot_eager"), inputs, torch.ones(1))
    assert all(map(torch.equal, expected, again)) and all(map(torch.equal, expected, compiled))
    assert ours(*(x.to("meta") for x in inputs)).shape == expected[0].shape


@NAMES
def test_second_derivative_is_refused(name):
    inputs = [x.requires_grad_() for x in inputs_of(name, (6, 16))]
    first = torch.autograd.grad(FUNCTIONS[name][0](*inputs).sum(), inputs[0], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="second derivative"):
        first.sum().backward()


X = torch.zeros(2, 4)


@pytest.mark.parametrize(
    ("function", "arguments", "error", "words"),
    [
        ("swiglu", (torch.zeros(2, 5),), ValueError, r"gate_up has 5 elements on its last axis"),
        ("swiglu", (torch.zeros(()),), ValueError, r"gate_up has 0 elements on its last axis \(0 axes\)"),
        ("swiglu", (X.double(),), TypeError, "gate is float64"),
        ("swiglu", (X, X[:1]), ValueError, "up has extent 1 on axis 0, gate has 2"),
        ("swiglu", (X, X.bfloat16()), TypeError, "up is bfloat16, gate is float32"),
        ("swiglu", (torch.zeros(4, 4).T,), ValueError, "gate has stride 4 on its last axis, 1 is needed"),
        ("sigmoid_gate", (X, X[0]), ValueError, "gate has 1 axes, x has 2"),
        ("swiglu", (X, X.to("meta")), ValueError, "up is on meta, gate_up on cpu"),
        ("sigmoid_gate", (X, None), TypeError, "argument 'gate' must be a torch tensor, not NoneType"),
        ("gelu", (X.long(),), TypeError, "x is int64"),
        ("gelu", (X, "erf"), ValueError, "approximate is 'erf', 'none' or 'tanh' is needed"),
    ],
)
def test_errors(function, arguments, error, words):
    with pytest.raises(error, match=f"^{function}: {words}"):
        getattr(amc.ops, function)(*arguments)


@NAMES
def test_reference_gradient(name):
    inputs = [x.requires_grad_() for x in inputs_of(name, (2, 4), torch.float64)]
    assert torch.autograd.gradcheck(FUNCTIONS[name][2], inputs)
