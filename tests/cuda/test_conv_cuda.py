"""causal_conv1d on CUDA against float64, by the error rule, and what must hold to the bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import automodel_c as amc
from automodel_c import _amcore
from automodel_c.reference import conv as reference
from tests.cuda import device
from tests.cuda.device import same_bits
from tests.numerics import assert_as_good_as, draws_for
from tests.ops.test_conv import LENGTHS, compare, docs_of, inputs_of, naive, ours, run, upstream_of
from tests.strategies import packed_docs

pytestmark = pytest.mark.cuda

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
# the edges of 16 and 8 bytes a thread and of a block, and channels that are no whole words
CHANNELS = [1, 2, 3, 4, 6, 8, 12, 16, 33, 252, 256, 260, 508, 512, 516, 520, 1024, 1032, 1537]
HEAVY = [0, 1, 900, 2, 3, 3, 64, 0, 0, 5, 31, 4, 700, 17, 1, 1, 1, 260]


@pytest.fixture(autouse=True)
def exact_twin(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def draw(*arguments, **options):
    return {name: x.cuda() for name, x in inputs_of(*arguments, **options).items()}


def of_pack(pack, **options):
    """What `run` and the device's tests call: of tensors alone."""

    def function(x, weight, bias=None, initial_state=None, docs=None):
        return amc.ops.causal_conv1d(
            x, weight, bias=bias, pack=pack, initial_state=initial_state, output_final_state=True, **options
        )

    return function


