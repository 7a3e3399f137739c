"""mrope and vision_rope on CUDA against float64, by the error rule, and what must hold to the bit."""

import pytest
import torch

import automodel_c as amc
from automodel_c.reference import rope as reference
from tests.cuda import device
from tests.cuda.device import on_cuda, same_bits
from tests.numerics import assert_as_good_as
from tests.ops.test_rope import MROPE, OPERATORS, QWEN, compare, naive_mrope, naive_vision, run, turn

pytestmark = pytest.mark.cuda

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])


def heads(tokens, counts, dim, dtype=F32):
    return [torch.randn(tokens, n, dim, device="cuda").to(dtype) for n in counts]


def positions_of(axes, tokens, largest=1000):
    return torch.randint(0, largest, (axes, tokens), device="cuda")


@DTYPES
@pytest.mark.parametrize(
    ("tokens", "n_heads", "kv_heads", "dim", "options"),
    [
        *MROPE,
        pytest.param(501, 32, 2, 256, QWEN, id="122b"),
        pytest.param(64, 64, 64, 256, QWEN, id="many-heads"),
        pytest.param(65, 1, 1, 264, QWEN, id="odd-rest"),
        pytest.param(3, 1, 1, 512, {"rotary_dim": 512, "theta": 1e7, "section": [256, 256, 256]}, id="widest"),
    ],
)
def test_mrope_error_rule(seed, tokens, n_heads, kv_heads, dim, options, dtype):
    q, k = heads(tokens, (n_heads, kv_heads), dim, dtype)
    for largest in (100, 200_000):
        positions = positions_of(3, tokens, largest)
        compare(amc.ops.mrope, naive_mrope, reference.mrope, q, k, positions, **options)


@DTYPES
@pytest.mark.parametrize(("tokens", "dim"), [(1, 4), (17, 72), (16, 64), (33, 80), (15, 8), (4_001, 72), (7, 12)])
def test_vision_rope_error_rule(seed, tokens, dim, dtype):
    q, k = heads(tokens, (3, 3), dim, dtype)
    compare(amc.ops.vision_rope, naive_vision, reference.vision_rope, q, k, positions_of(2, tokens, 64))


