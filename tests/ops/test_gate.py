"""gdn_gate against float64, and what its callers rely on."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import automodel_c as amc
from automodel_c import _amcore
from automodel_c.reference import gate as reference
from tests.numerics import assert_as_good_as, draws_for, pool
from tests.strategies import LAYOUTS, with_layout

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])


def naive(a, b, A_log, dt_bias):
    """transformers' eager code."""
    return -A_log.float().exp() * F.softplus(a.float() + dt_bias), b.sigmoid()


def inputs_of(rows, heads, dtype=torch.float32, scale=1.0):
    a, b = ((scale * torch.randn(rows, heads)).to(dtype) for _ in range(2))
    return [a, b, torch.empty(heads).uniform_(0.01, 16).log(), torch.randn(heads)]


def run(function, inputs, upstream):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    upstream = [g.to(y.dtype).expand(y.shape) for g, y in zip(upstream, outputs, strict=True)]
    return [y.detach() for y in outputs] + list(torch.autograd.grad(outputs, leaves, upstream))


def compare(*draws):
    """The error rule over one or more draws of inputs."""
    results = []
    for inputs in draws:
        upstream = [
            torch.randn(x.shape).to(x.device, d)
            for x, d in zip(inputs[:2], (torch.float32, inputs[1].dtype), strict=True)
        ]
        doubles = [x.double() for x in inputs]
        pairs = ((amc.ops.gdn_gate, inputs), (naive, inputs), (reference.gdn_gate, doubles))
        results.append([run(function, values, upstream) for function, values in pairs])
    ours, plain, truth = (pool(part) for part in zip(*results, strict=True))
    names = ("g", "beta", "da", "db", "dA_log", "ddt_bias")
    for name, x, y, z in zip(names, ours, plain, truth, strict=True):
        assert_as_good_as(x, y, z, name=name)


@DTYPES
@pytest.mark.parametrize(("rows", "heads"), [(1, 1), (1, 16), (15, 64), (16, 5), (33, 64), (40, 1025), (500, 16)])
def test_gate(isa, seed, rows, heads, dtype):
    compare(*(inputs_of(rows, heads, dtype) for _ in range(draws_for(heads))))


@DTYPES
@pytest.mark.parametrize("scale", [1e-3, 10.0, 100.0])
def test_small_and_large_values(isa, seed, scale, dtype):
    compare(inputs_of(50, 64, dtype, scale))


@pytest.mark.parametrize("center", [-120.0, -88.0, -60.0, -17.0, -5.0, 0.0, 5.0, 19.9, 20.1, 60.0, 1e4, 1e30])
def test_each_magnitude_alone(isa, seed, center):
    """Large values among the small ones would hide their relative error."""
    a, b, A_log, _ = inputs_of(40, 64)
    compare([a + center, b + center, A_log, torch.zeros(64)])


def test_softplus_is_near_everywhere(isa):
    s = torch.linspace(-100.0, 100.0, 20_001)[:, None]
    g, beta = amc.ops.gdn_gate(s, s, torch.zeros(1), torch.zeros(1))
    truth, strength = reference.gdn_gate(s, s, torch.zeros(1), torch.zeros(1))
    normal = truth.abs() > 2.0**-126
    assert ((g - truth).abs() / truth.abs())[normal].max() < 4 * 2.0**-24
    assert ((beta - strength).abs() / strength)[strength > 2.0**-126].max() < 6 * 2.0**-24


def test_extremes_are_finite(isa):
    a = torch.tensor([[-3e38, -1e4, -105.0, -88.0, -0.0, 0.0, 88.0, 105.0, 1e4, 3e38]])
    g, beta, *gradients = run(amc.ops.gdn_gate, [a, a, torch.zeros(10), torch.zeros(10)], [torch.ones(1)] * 2)
    assert all(x.isfinite().all() for x in (g, beta, *gradients))
    assert (g <= 0).all() and (beta >= 0).all() and (beta <= 1).all()
    infinite = torch.tensor([[-torch.inf, torch.inf, torch.nan]])
    g, beta = amc.ops.gdn_gate(infinite, infinite, torch.zeros(3), torch.zeros(3))
    assert g[0, :2].tolist() == [0.0, -torch.inf] and beta[0, :2].tolist() == [0.0, 1.0]
    assert g[0, 2].isnan() and beta[0, 2].isnan()


def test_padding_that_holds_nan_changes_nothing(isa, seed):
    """Padding's gradients arrive as 0."""
    a, b, A_log, dt_bias = inputs_of(50, 8)
    upstream = [torch.randn(50, 8), torch.randn(50, 8)]
    dirty, real = [a.clone(), b.clone()], torch.ones(50, dtype=torch.bool)
    real[[0, 7, 8, 49]] = False
    for x in (*dirty, *upstream):
        x[~real] = torch.nan
    for x in upstream:
        x[~real] = 0.0
    expected = run(amc.ops.gdn_gate, [a, b, A_log, dt_bias], upstream)
    found = run(amc.ops.gdn_gate, [*dirty, A_log, dt_bias], upstream)
    for x, y in zip(expected[:4], found[:4], strict=True):
        assert torch.equal(x[real], y[real])
    assert (found[2][~real] == 0).all() and (found[3][~real] == 0).all()
    assert torch.equal(expected[4], found[4]) and torch.equal(expected[5], found[5])