@DTYPES
@pytest.mark.parametrize("channels", [3, 16])
@pytest.mark.parametrize("state", [True, False], ids=["state", "fresh"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_lengths(seed, lengths, state, channels, dtype):
    draws = draws_for(9 if sum(lengths) < 200 else 30)
    compare(lengths, *(draw(lengths, channels, dtype=dtype, state=state) for _ in range(draws)))


@DTYPES
@pytest.mark.parametrize("channels", CHANNELS)
def test_channels(seed, channels, dtype):
    lengths = [3, 0, 70, 2]
    compare(lengths, *(draw(lengths, channels, dtype=dtype) for _ in range(draws_for(4 * channels))))


@DTYPES
@pytest.mark.parametrize("channels", [5, 16])
@pytest.mark.parametrize("silu", [True, False], ids=["silu", "plain"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("width", range(1, 9))
def test_widths_bias_and_activation(seed, width, bias, silu, channels, dtype):
    lengths = [width - 1, width, 1, 66]
    compare(lengths, *(draw(lengths, channels, width, dtype, bias=bias) for _ in range(8)), silu=silu)


@DTYPES
@pytest.mark.parametrize("lengths", [HEAVY, [4096], [1] * 500, [4001, 4001], [5] * 300], ids=len)
@pytest.mark.parametrize("channels", [20, 24, 520])
def test_many_rows(seed, channels, lengths, dtype):
    compare(lengths, draw(lengths, channels, dtype=dtype))


@DTYPES
def test_the_model_s_channels(seed, dtype):
    compare(HEAVY, draw(HEAVY, 12_288, dtype=dtype, bias=False, state=False))


@pytest.mark.parametrize("scale", [1e-3, 30.0])
def test_small_and_large_values(seed, scale):
    inputs = draw([40, 3], 36)
    compare([40, 3], {**inputs, "x": inputs["x"] * scale, "initial_state": inputs["initial_state"] * scale})


@DTYPES
@settings(max_examples=40)
@given(pack=packed_docs(300), channels=st.sampled_from([1, 7, 16, 300]), width=st.integers(1, 8), state=st.booleans())
def test_packed_documents_equal_documents_alone(seed, pack, channels, width, state, dtype):
    """To the bit: y, final state, and the gradients of x and of the state. Padding may hold NaN."""
    inputs = draw(pack.lengths, channels, width, dtype, state=state, padding=pack.tokens - pack.cu_seqlens[-1])
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


@pytest.mark.parametrize("channels", [5, 16])
def test_padding_anywhere(seed, channels):
    """Gaps between documents hold NaN; an id that comes back is another document."""
    ids = [0] * 9 + [1] * 30 + [0] * 70 + [2, 2, 0, 2, 1] + [0] * 3 + [3] * 200 + [0]
    x, weight = torch.randn(len(ids), channels), torch.randn(channels, 4).cuda()
    padding = torch.tensor(ids) == 0
    x[padding] = torch.nan
    x = x.cuda().requires_grad_()
    y = amc.ops.causal_conv1d(x, weight, doc_ids=ids)[0]
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert (y[padding.to(y.device)] == 0).all() and (dx[padding.to(y.device)] == 0).all()
    for start, end in amc.docs_from_ids(ids).tolist():
        own = x[start:end].detach().requires_grad_()
        alone = amc.ops.causal_conv1d(own, weight)[0]
        assert torch.equal(y[start:end], alone) and torch.equal(dx[start:end], torch.autograd.grad(alone.sum(), own)[0])


@DTYPES
@pytest.mark.parametrize("rows", [2, 3, 5, 256, 300])
@pytest.mark.parametrize("cut", [0, 1, 2, 128])
def test_split_with_state_equals_unsplit(seed, rows, cut, dtype):
    cut, inputs, ones = min(cut, rows), draw([rows], 8, dtype=dtype), [torch.ones(1).cuda()] * 2
    whole = run(ours, inputs, docs_of([rows]), ones)

    def parts(x, initial_state, **rest):
        rest["docs"] = None
        first, state = ours(x[:cut], initial_state=initial_state, **rest)
        second, state = ours(x[cut:], initial_state=state, **rest)
        return torch.cat([first, second]), state

    split = run(parts, inputs, None, ones)
    assert same_bits(whole[:2], split[:2])
    if dtype == F32:
        torch.testing.assert_close(whole, split)


@pytest.mark.parametrize("shape", [(0, 4), (5, 0), (0, 0), (0, 5)], ids=str)
def test_empty(shape):
    inputs = {"x": torch.zeros(shape), "weight": torch.ones(shape[1], 4), "bias": torch.ones(shape[1])}
    inputs["initial_state"] = torch.ones(1, shape[1], 3)
    inputs = {name: x.cuda() for name, x in inputs.items()}
    y, final, dx, dweight, dbias, dstate = run(ours, inputs, None, [torch.ones(1).cuda()] * 2)
    assert y.numel() == dx.numel() == 0 and (dweight == 0).all() and (dbias == 0).all()
    assert (final == 1).all() and (dstate == 1).all()
    x = torch.full((4, 8), torch.nan).cuda()
    y, final = amc.ops.causal_conv1d(x, torch.ones(8, 4).cuda(), doc_ids=[0] * 4, output_final_state=True)
    assert (y == 0).all() and final.shape == (0, 8, 3)


@DTYPES
def test_layouts(seed, dtype):
    """Slices on whole words are the same to the bit; slices off them take other kernels."""
    lengths = [5, 70, 2, 900]
    inputs, docs = draw(lengths, 48, dtype=dtype), docs_of(lengths)
    upstream = upstream_of(lengths, inputs)
    expected = run(ours, inputs, docs, upstream)
    truth = run(reference.causal_conv1d, {name: x.double() for name, x in inputs.items()}, docs, upstream)
    plain = run(naive, inputs, docs, upstream)
    for start, wide in ((16, 128), (1, 50)):
        leaf = torch.full((977, wide), torch.nan, dtype=dtype).cuda()
        leaf[:, start : start + 48] = inputs["x"]
        leaf.requires_grad_()
        spread = torch.zeros(977, 96, dtype=dtype).cuda()[:, ::2].copy_(upstream[0])
        outputs = ours(docs=docs, **{**inputs, "x": leaf[:, start : start + 48]})
        (grad,) = torch.autograd.grad(outputs, leaf, [spread, upstream[1]])
        found = [*outputs, grad[:, start : start + 48]]
        if start == 16:
            assert same_bits(expected[:3], found)
        for a, b, c, name in zip(found, plain, truth, ("y", "final_state", "dx"), strict=False):
            assert_as_good_as(a.detach(), b, c, name=name)
    turned = {name: inputs[name].mT.contiguous().mT for name in ("weight", "initial_state")}
    assert same_bits(expected, run(ours, {**inputs, **turned}, docs, upstream))


def test_float32_weight_of_bfloat16_rows(seed):
    lengths, inputs = [5, 70], draw([5, 70], 40, dtype=BF16)
    upstream = upstream_of(lengths, inputs)
    wide = {**inputs, "weight": inputs["weight"].float(), "bias": inputs["bias"].float()}
    narrow, found = (run(ours, i, docs_of(lengths), upstream) for i in (inputs, wide))
    assert [g.dtype for g in found[2:]] == [x.dtype for x in wide.values()]
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(narrow, found, strict=True))


@DTYPES
@pytest.mark.parametrize("channels", [99, 2048])
def test_repeats_to_the_bit(seed, channels, dtype):
    inputs = draw(HEAVY, channels, dtype=dtype)
    upstream = upstream_of(HEAVY, inputs)
    first = run(ours, inputs, docs_of(HEAVY), upstream)
    assert all(same_bits(first, run(ours, inputs, docs_of(HEAVY), upstream)) for _ in range(3))


@pytest.mark.parametrize(
    "wanted", [("x",), ("weight",), ("bias",), ("initial_state",), ("x", "initial_state")], ids=str
)
def test_some_gradients(seed, wanted):
    inputs, docs, ones = draw([5, 70], 16), docs_of([5, 70]), [torch.ones(1).cuda()] * 2
    expected = dict(zip(inputs, run(ours, inputs, docs, ones)[2:], strict=True))
    leaves = {name: inputs[name].requires_grad_() for name in wanted}
    y, final = ours(docs=docs, **inputs)
    loss = y.sum() + (final.sum() if final.requires_grad else 0.0)
    for name, grad in zip(wanted, torch.autograd.grad(loss, list(leaves.values())), strict=True):
        assert torch.equal(grad, expected[name])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("lengths", [HEAVY, None], ids=["packed", "whole"])
@pytest.mark.parametrize("channels", [64, 33])
def test_stream_waiting_and_capture(seed, channels, lengths, plain_memory):
    pack = None if lengths is None else amc.Pack(cu_seqlens=[0, *docs_of(lengths)[:, 1].tolist()], device="cuda")
    lengths = [500] if lengths is None else lengths
    inputs, others = (list(draw(lengths, channels, dtype=BF16).values()) for _ in range(2))
    upstream = upstream_of(lengths, dict(zip(("x", "weight"), inputs, strict=False)))
    names = ("x", "weight", "bias", "initial_state")
    call = lambda *x: run(of_pack(pack), dict(zip(names, x, strict=True)), None, upstream)  # noqa: E731
    device.assert_goes_to_the_current_stream(call, inputs)
    device.assert_does_not_wait(call, inputs)
    device.assert_can_be_captured(call, inputs, others)


def test_a_captured_graph_replays_the_documents_of_its_buffer(seed, plain_memory):
    packs = [amc.Pack(cu_seqlens=[0, *ends], device="cuda") for ends in ([9, 300, 301, 960], [0, 32, 700, 940])]
    inputs = draw([240] * 4, 64, dtype=BF16)
    upstream = upstream_of([240] * 4, inputs)
    wanted = [run(of_pack(pack), inputs, None, upstream) for pack in packs]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run(of_pack(packs[0]), inputs, None, upstream)
    kept = packs[1].device_docs.clone()
    for values, expected in ((kept, wanted[1]), (packs[0].device_docs.clone(), wanted[0])):
        packs[0].device_docs.copy_(values)
        graph.replay()
        assert same_bits(expected, made)


def test_beyond_two_to_the_31_elements(seed, plain_memory):
    """The last rows are those of the same document alone."""
    rows, channels = 180_000, 12_288
    x, weight = torch.randn(rows, channels, dtype=BF16, device="cuda"), torch.randn(channels, 4, device="cuda")
    pack = amc.Pack(cu_seqlens=[0, 7, rows - 300, rows], device="cuda")
    x.requires_grad_()
    y = amc.ops.causal_conv1d(x, weight, pack=pack)[0]
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    own = x.detach()[-300:].clone().requires_grad_()
    alone = amc.ops.causal_conv1d(own, weight)[0]
    assert torch.equal(y[-300:], alone)
    assert torch.equal(dx[-300:], torch.autograd.grad(alone, own, torch.ones_like(alone))[0])


def test_other_devices_and_missing_documents_are_refused():
    x, weight = torch.zeros(6, 8, device="cuda"), torch.zeros(8, 4, device="cuda")
    with pytest.raises(ValueError, match=r"^causal_conv1d: weight is on cpu"):
        amc.ops.causal_conv1d(x, weight.cpu())
    with pytest.raises(ValueError, match=r"^causal_conv1d: bias is on cpu"):
        amc.ops.causal_conv1d(x, weight, bias=torch.zeros(8))
    for dtype in (torch.float16, torch.float64):
        with pytest.raises(TypeError, match="float32 or bfloat16 is needed"):
            amc.ops.causal_conv1d(x.to(dtype), weight)
    with pytest.raises(ValueError, match="device_docs is needed on CUDA for 2 documents"):
        _amcore.causal_conv1d_forward(x, None, x, weight, None, None, [0, 2, 2, 6], silu=True)


def test_compile_and_second_derivative(seed):
    inputs, pack = draw([2, 30], 16), amc.Pack(cu_seqlens=[0, 2, 32], device="cuda")
    upstream = [torch.ones(1).cuda()] * 2
    expected = run(of_pack(pack), inputs, None, upstream)
    compiled = run(torch.compile(of_pack(pack), backend="aot_eager"), inputs, None, upstream)
    assert same_bits(expected, compiled)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    first = torch.autograd.grad(of_pack(pack)(**leaves)[0].sum(), inputs["x"], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="second derivative"):
        first.sum().backward()
