"""mrope and vision_rope against float64 and transformers, and what their callers rely on."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import automodel_c as amc
from automodel_c import _amcore
from automodel_c.reference import rope as reference
from tests.numerics import assert_as_good_as

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
QWEN = {"rotary_dim": 64, "theta": 1e7, "section": [11, 11, 10]}


def rotate_half(x):
    low, high = x.chunk(2, dim=-1)
    return torch.cat([-high, low], dim=-1)


def test_angles_beyond_64_bits_are_no_undefined_conversion():
    """The fuzzer's: a tiny theta makes frequencies of 1e22; what comes out is anything, but the same on each row."""
    x = torch.ones(2, 1, 8)
    first, again = (torch.empty(2, 1, 8) for _ in "12")
    for out in (first, again):
        _amcore.vision_rope(out, torch.empty_like(x), x, x, torch.tensor([0, 1]), theta=1e-45, inverse=False)
    assert torch.equal(first[0], x[0]) and torch.equal(first.view(torch.int32), again.view(torch.int32))


def naive_mrope(q, k, position_ids, *, rotary_dim, theta, section):
    """transformers' eager code: float32 angles, cos and sin in q's dtype."""
    inverse = 1.0 / (theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=q.device) / rotary_dim))
    angles = position_ids.expand(3, -1)[:, :, None].float() * inverse
    mixed = angles[0].clone()
    for axis in (1, 2):
        index = slice(axis, 3 * section[axis], 3)
        mixed[:, index] = angles[axis][:, index]
    cos, sin = (f(torch.cat([mixed, mixed], dim=-1)).to(q.dtype)[:, None] for f in (torch.cos, torch.sin))
    turned = []
    for x in (q, k):
        turn, rest = x[..., :rotary_dim], x[..., rotary_dim:]
        turned.append(torch.cat([turn * cos + rotate_half(turn) * sin, rest], dim=-1))
    return tuple(turned)


def naive_vision(q, k, position_ids, *, theta=10000.0):
    dim = q.shape[-1] // 2
    inverse = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=q.device) / dim))
    angles = (position_ids.expand(2, -1)[:, :, None].float() * inverse).transpose(0, 1).flatten(1)
    cos, sin = (f(torch.cat([angles, angles], dim=-1))[:, None] for f in (torch.cos, torch.sin))
    return tuple((x.float() * cos + rotate_half(x.float()) * sin).to(x.dtype) for x in (q, k))


def run(function, q, k, upstream, *args, **options):
    q, k = (x.detach().clone().requires_grad_() for x in (q, k))
    outputs = function(q, k, *args, **options)
    upstream = [g.to(y.dtype) for g, y in zip(upstream, outputs, strict=True)]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, [q, k], upstream)]


def compare(ours, plain, oracle, q, k, positions, **options):
    upstream = [torch.randn_like(q), torch.randn_like(k)]
    results = run(ours, q, k, upstream, positions, **options), run(plain, q, k, upstream, positions, **options)
    truth = run(oracle, q.double(), k.double(), upstream, positions, **options)
    for name, a, b, c in zip(("q", "k", "dq", "dk"), *results, truth, strict=True):
        assert_as_good_as(a, b, c, name=name)


MROPE = [
    pytest.param(1, 1, 1, 256, QWEN, id="one"),
    pytest.param(17, 8, 2, 256, QWEN, id="qwen"),
    pytest.param(15, 2, 1, 16, {"rotary_dim": 16, "theta": 1e4, "section": [4, 2, 2]}, id="whole-head"),
    pytest.param(16, 3, 3, 40, {"rotary_dim": 6, "theta": 1e4, "section": [1, 1, 1]}, id="odd-pairs"),
    pytest.param(33, 2, 1, 32, {"rotary_dim": 8, "theta": 1e7, "section": [11, 11, 10]}, id="wide-section"),
    pytest.param(5, 2, 1, 2, {"rotary_dim": 2, "theta": 1e4, "section": [1, 0, 0]}, id="one-pair"),
]


@DTYPES
@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "dim", "options"), MROPE)
def test_mrope(isa, seed, tokens, heads, kv_heads, dim, options, dtype):
    q, k = (torch.randn(tokens, n, dim).to(dtype) for n in (heads, kv_heads))
    for largest in (100, 200_000):
        positions = torch.randint(0, largest, (3, tokens))
        compare(amc.ops.mrope, naive_mrope, reference.mrope, q, k, positions, **options)


@DTYPES
@pytest.mark.parametrize(("tokens", "dim"), [(1, 4), (17, 72), (16, 64), (33, 80), (15, 8)])
def test_vision_rope(isa, seed, tokens, dim, dtype):
    q, k = (torch.randn(tokens, 3, dim).to(dtype) for _ in range(2))
    positions = torch.randint(0, 64, (2, tokens))
    compare(amc.ops.vision_rope, naive_vision, reference.vision_rope, q, k, positions)


