"""causal_conv1d against float64, and what its callers rely on."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import automodel_c as amc
from automodel_c import _amcore
from automodel_c.reference import conv as reference
from tests.numerics import assert_as_good_as, draws_for, pool
from tests.strategies import doc_ids, packed_docs, with_layout

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
NAMES = ("x", "weight", "bias", "initial_state")


def naive(x, weight, docs, *, bias=None, silu=True, initial_state=None):
    """transformers' eager code on each document, its cache in front."""
    y, states, width = torch.zeros_like(x), [], weight.shape[1]
    for n, (start, end) in enumerate((int(a), int(b)) for a, b in docs):
        state = x.new_zeros(x.shape[1], width - 1) if initial_state is None else initial_state[n]
        u = torch.cat([state, x[start:end].T], 1)
        states.append(u[:, end - start :])
        if end > start:
            z = F.conv1d(u[None], weight[:, None], bias, groups=x.shape[1])[0]
            y = y.index_copy(0, torch.arange(start, end, device=x.device), (F.silu(z) if silu else z).T)
    return y, torch.stack(states) if states else x.new_zeros(0, x.shape[1], width - 1)


def ours(x, weight, docs, *, bias=None, silu=True, initial_state=None):
    cu_seqlens = None if docs is None else [0, *docs[:, 1].tolist()]
    return amc.ops.causal_conv1d(
        x, weight, bias=bias, activation="silu" if silu else None, cu_seqlens=cu_seqlens, initial_state=initial_state,
        output_final_state=True,
    )  # fmt: skip


def docs_of(lengths):
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return torch.stack([ends[:-1], ends[1:]], 1)


