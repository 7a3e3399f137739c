"""qk_norm_mrope on CUDA against float64, by the error rule, and what must hold to the bit."""

import pytest
import torch

import automodel_c as amc
from automodel_c.ops import rope as glue
from tests.cuda import device
from tests.cuda.device import same_bits
from tests.numerics import draws_for
from tests.ops.test_qk_norm_mrope import QWEN, compare, draw, naive, ours, run
from tests.ops.test_rope import MROPE

pytestmark = pytest.mark.cuda

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
ROTARY_16 = QWEN | {"rotary_dim": 16}


def made(tokens, heads, dim, dtype=F32, weight_dtype=None):
    return draw(tokens, heads, dim, dtype, weight_dtype, "cuda")


def positions_of(tokens, largest=1000):
    return torch.randint(0, largest, (3, tokens), device="cuda")


@DTYPES
@pytest.mark.parametrize(
    ("tokens", "n_heads", "kv_heads", "dim", "options"),
    [
        *MROPE,
        pytest.param(501, 32, 2, 256, QWEN, id="122b"),
        pytest.param(400, 16, 16, 128, QWEN, id="d128"),
        pytest.param(301, 3, 1, 64, QWEN, id="d64"),
        pytest.param(64, 64, 64, 256, QWEN, id="many-heads"),
        pytest.param(70, 300, 9, 64, QWEN, id="heads-beyond-a-batch"),
        pytest.param(65, 1, 1, 264, QWEN, id="odd-rest"),
        pytest.param(131, 5, 2, 512, QWEN, id="two-chunks"),
        pytest.param(131, 5, 2, 520, QWEN, id="three-chunks"),
        pytest.param(90, 4, 2, 120, ROTARY_16, id="few-words"),
        pytest.param(40, 4, 2, 256, QWEN | {"rotary_dim": 256}, id="turns-whole"),
        pytest.param(3, 1, 1, 512, {"rotary_dim": 512, "theta": 1e7, "section": [256, 256, 256]}, id="widest"),
    ],
)
def test_error_rule(seed, tokens, n_heads, kv_heads, dim, options, dtype):
    for largest in (100, 200_000):
        draws = [made(tokens, (n_heads, kv_heads), dim, dtype) for _ in range(draws_for(tokens * dim, 512))]
        compare(draws, positions_of(tokens, largest), **options)


@DTYPES
@pytest.mark.parametrize("weight_dtype", [F32, BF16], ids=["w-f32", "w-bf16"])
@pytest.mark.parametrize("dim", [80, 256])
@pytest.mark.parametrize("options", [{"eps": 0.5}, {"zero_centered": False}, {"eps": 0.0}], ids=str)
def test_options(seed, options, dim, weight_dtype, dtype):
    compare([made(90, (4, 2), dim, dtype, weight_dtype)], positions_of(90), **QWEN, **options)


@DTYPES
@pytest.mark.parametrize("tokens", [4_001, 40_000])
def test_many_rows(seed, tokens, dtype):
    compare([made(tokens, (8, 2), 256, dtype)], positions_of(tokens, 200_000), **QWEN)