@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("counts", [(1, 1), (3, 1), (32, 2), (128, 8)])
@pytest.mark.parametrize("tokens", [1, 2, 3, 31, 63, 64, 65, 127, 128, 129])
def test_edges_of_blocks(seed, tokens, counts, dim):
    """Every token of a block as alone, and beside float64."""
    q, k = heads(tokens, counts, dim)
    positions = positions_of(3, tokens)
    whole = turn(False, q, k, positions)
    for t in {0, tokens // 2, tokens - 1}:
        alone = turn(False, q[t : t + 1], k[t : t + 1], positions[:, t : t + 1])
        assert same_bits(alone, [x[t : t + 1] for x in whole])
    for x, y in zip(whole, reference.mrope(q, k, positions, **QWEN), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)


@OPERATORS
@pytest.mark.parametrize("form", ["int32", "one-axis", "expanded", "strided"])
def test_forms_of_positions(seed, vision, form):
    q, _ = heads(9, (2, 1), 64)
    one = torch.randint(0, 999, (9,), device="cuda")
    positions = one.repeat(3 - vision, 1)
    expected = turn(vision, q, q, positions)
    other = {
        "int32": positions.int(),
        "one-axis": one,
        "expanded": one.expand(3 - vision, 9),
        "strided": positions.repeat_interleave(2, dim=1)[:, ::2],
    }[form]
    assert same_bits(expected, turn(vision, q, q, other))


@OPERATORS
def test_laws(seed, vision):
    q, k = heads(200, (2, 1), 64)
    positions = positions_of(3 - vision, 200)
    y_q, y_k = turn(vision, q, k, positions)
    torch.testing.assert_close(y_q.norm(dim=-1), q.norm(dim=-1))
    assert same_bits((q, k), turn(vision, q, k, torch.zeros_like(positions)))
    z_q, z_k = turn(vision, q, k, positions + 77)
    scores = [torch.einsum("thd,sd->hts", a.double(), b[:, 0].double()) for a, b in ((y_q, y_k), (z_q, z_k))]
    torch.testing.assert_close(*scores, atol=1e-4, rtol=1e-4)


@DTYPES
@OPERATORS
def test_strides(seed, vision, dtype):
    """Slices on whole words give the same bits; slices off them are read by smaller words, by the rule."""
    positions = positions_of(3 - vision, 40)
    wide = torch.randn(40, 5, 80, device="cuda").to(dtype)
    q, k = wide[:, :3, 8:72], wide[:, 3:, 8:72]
    found = turn(vision, q, k, positions)
    assert same_bits(found, turn(vision, q.contiguous(), k.contiguous(), positions))
    oracle, naive = (reference.vision_rope, naive_vision) if vision else (reference.mrope, naive_mrope)
    options = {} if vision else QWEN
    for start in (1, 4):
        q, k = wide[:, :3, start : start + 64], wide[:, 3:, start : start + 64]
        rows = turn(vision, q, k, positions), naive(q, k, positions, **options), oracle(q, k, positions, **options)
        for a, b, c in zip(*rows, strict=True):
            assert_as_good_as(a, b, c, name=f"from element {start}")


@OPERATORS
def test_gradients_that_autograd_hands_out(seed, vision):
    q, k = heads(40, (3, 2), 64)
    positions = positions_of(3 - vision, 40)
    upstream = [
        torch.ones(1, 1, 1, device="cuda").expand(q.shape),
        torch.ones(64, 2, 40, device="cuda").permute(2, 1, 0),
    ]
    function = lambda a, b: turn(vision, a, b, positions)  # noqa: E731
    expected = run(function, q, k, [x.contiguous() for x in upstream])
    assert same_bits(expected, run(function, q, k, upstream))


@OPERATORS
def test_empty_nan_and_untouched(seed, vision):
    q, k = heads(6, (2, 1), 64)
    positions = positions_of(3 - vision, 6)
    kept = [x.clone() for x in (q, k)]
    whole = turn(vision, q, k, positions)
    assert same_bits(kept, (q, k))
    assert turn(vision, q[:0], k[:0], positions[:, :0])[0].shape == (0, 2, 64)
    without = turn(vision, q, k[:, :0], positions)
    assert without[1].shape == (6, 0, 64) and torch.equal(without[0], whole[0])
    assert torch.equal(turn(vision, q[:, :0], k, positions)[1], whole[1])
    q[3:] = torch.nan
    assert torch.equal(turn(vision, q, k, positions)[0][:3], whole[0][:3])


@DTYPES
@OPERATORS
def test_repeats_to_the_bit(seed, vision, dtype):
    q, k = heads(3_000, (8, 2), 64, dtype)
    positions = positions_of(3 - vision, 3_000, 200_000)
    first = turn(vision, q, k, positions)
    assert all(same_bits(first, turn(vision, q, k, positions)) for _ in range(3))


@pytest.mark.parametrize(
    ("tokens", "counts", "dim"), [(70_000, (32, 2), 256), (250_000, (32, 2), 256), (9_000_000, (1, 1), 16)]
)
def test_many_tokens(seed, tokens, counts, dim, plain_memory):
    """More blocks than a grid's other axes hold; more than 2^31 elements."""
    q, k = (torch.randn(tokens, n, dim, device="cuda", dtype=BF16) for n in counts)
    positions = positions_of(3, tokens)
    options = QWEN if dim == 256 else QWEN | {"rotary_dim": 8}
    whole = amc.ops.mrope(q, k, positions, **options)
    for start in (0, 65_533, tokens - 9):
        rows = slice(start, start + 9)
        assert same_bits([x[rows] for x in whole], amc.ops.mrope(q[rows], k[rows], positions[:, rows], **options))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@OPERATORS
def test_stream_waiting_and_capture(seed, vision, plain_memory):
    q, k = heads(300, (8, 2), 64, BF16)
    others = heads(300, (8, 2), 64, BF16)
    upstream = [torch.randn_like(q), torch.randn_like(k)]
    places = [positions_of(3 - vision, 300) for _ in range(2)]
    call = lambda a, b, p: run(lambda x, y: turn(vision, x, y, p), a, b, upstream)  # noqa: E731
    device.assert_goes_to_the_current_stream(call, [q, k, places[0]])
    device.assert_does_not_wait(call, [q, k, places[0]])
    device.assert_can_be_captured(call, [q, k, places[0]], [*others, places[1]])


def test_other_devices_and_dtypes_are_refused():
    q, positions = torch.zeros(4, 2, 64, device="cuda"), torch.zeros(3, 4, dtype=torch.int64, device="cuda")
    for where in (
        {"k": q.cpu()},
        {"position_ids": positions.cpu()},
    ):
        with pytest.raises(ValueError, match="is on cpu"):
            amc.ops.mrope(**{"q": q, "k": q, "position_ids": positions, **QWEN, **where})
    with pytest.raises(TypeError, match="q is float16"):
        amc.ops.mrope(q.half(), q.half(), positions, **QWEN)
    with pytest.raises(NotImplementedError, match="rotary_dim is 1024, at most 512 is there"):
        amc.ops.vision_rope(*heads(4, (1, 1), 1024), positions[:2])


@OPERATORS
def test_compile(seed, vision):
    q, k = heads(6, (2, 1), 64)
    positions = positions_of(3 - vision, 6)
    function = lambda a, b: turn(vision, a, b, positions)  # noqa: E731
    upstream = on_cuda([torch.randn(6, 2, 64), torch.randn(6, 1, 64)])
    compiled = run(torch.compile(function, fullgraph=True, backend="aot_eager"), q, k, upstream)
    assert same_bits(run(function, q, k, upstream), compiled)