def inputs_of(lengths, channels, width=4, dtype=torch.float32, *, bias=True, state=True, padding=0):
    shapes = {"x": (sum(lengths) + padding, channels), "weight": (channels, width)}
    shapes |= {"bias": (channels,)} if bias else {}
    shapes |= {"initial_state": (len(lengths), channels, width - 1)} if state else {}
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def run(function, inputs, docs, upstream, **options):
    """y, final_state, and the gradient of each input."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    outputs = function(docs=docs, **leaves, **options)
    upstream = [g.to(y.dtype).expand(y.shape) for g, y in zip(upstream, outputs, strict=True)]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), upstream, allow_unused=True)
    zeros = map(torch.zeros_like, leaves.values())
    return [y.detach() for y in outputs] + [x if g is None else g for x, g in zip(zeros, gradients, strict=True)]


def upstream_of(lengths, inputs):
    x, width = inputs["x"], inputs["weight"].shape[1]
    return [torch.randn(x.shape).to(x), torch.randn(len(lengths), x.shape[1], width - 1).to(x)]


def compare(lengths, *draws, **options):
    """The error rule over one or more draws of inputs."""
    docs, results = docs_of(lengths), []
    for inputs in draws:
        upstream = upstream_of(lengths, inputs)
        doubles = {name: x.double() for name, x in inputs.items()}
        pairs = ((ours, inputs), (naive, inputs), (reference.causal_conv1d, doubles))
        results.append([run(function, values, docs, upstream, **options) for function, values in pairs])
    found, plain, truth = (pool(part) for part in zip(*results, strict=True))
    names = ("y", "final_state", *(f"d{name}" for name in draws[0]))
    for name, a, b, c in zip(names, found, plain, truth, strict=True):
        assert_as_good_as(a, b, c, name=name)


LENGTHS = {
    "one": [1],
    "two": [2],
    "width": [4],
    "short": [1, 2, 3, 1, 2],
    "holes": [0, 5, 0, 0, 1, 9, 0],
    "rows-1": [127],
    "rows": [128],
    "rows+1": [129],
    "across": [126, 1, 3, 2, 300],
}


@DTYPES
@pytest.mark.parametrize("state", [True, False], ids=["state", "fresh"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_lengths(isa, seed, lengths, state, dtype):
    draws = draws_for(9 if sum(lengths) < 200 else 30)  # of the smallest part, a document's state
    compare(lengths, *(inputs_of(lengths, 3, dtype=dtype, state=state) for _ in range(draws)))


@DTYPES
@pytest.mark.parametrize("channels", [1, 16, 255, 256, 257, 600])
def test_channels(isa, seed, channels, dtype):
    lengths = [3, 0, 70, 2]
    compare(lengths, *(inputs_of(lengths, channels, dtype=dtype) for _ in range(draws_for(4 * channels))))


@DTYPES
@pytest.mark.parametrize("silu", [True, False], ids=["silu", "plain"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("width", range(1, 9))
def test_widths_bias_and_activation(isa, seed, width, bias, silu, dtype):
    lengths = [width - 1, width, 1, 66]
    compare(lengths, *(inputs_of(lengths, 5, width, dtype, bias=bias) for _ in range(8)), silu=silu)


@DTYPES
@pytest.mark.parametrize("rows", [63, 64, 65, 1023, 1024, 3000])
def test_many_rows(seed, rows, dtype):
    compare([rows // 2, rows - rows // 2], inputs_of([rows // 2, rows - rows // 2], 20, dtype=dtype))


@pytest.mark.parametrize("scale", [1e-3, 30.0])
def test_small_and_large_values(isa, seed, scale):
    inputs = inputs_of([40, 3], 33)
    compare([40, 3], {**inputs, "x": inputs["x"] * scale, "initial_state": inputs["initial_state"] * scale})


@DTYPES
@settings(max_examples=25)
@given(pack=packed_docs(90), channels=st.sampled_from([1, 7, 300]), width=st.integers(1, 8), state=st.booleans())
def test_packed_documents_equal_documents_alone(seed, pack, channels, width, state, dtype):
    """To the bit: y, final state, and the gradients of x and of the state. Padding may hold NaN."""
    inputs = inputs_of(pack.lengths, channels, width, dtype, state=state, padding=pack.tokens - pack.cu_seqlens[-1])
    inputs["x"][pack.cu_seqlens[-1] :] = torch.nan
    docs, upstream = docs_of(pack.lengths), upstream_of(pack.lengths, inputs)
    upstream[0][pack.cu_seqlens[-1] :] = torch.nan
    y, final, dx, dweight, dbias, *dstate = run(ours, inputs, docs, upstream)
    assert (y[pack.cu_seqlens[-1] :] == 0).all() and (dx[pack.cu_seqlens[-1] :] == 0).all()
    assert dweight.isfinite().all() and dbias.isfinite().all()
    for n, (start, end) in enumerate(docs.tolist()):
        own = {name: inputs[name] for name in ("weight", "bias")} | {"x": inputs["x"][start:end]}
        own |= {"initial_state": inputs["initial_state"][n : n + 1]} if state else {}
        own = {name: own[name] for name in inputs}
        alone = run(ours, own, docs_of([end - start]), [upstream[0][start:end], upstream[1][n : n + 1]])
        assert torch.equal(y[start:end], alone[0]) and torch.equal(final[n], alone[1][0])
        assert torch.equal(dx[start:end], alone[2])
        assert not state or torch.equal(dstate[0][n], alone[5][0])


@given(ids=doc_ids(60))
def test_ids(ids):
    """An id that comes back is another document, padding lies anywhere and may hold NaN."""
    x, weight = torch.randn(len(ids), 5), torch.randn(5, 4)
    x[torch.tensor(ids, dtype=torch.int64) == 0] = torch.nan
    x.requires_grad_()
    docs = torch.from_numpy(amc.docs_from_ids(ids))
    y, final = amc.ops.causal_conv1d(x, weight, doc_ids=ids, output_final_state=True)
    packed = amc.ops.causal_conv1d(x, weight, pack=amc.Pack(doc_ids=ids))
    assert torch.equal(y, packed[0]) and packed[1] is None and final.shape == (len(docs), 5, 3)
    (dx,) = torch.autograd.grad(y.sum(), x)
    padding = torch.tensor([number == 0 for number in ids], dtype=torch.bool)
    assert (y[padding] == 0).all() and (dx[padding] == 0).all()
    for start, end in docs.tolist():
        assert torch.equal(y[start:end], amc.ops.causal_conv1d(x[start:end], weight)[0])


@DTYPES
@pytest.mark.parametrize("rows", [2, 3, 5, 256, 300])
@pytest.mark.parametrize("cut", [0, 1, 2, 128])
def test_split_with_state_equals_unsplit(seed, rows, cut, dtype):
    """Also with parts shorter than the width: the second part starts from the first one's final state."""
    cut = min(cut, rows)
    inputs = inputs_of([rows], 9, dtype=dtype)
    whole = run(ours, inputs, docs_of([rows]), [torch.ones(1), torch.ones(1)])

    def parts(x, initial_state, **rest):
        rest["docs"] = None
        first, state = ours(x[:cut], initial_state=initial_state, **rest)
        second, state = ours(x[cut:], initial_state=state, **rest)
        return torch.cat([first, second]), state

    split = run(parts, inputs, None, [torch.ones(1), torch.ones(1)])
    for part in (0, 1):
        assert torch.equal(whole[part], split[part])
    if dtype == torch.float32:
        torch.testing.assert_close(whole, split)