@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("counts", [(1, 1), (3, 1), (32, 2), (128, 8)])
@pytest.mark.parametrize("tokens", [1, 2, 3, 31, 63, 64, 65, 127, 128, 129])
def test_edges_of_blocks(seed, tokens, counts, dim):
    """Every token of a block as alone, gradients of heads too, and the weights' gradients beside float64."""
    inputs, positions = made(tokens, counts, dim), positions_of(tokens)
    upstream = [torch.randn_like(x) for x in inputs[:2]]
    whole = run(amc.ops.qk_norm_mrope, inputs, upstream, positions, **QWEN)
    for t in {0, tokens // 2, tokens - 1}:
        row = slice(t, t + 1)
        one = [x[row] for x in inputs[:2]] + inputs[2:]
        alone = run(amc.ops.qk_norm_mrope, one, [g[row] for g in upstream], positions[:, row], **QWEN)
        assert same_bits(alone[:4], [x[row] for x in whole[:4]])
    wide = run(naive, [x.double() for x in inputs], upstream, positions, **QWEN)
    for x, y in zip(whole[4:], wide[4:], strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("form", ["int32", "one-axis", "expanded", "strided"])
def test_forms_of_positions(seed, form):
    inputs, one = made(9, (2, 1), 64), torch.randint(0, 999, (9,), device="cuda")
    upstream = [torch.randn_like(x) for x in inputs[:2]]
    positions = one.repeat(3, 1)
    other = {
        "int32": positions.int(),
        "one-axis": one,
        "expanded": one.expand(3, 9),
        "strided": positions.repeat_interleave(2, dim=1)[:, ::2],
    }[form]
    results = (run(amc.ops.qk_norm_mrope, inputs, upstream, p, **QWEN) for p in (positions, other))
    assert same_bits(*results)


@DTYPES
def test_strides(seed, dtype):
    """Slices on whole words give the same bits; slices off them go to the plain kernel, by the rule."""
    wide, positions = torch.randn(150, 5, 160, device="cuda").to(dtype), positions_of(150)
    weights = [torch.randn(64, device="cuda").to(dtype) for _ in range(2)]
    upstream = [
        torch.ones(1, 1, 1, device="cuda", dtype=dtype).expand(150, 3, 64),
        torch.ones(64, 2, 150, device="cuda", dtype=dtype).permute(2, 1, 0),
    ]
    q, k = wide[:, :3, 8:72], wide[:, 3:, 88:152]
    leaves = [x.requires_grad_() for x in (q, k, *weights)]
    outputs = amc.ops.qk_norm_mrope(*leaves, positions, **QWEN)
    found = [*outputs, *torch.autograd.grad(outputs, leaves, upstream)]
    plain = [x.detach().contiguous() for x in leaves]
    assert same_bits(found, run(amc.ops.qk_norm_mrope, plain, [g.contiguous() for g in upstream], positions, **QWEN))
    for start in (1, 4):
        off = [wide[:, :3, start : start + 64], wide[:, 3:, start : start + 64], *plain[2:]]
        outputs = amc.ops.qk_norm_mrope(*off, positions, **QWEN)
        for x, y in zip(outputs, amc.ops.qk_norm_mrope(*(x.contiguous() for x in off), positions, **QWEN), strict=True):
            tolerance = 2e-2 if dtype == BF16 else 1e-5  # of two float32 orders, rounded to dtype
            torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)
        compare([[x.contiguous() for x in off]], positions, **QWEN)


@DTYPES
def test_plain_kernel_computes_the_same(seed, dtype):
    """Gradients of heads off whole words, which the operator hands to the plain kernel."""
    wide, positions = torch.randn(61, 5, 160, device="cuda").to(dtype), positions_of(61)
    views = wide[:, :3, 1:65], wide[:, 3:, 1:65]
    weights = [torch.randn(64, device="cuda").to(dtype) for _ in range(2)]
    upstream = [torch.randn(x.shape, device="cuda").to(dtype) for x in views]
    made_ = []
    for q, k in (views, [x.contiguous() for x in views]):
        leaves = [x.detach().requires_grad_() for x in (q, k, *weights)]
        assert leaves[0].stride() == q.stride()
        outputs = amc.ops.qk_norm_mrope(*leaves, positions, **QWEN)
        made_.append(torch.autograd.grad(outputs, leaves, upstream))
    tolerance = 2e-2 if dtype == BF16 else 1e-4
    for x, y in zip(*made_, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (3,), (2, 3)], ids=str)
def test_only_what_is_asked(seed, frozen):
    inputs, positions = made(70, (4, 2), 64), positions_of(70)
    upstream = [torch.randn_like(x) for x in inputs[:2]]
    whole = run(amc.ops.qk_norm_mrope, inputs, upstream, positions, **QWEN)[2:]
    leaves = [x.clone().requires_grad_(i not in frozen) for i, x in enumerate(inputs)]
    torch.autograd.backward(ours(leaves, positions), upstream)
    for i, (leaf, grad) in enumerate(zip(leaves, whole, strict=True)):
        assert leaf.grad is None if i in frozen else torch.equal(leaf.grad, grad)