def test_axes_follow_the_published_pattern():
    """T H W ten times, then T H."""
    axes = [reference.mrope_axis(i, QWEN["section"]) for i in range(32)]
    assert axes == [0, 1, 2] * 10 + [0, 1]
    q = torch.ones(1, 1, 64)
    for axis in range(3):
        positions = torch.zeros(3, 1, dtype=torch.int64)
        positions[axis] = 5
        moved = (amc.ops.mrope(q, q, positions, **QWEN)[0][0, 0, :32] != 1).tolist()
        assert moved == [a == axis for a in axes]


def test_against_transformers(seed):
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    config = pytest.importorskip("transformers.models.qwen3_5.configuration_qwen3_5").Qwen3_5TextConfig()
    embedding = modeling.Qwen3_5TextRotaryEmbedding(config)
    q, k = torch.randn(19, 4, config.head_dim), torch.randn(19, 2, config.head_dim)
    positions = torch.randint(0, 500, (3, 19))
    cos, sin = embedding(q, positions[:, None])
    theirs = modeling.apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    parameters = config.rope_parameters
    options = {
        "rotary_dim": cos.shape[-1],
        "theta": parameters["rope_theta"],
        "section": parameters.get("mrope_section", [11, 11, 10]),
    }
    ours, truth = (f(q, k, positions, **options) for f in (amc.ops.mrope, reference.mrope))
    for a, b, c in zip(ours, theirs, truth, strict=True):
        assert_as_good_as(a, b[0].transpose(0, 1), c, name="transformers")


OPERATORS = pytest.mark.parametrize("vision", [False, True], ids=["mrope", "vision"])


def turn(vision, q, k, positions):
    return amc.ops.vision_rope(q, k, positions) if vision else amc.ops.mrope(q, k, positions, **QWEN)


@OPERATORS
@pytest.mark.parametrize("form", ["int32", "one-axis", "expanded", "strided"])
def test_forms_of_positions(seed, vision, form):
    q = torch.randn(9, 2, 64)
    one = torch.randint(0, 999, (9,))
    positions = one.repeat(3 - vision, 1)
    expected = turn(vision, q, q, positions)
    other = {
        "int32": positions.int(),
        "one-axis": one,
        "expanded": one.expand(3 - vision, 9),
        "strided": positions.repeat_interleave(2, dim=1)[:, ::2],
    }[form]
    assert all(map(torch.equal, expected, turn(vision, q, q, other)))


@OPERATORS
@given(seed=st.integers(0, 2**31), shift=st.integers(0, 10_000), tokens=st.integers(0, 20))
def test_laws(vision, seed, shift, tokens):
    """Lengths stay, position 0 changes nothing, and the score of two tokens depends on their distance alone."""
    torch.manual_seed(seed)
    q, k = torch.randn(tokens, 2, 64), torch.randn(tokens, 1, 64)
    positions = torch.randint(0, 1000, (3 - vision, tokens))
    y_q, y_k = turn(vision, q, k, positions)
    torch.testing.assert_close(y_q.norm(dim=-1), q.norm(dim=-1))
    assert all(map(torch.equal, (q, k), turn(vision, q, k, torch.zeros_like(positions))))
    z_q, z_k = turn(vision, q, k, positions + shift)
    scores = [torch.einsum("thd,sd->hts", a.double(), b[:, 0].double()) for a, b in ((y_q, y_k), (z_q, z_k))]
    torch.testing.assert_close(*scores, atol=1e-4, rtol=1e-4)


@OPERATORS
def test_strided_inputs_threads_and_gradients(seed, threads, vision):
    wide = torch.randn(40, 5, 80)
    q, k = wide[:, :3, 8:72], wide[:, 3:, 8:72]
    positions = torch.randint(0, 999, (3 - vision, 40))
    found = turn(vision, q, k, positions)
    _amcore.set_num_threads(3)
    assert all(map(torch.equal, found, turn(vision, q.contiguous(), k.contiguous(), positions)))
    upstream = [torch.ones(1, 1, 1).expand(q.shape), torch.ones(64, 2, 40).permute(2, 1, 0)]
    function = lambda a, b: turn(vision, a, b, positions)  # noqa: E731
    expected = run(function, q, k, [x.contiguous() for x in upstream])
    assert all(map(torch.equal, expected, run(function, q, k, upstream)))