def test_nothing_of_an_earlier_pack_stays(seed):
    x, weight = torch.randn(12, 4), torch.randn(4, 4)
    before = amc.ops.causal_conv1d(x, weight)[0]
    amc.ops.causal_conv1d(x, weight, cu_seqlens=[0, 5, 12])
    assert torch.equal(before, amc.ops.causal_conv1d(x, weight)[0])


def test_an_empty_document_passes_its_state_through(seed):
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4)
    state = torch.randn(3, 4, 3, requires_grad=True)
    _, final = amc.ops.causal_conv1d(x, weight, cu_seqlens=[0, 0, 3, 3], initial_state=state, output_final_state=True)
    assert torch.equal(final[0], state[0]) and torch.equal(final[2], state[2]) and torch.equal(final[1], x.T)
    upstream = torch.randn(3, 4, 3)
    dstate, dx = torch.autograd.grad(final, [state, x], upstream)
    assert torch.equal(dstate[0], upstream[0]) and torch.equal(dstate[2], upstream[2])
    assert (dstate[1] == 0).all() and torch.equal(dx, upstream[1].T)


@pytest.mark.parametrize("shape", [(0, 4), (5, 0), (0, 0)], ids=str)
def test_empty(shape):
    inputs = {"x": torch.zeros(shape), "weight": torch.ones(shape[1], 4), "bias": torch.ones(shape[1])}
    inputs["initial_state"] = torch.ones(1, shape[1], 3)
    y, final, dx, dweight, dbias, dstate = run(ours, inputs, None, [torch.ones(1), torch.ones(1)])
    assert y.numel() == dx.numel() == 0 and (dweight == 0).all() and (dbias == 0).all()
    assert (final == 1).all() and (dstate == 1).all()
    y, final = amc.ops.causal_conv1d(
        torch.full((4, 2), torch.nan), torch.ones(2, 4), doc_ids=[0] * 4, output_final_state=True
    )
    assert (y == 0).all() and final.shape == (0, 2, 3)


@DTYPES
@pytest.mark.parametrize("layout", ["rows", "offset"])
def test_layouts(seed, layout, dtype):
    inputs, lengths = inputs_of([5, 70, 2], 33, dtype=dtype), [5, 70, 2]
    upstream = upstream_of(lengths, inputs)
    expected = run(ours, inputs, docs_of(lengths), upstream)
    leaf = torch.randn(77, 2 * 33 + 1).to(dtype)
    x = with_layout(inputs["x"], layout)
    y, final = ours(docs=docs_of(lengths), **{**inputs, "x": x})
    assert torch.equal(y, expected[0]) and torch.equal(final, expected[1])
    leaf[:, 7:40] = inputs["x"]
    leaf.requires_grad_()
    y, final = ours(docs=docs_of(lengths), **{**inputs, "x": leaf[:, 7:40]})
    (grad,) = torch.autograd.grad([y, final], leaf, [with_layout(upstream[0], "transposed"), upstream[1]])
    assert torch.equal(grad[:, 7:40], expected[2]) and (grad[:, :7] == 0).all()
    turned = {name: with_layout(inputs[name], "transposed") for name in ("weight", "bias", "initial_state")}
    assert all(map(torch.equal, (y, final), ours(docs=docs_of(lengths), x=inputs["x"], **turned)))