@pytest.mark.parametrize("runs", [1, 2, 7, 1000])
@pytest.mark.parametrize("dim", [40, 64, 256])
def test_any_number_of_runs(seed, runs, dim, monkeypatch):
    """Scratch with any first extent holds the same sums, to rounding."""
    inputs, positions = made(90, (4, 2), dim), positions_of(90)
    upstream = [torch.randn_like(x) for x in inputs[:2]]
    expected = run(amc.ops.qk_norm_mrope, inputs, upstream, positions, **ROTARY_16)
    scratch = lambda q: torch.full((runs, 2, dim), torch.nan, dtype=torch.float64, device="cuda")  # noqa: E731
    monkeypatch.setattr(glue, "_partials", scratch)
    found = run(amc.ops.qk_norm_mrope, inputs, upstream, positions, **ROTARY_16)
    assert same_bits(expected[:4], found[:4])
    for x, y in zip(expected[4:], found[4:], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def test_empty_nan_and_untouched(seed):
    inputs, positions = made(6, (2, 1), 64), positions_of(6)
    kept = [x.clone() for x in inputs]
    whole = ours(inputs, positions)
    assert same_bits(kept, inputs)
    none = [x[:0].requires_grad_() for x in inputs[:2]] + [x.requires_grad_() for x in inputs[2:]]
    outputs = ours(none, positions[:, :0])
    assert outputs[0].shape == (0, 2, 64)
    grads = torch.autograd.grad(outputs, none, [torch.zeros_like(x) for x in outputs])
    assert all((g == 0).all() for g in grads[2:])
    inputs = [x.detach() for x in inputs]
    assert torch.equal(ours([inputs[0], inputs[1][:, :0], *inputs[2:]], positions)[0], whole[0])
    assert torch.equal(ours([inputs[0][:, :0], *inputs[1:]], positions)[1], whole[1])
    inputs[0][2, 1, 3] = torch.nan
    found = ours(inputs, positions)
    assert found[0][2, 1].isnan().all() and torch.equal(found[1], whole[1])
    found[0][2, 1] = whole[0][2, 1]
    assert torch.equal(found[0], whole[0])


@DTYPES
def test_repeats_to_the_bit(seed, dtype):
    inputs, positions = made(3_000, (8, 2), 256, dtype), positions_of(3_000, 200_000)
    upstream = [torch.randn_like(x) for x in inputs[:2]]
    first, *others = (run(amc.ops.qk_norm_mrope, inputs, upstream, positions, **QWEN) for _ in range(4))
    assert all(same_bits(first, other) for other in others)


@pytest.mark.parametrize(
    ("tokens", "counts", "dim"), [(70_000, (32, 2), 256), (250_000, (32, 2), 256), (9_000_000, (1, 1), 64)]
)
def test_many_tokens(seed, tokens, counts, dim, plain_memory):
    """More blocks than a grid's other axes hold; more than 2^31 elements."""
    q, k = (torch.randn(tokens, n, dim, device="cuda", dtype=BF16) for n in counts)
    weights = [torch.randn(dim, device="cuda", dtype=BF16) for _ in range(2)]
    positions = positions_of(tokens)
    whole = ours([q, k, *weights], positions)
    for start in (0, 65_533, tokens - 9):
        rows = slice(start, start + 9)
        assert same_bits([x[rows] for x in whole], ours([q[rows], k[rows], *weights], positions[:, rows]))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_stream_waiting_and_capture(seed, plain_memory):
    inputs, others = (made(300, (8, 2), 64, BF16) for _ in range(2))
    upstream = [torch.randn_like(x) for x in inputs[:2]]
    places = [positions_of(300) for _ in range(2)]
    call = lambda *a: run(amc.ops.qk_norm_mrope, a[:4], upstream, a[4], **QWEN)  # noqa: E731
    device.assert_goes_to_the_current_stream(call, [*inputs, places[0]])
    device.assert_does_not_wait(call, [*inputs, places[0]])
    device.assert_can_be_captured(call, [*inputs, places[0]], [*others, places[1]])


def test_other_devices_and_dtypes_are_refused():
    q, w = torch.zeros(4, 2, 64, device="cuda"), torch.zeros(64, device="cuda")
    good = {"q": q, "k": q, "q_weight": w, "k_weight": w, "position_ids": torch.zeros(3, 4, dtype=int, device="cuda")}
    for name in ("k", "q_weight", "position_ids"):
        with pytest.raises(ValueError, match=f"qk_norm_mrope: {name} is on cpu"):
            amc.ops.qk_norm_mrope(**{**good, name: good[name].cpu()}, **QWEN)
    with pytest.raises(TypeError, match="q is float16"):
        amc.ops.qk_norm_mrope(**{**good, "q": q.half(), "k": q.half()}, **QWEN)


def test_compile(seed):
    inputs, positions = made(6, (2, 1), 64), positions_of(6)
    function = lambda *a: ours(a, positions)  # noqa: E731
    upstream = [torch.randn_like(x) for x in inputs[:2]]
    alone = lambda f: run(lambda *a, **_: f(*a[:4]), inputs, upstream, positions)  # noqa: E731
    assert same_bits(alone(function), alone(torch.compile(function, fullgraph=True, backend="aot_eager")))