@DTYPES
@given(data=st.data())
def test_layouts_and_threads_change_no_bit(seed, dtype, data):
    rows, heads = data.draw(st.sampled_from([(5, 6), (40, 16), (1, 64), (700, 33), (0, 4), (3, 0)]))
    layout = data.draw(st.sampled_from(["contiguous", "rows", "offset"]))
    assert layout in LAYOUTS
    inputs = inputs_of(rows, heads, dtype)
    before = _amcore.build_info()["num_threads"]
    plain = run(amc.ops.gdn_gate, inputs, [torch.ones(1)] * 2)
    _amcore.set_num_threads(data.draw(st.integers(1, 5)))
    a, b = (with_layout(x, layout).requires_grad_() for x in inputs[:2])
    outputs = amc.ops.gdn_gate(a, b, *(x.requires_grad_() for x in inputs[2:]))
    gradients = torch.autograd.grad(outputs, [a, b, *inputs[2:]], [torch.ones_like(x) for x in outputs])
    _amcore.set_num_threads(before)
    assert all(map(torch.equal, plain, [*outputs, *gradients]))


def test_slices_of_one_projection(seed):
    both, (_, _, A_log, dt_bias) = torch.randn(9, 2 * 4 + 3, requires_grad=True), inputs_of(9, 4)
    outputs = amc.ops.gdn_gate(both[:, :4], both[:, 4:8], A_log, dt_bias)
    expected = run(amc.ops.gdn_gate, [both[:, :4], both[:, 4:8], A_log, dt_bias], [torch.ones(1)] * 2)
    assert all(map(torch.equal, outputs, expected[:2]))
    for upstream in (torch.ones(9, 4), torch.ones(4, 9).T, torch.ones(1, 1).expand(9, 4)):
        (grad,) = torch.autograd.grad(outputs, both, [upstream] * 2, retain_graph=True)
        assert torch.equal(grad[:, :4], expected[2]) and torch.equal(grad[:, 4:8], expected[3])


def test_two_dtypes(seed):
    a, b, A_log, dt_bias = inputs_of(9, 4, torch.bfloat16)
    g, beta = amc.ops.gdn_gate(a, b.float(), A_log, dt_bias)
    expected = amc.ops.gdn_gate(a, b, A_log, dt_bias)
    assert g.dtype == beta.dtype == torch.float32 and torch.equal(g, expected[0])
    assert torch.equal(beta.bfloat16(), expected[1])


def test_checkpoint_compile_and_meta(seed):
    inputs, upstream = inputs_of(6, 16), [torch.ones(1)] * 2
    expected = run(amc.ops.gdn_gate, inputs, upstream)
    again = run(lambda *a: checkpoint(amc.ops.gdn_gate, *a, use_reentrant=False), inputs, upstream)
    compiled = run(torch.compile(amc.ops.gdn_gate, fullgraph=True, backend="aot_eager"), inputs, upstream)
    assert all(map(torch.equal, expected, again)) and all(map(torch.equal, expected, compiled))
    g, beta = amc.ops.gdn_gate(*(x.to("meta") for x in inputs))
    assert g.shape == beta.shape == (6, 16)


def test_custom_op(seed, monkeypatch):
    monkeypatch.undo()  # opcheck compares storage offsets, and guarded tensors lie inside their block
    inputs = [x.requires_grad_() for x in inputs_of(6, 16, torch.bfloat16)]
    torch.library.opcheck(torch.ops.automodel_c.gdn_gate.default, inputs)


def test_second_derivative_is_refused():
    inputs = [x.requires_grad_() for x in inputs_of(6, 16)]
    first = torch.autograd.grad(amc.ops.gdn_gate(*inputs)[0].sum(), inputs[0], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="second derivative"):
        first.sum().backward()


X, H = torch.zeros(2, 4), torch.zeros(4)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((X.double(), X, H, H), TypeError, "a is float64, float32 or bfloat16 is needed"),
        ((X, X.long(), H, H), TypeError, "b is int64, float32 or bfloat16 is needed"),
        ((X, X[:1], H, H), ValueError, "b has extent 1 on axis 0, a has 2"),
        ((X, X, H[:3], H), ValueError, "A_log has 3 heads, a has 4"),
        ((X, X, H, X), ValueError, "dt_bias has 2 axes, 1 is needed"),
        ((X, X, H.bfloat16(), H), TypeError, "A_log is bfloat16, float32 is needed"),
        ((X, X, torch.zeros(8)[::2], H), ValueError, "A_log has stride 2, 1 is needed"),
        ((X[0], X[0], H, H), ValueError, r"a has 1 axes, 2 are needed"),
        ((torch.zeros(4, 4).T, torch.zeros(4, 4), H, H), ValueError, "a has stride 4 on its last axis, 1 is needed"),
        ((X, X.to("meta"), H, H), ValueError, "b is on meta, a on cpu"),
        ((X, X, H, None), TypeError, "argument 'dt_bias' must be a torch tensor, not NoneType"),
    ],
)
def test_errors(arguments, error, words):
    with pytest.raises(error, match=f"^gdn_gate: {words}"):
        amc.ops.gdn_gate(*arguments)


def test_reference_gradient(seed):
    assert torch.autograd.gradcheck(reference.gdn_gate, [x.double().requires_grad_() for x in inputs_of(3, 2)])