def test_float32_weight_of_bfloat16_rows(seed):
    lengths, inputs = [5, 70], inputs_of([5, 70], 33, dtype=torch.bfloat16)
    upstream = upstream_of(lengths, inputs)
    wide = {**inputs, "weight": inputs["weight"].float(), "bias": inputs["bias"].float()}
    narrow, found = (run(ours, i, docs_of(lengths), upstream) for i in (inputs, wide))
    assert [g.dtype for g in found[2:]] == [x.dtype for x in wide.values()]
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(narrow, found, strict=True))


@DTYPES
def test_bits_do_not_depend_on_threads(seed, threads, dtype):
    lengths, inputs = [3, 700, 0, 600], inputs_of([3, 700, 0, 600], 300, dtype=dtype)
    upstream = upstream_of(lengths, inputs)
    found = run(ours, inputs, docs_of(lengths), upstream)
    _amcore.set_num_threads(3)
    assert all(map(torch.equal, found, run(ours, inputs, docs_of(lengths), upstream)))


@pytest.mark.parametrize(
    "wanted", [("x",), ("weight",), ("bias",), ("initial_state",), ("x", "initial_state")], ids=str
)
def test_some_gradients_and_a_repeated_backward(seed, wanted):
    inputs, docs = inputs_of([5, 70], 9), docs_of([5, 70])
    expected = dict(zip(inputs, run(ours, inputs, docs, [torch.ones(1), torch.ones(1)])[2:], strict=True))
    leaves = {name: inputs[name].requires_grad_() for name in wanted}
    y, final = ours(docs=docs, **inputs)
    loss = y.sum() + (final.sum() if final.requires_grad else 0.0)
    for _ in range(2):
        for name, grad in zip(wanted, torch.autograd.grad(loss, list(leaves.values()), retain_graph=True), strict=True):
            assert torch.equal(grad, expected[name])


@pytest.mark.parametrize("part", [0, 1], ids=["y", "final_state"])
def test_one_output_used(seed, part):
    inputs, docs = inputs_of([2, 30], 9), docs_of([2, 30])
    upstream = upstream_of([2, 30], inputs)
    expected = run(ours, inputs, docs, [g if i == part else torch.zeros_like(g) for i, g in enumerate(upstream)])
    leaves = [x.requires_grad_() for x in inputs.values()]
    found = torch.autograd.grad(ours(docs=docs, **inputs)[part], leaves, upstream[part])
    assert all(map(torch.equal, expected[2:], found))


def test_checkpoint_compile_and_meta(seed):
    inputs, pack = inputs_of([2, 30], 9), amc.Pack(cu_seqlens=[0, 2, 32])

    def function(x, weight, bias, initial_state, docs=None):
        return amc.ops.causal_conv1d(
            x, weight, bias=bias, pack=pack, initial_state=initial_state, output_final_state=True
        )

    upstream = [torch.ones(1), torch.ones(1)]
    expected = run(function, inputs, None, upstream)
    again = run(lambda docs, **x: checkpoint(function, *x.values(), use_reentrant=False), inputs, None, upstream)
    compiled = run(torch.compile(function, backend="aot_eager"), inputs, None, upstream)
    assert all(map(torch.equal, expected, again)) and all(map(torch.equal, expected, compiled))
    meta = function(*(x.to("meta") for x in inputs.values()))
    assert [y.shape for y in meta] == [y.shape for y in expected[:2]]


def test_custom_op(seed, monkeypatch):
    monkeypatch.undo()  # opcheck compares storage offsets, and guarded tensors lie inside their block
    inputs = [x.requires_grad_() for x in inputs_of([2, 30], 9).values()]
    torch.library.opcheck(
        torch.ops.automodel_c.causal_conv1d.default, (*inputs, torch.tensor([0, 2, 2, 32]), None, True, True)
    )
    torch.library.opcheck(
        torch.ops.automodel_c.causal_conv1d.default,
        (*inputs[:2], None, None, torch.tensor([0, 32]), None, False, False),
    )


def test_second_derivative_is_refused():
    inputs = [x.requires_grad_() for x in inputs_of([6], 3).values()]
    y, _ = amc.ops.causal_conv1d(inputs[0], inputs[1])
    first = torch.autograd.grad(y.sum(), inputs[0], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="second derivative"):
        first.sum().backward()