@OPERATORS
def test_one_output_used_and_inputs_untouched(seed, vision):
    q, k = (torch.randn(6, 1, 64, requires_grad=True) for _ in range(2))
    kept = [x.detach().clone() for x in (q, k)]
    positions = torch.arange(6)
    out = turn(vision, q, k, positions)
    out[0].sum().backward()
    assert k.grad is None or (k.grad == 0).all()
    assert all(map(torch.equal, kept, (q, k))) and out[0].data_ptr() != q.data_ptr()


@OPERATORS
def test_checkpoint_compile_meta_and_empty(seed, vision):
    q, k, positions = torch.randn(6, 2, 64), torch.randn(6, 1, 64), torch.arange(6)
    upstream = [torch.randn_like(q), torch.randn_like(k)]
    function = lambda a, b: turn(vision, a, b, positions)  # noqa: E731
    expected = run(function, q, k, upstream)
    again = run(lambda *a: checkpoint(function, *a, use_reentrant=False), q, k, upstream)
    compiled = run(torch.compile(function, fullgraph=True, backend="aot_eager"), q, k, upstream)
    assert all(map(torch.equal, expected, again)) and all(map(torch.equal, expected, compiled))
    assert turn(vision, *(x.to("meta") for x in (q, k, positions)))[1].shape == k.shape
    none = turn(vision, q[:0], k[:0], positions[:0])
    assert none[0].shape == (0, 2, 64) and turn(vision, q, k[:, :0], positions)[1].shape == (6, 0, 64)


@OPERATORS
def test_second_derivative(vision):
    """Rotation is linear in q and k: the derivative of its gradient with respect to them does not exist."""
    q = torch.randn(6, 1, 64, requires_grad=True)
    first = torch.autograd.grad(turn(vision, q, q, torch.arange(6))[0].sum(), q, create_graph=True)[0]
    assert not first.requires_grad


Q, P = torch.zeros(4, 2, 64), torch.zeros(3, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"k": torch.zeros(5, 2, 64)}, ValueError, "k has 5 tokens, q has 4"),
        ({"k": torch.zeros(4, 2, 60)}, ValueError, "k has head dim 60, q has 64"),
        ({"k": Q.bfloat16()}, TypeError, "k is bfloat16, q is float32"),
        ({"q": Q.double(), "k": Q.double()}, TypeError, "q is float64"),
        ({"q": Q[0]}, ValueError, "q has 2 axes, 3 are needed"),
        ({"q": torch.zeros(4, 64, 2).transpose(1, 2)}, ValueError, "q has stride 2 on its last axis"),
        ({"position_ids": P.float()}, TypeError, "position_ids is float32"),
        ({"position_ids": P[:2]}, ValueError, "position_ids has 2 rows, 3 are needed"),
        ({"position_ids": P[:, :3]}, ValueError, "position_ids has 3 tokens, q has 4"),
        ({"position_ids": P[None]}, ValueError, "position_ids has 3 axes, 1 or 2 are needed"),
        ({"position_ids": [0]}, TypeError, "argument 'position_ids' must be a torch tensor, not list"),
        ({"rotary_dim": 66}, ValueError, "rotary_dim is 66"),
        ({"rotary_dim": 7}, ValueError, "rotary_dim is 7"),
        ({"rotary_dim": 0}, ValueError, "rotary_dim is 0"),
        ({"theta": 0.0}, ValueError, "theta is 0"),
        ({"theta": float("inf")}, ValueError, "theta is inf"),
        ({"section": [11, 11]}, ValueError, "section has 2 numbers, 3 are needed"),
        ({"section": [-1, 11, 10]}, ValueError, r"section\[0\] is -1"),
    ],
)
def test_mrope_errors(changes, error, words):
    with pytest.raises(error, match=f"^mrope: {words}"):
        amc.ops.mrope(**{"q": Q, "k": Q, "position_ids": P, **QWEN, **changes})


def test_vision_errors():
    with pytest.raises(ValueError, match=r"^vision_rope: position_ids has 3 rows, 2 are needed"):
        amc.ops.vision_rope(Q, Q, P)
    with pytest.raises(ValueError, match=r"^vision_rope: rotary_dim is 6, a multiple of 4"):
        amc.ops.vision_rope(torch.zeros(4, 1, 6), torch.zeros(4, 1, 6), P[:2])
    with pytest.raises(NotImplementedError, match="rotary_dim is 1024, at most 512 is there"):
        amc.ops.vision_rope(torch.zeros(4, 1, 1024), torch.zeros(4, 1, 1024), P[:2])


def test_reference_gradient():
    q, k = (torch.randn(2, 1, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    options = {"rotary_dim": 8, "theta": 1e4, "section": [2, 1, 1]}
    assert torch.autograd.gradcheck(lambda q, k: reference.mrope(q, k, torch.arange(2), **options), (q, k))