X, W = torch.zeros(6, 3), torch.zeros(3, 4)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((X.double(), W), {}, TypeError, "x is float64, float32 or bfloat16 is needed"),
        ((X, W.long()), {}, TypeError, "weight is int64, float32 or bfloat16 is needed"),
        ((X, W[:2]), {}, ValueError, "weight has 2 channels, x has 3"),
        ((X, W[:, None]), {}, ValueError, "x has 2 axes and weight has 3"),
        ((X[None], W), {}, ValueError, "x has 3 axes and weight has 2"),
        ((X, W[:, :0]), {}, ValueError, "weight has width 0, at least 1 is needed"),
        ((X, torch.zeros(3, 9)), {}, NotImplementedError, "weight has width 9, 1 to 8 are there"),
        ((torch.zeros(3, 6).T, W), {}, ValueError, "x has stride 6 on its last axis, 1 is needed"),
        ((X, W), {"bias": torch.zeros(4)}, ValueError, "bias has 4 channels, x has 3"),
        ((X, W), {"bias": [0.0] * 3}, TypeError, "argument 'bias' must be a torch tensor, not list"),
        ((X, W), {"activation": "gelu"}, ValueError, "activation is 'gelu', 'silu' or None is needed"),
        ((X, W), {"activation": True}, ValueError, "activation is True"),
        ((X, W), {"initial_state": torch.zeros(2, 3, 3)}, ValueError, "initial_state has extent 2 on axis 0, 1 is"),
        ((X, W), {"initial_state": torch.zeros(1, 3, 4)}, ValueError, "initial_state has extent 4 on axis 2, 3 is"),
        ((X, W), {"initial_state": torch.zeros(3, 3)}, ValueError, "initial_state has 2 axes, 3 are needed"),
        ((X, W), {"initial_state": torch.zeros(1, 3, 3).bfloat16()}, TypeError, "initial_state is bfloat16, x is"),
        ((X, W), {"cu_seqlens": [0, 7]}, ValueError, "x has 6 tokens, the pack ends at 7"),
        ((X, W), {"doc_ids": [1]}, ValueError, "x has 6 tokens, the pack's doc_ids have 1"),
        ((X, W), {"cu_seqlens": [0, 6], "doc_ids": [1] * 6}, ValueError, "give at most one of pack"),
        ((X, W), {"pack": [0, 6]}, TypeError, "argument 'pack' must be an automodel_c.Pack, not list"),
        ((X, W.to("meta")), {}, ValueError, "weight is on meta, x on cpu"),
        ((X, W), {"bias": torch.zeros(3, device="meta")}, ValueError, "bias is on meta, x on cpu"),
        ((X, W), {"initial_state": torch.zeros(1, 3, 3).to("meta")}, ValueError, "initial_state is on meta, x on cpu"),
        (([1.0], W), {}, TypeError, "argument 'x' must be a torch tensor, not list"),
    ],
)  # fmt: skip
def test_errors(arguments, options, error, words):
    with pytest.raises(error, match=f"^causal_conv1d: {words}"):
        amc.ops.causal_conv1d(*arguments, **options)


def test_nothing_is_written_after_an_error(guarded):
    dx, dweight = guarded((6, 3)), guarded((3, 4))
    partials = guarded((1, 5, 3), torch.float64)
    beside = {"device_docs": torch.tensor([0, 3, 6])}
    for bad in ({"docs": [0, 7]}, {"dy": X[:5]}, {"dfinal": torch.zeros(1, 3, 2)}, beside):
        rest = {"dy": X, "dfinal": None, "docs": [0, 6], "device_docs": None, **bad}
        with pytest.raises(ValueError, match=r"^causal_conv1d"):
            _amcore.causal_conv1d_backward(
                dx, dweight, None, None, partials, rest["dy"], rest["dfinal"], X, W, None, None, rest["docs"],
                rest["device_docs"], silu=True,
            )  # fmt: skip
    assert dx.isnan().all() and dweight.isnan().all() and partials.isnan().all()


def test_reference_gradient(seed):
    inputs = [x.double().requires_grad_() for x in inputs_of([1, 3, 0], 2).values()]

    def function(x, weight, bias, initial_state):
        return reference.causal_conv1d(x, weight, docs_of([1, 3, 0]), bias=bias, initial_state=initial_state)

    assert torch.autograd.gradcheck(function, inputs)
