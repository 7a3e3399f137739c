"""qk_norm_mrope against float64, the two operators that it joins and transformers, and what its callers rely on."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import automodel_c as amc
from automodel_c import _amcore
from automodel_c.reference import rope as reference
from tests.numerics import assert_as_good_as, draws_for, measure
from tests.ops.test_norm import naive_rms
from tests.ops.test_rope import MROPE, QWEN, naive_mrope

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
PARTS = ("q", "k", "dq", "dk", "dq_weight", "dk_weight")


def naive(q, k, q_weight, k_weight, position_ids, *, eps=1e-6, zero_centered=True, **rope):
    """transformers' eager code: the norm rounds to q's dtype, then the turn."""
    options = {"eps": eps, "zero_centered": zero_centered}
    return naive_mrope(naive_rms(q, q_weight, **options), naive_rms(k, k_weight, **options), position_ids, **rope)


def draw(tokens, heads, dim, dtype, weight_dtype=None, device="cpu"):
    """q, k, q_weight, k_weight."""
    shapes = [(tokens, heads[0], dim), (tokens, heads[1], dim), (dim,), (dim,)]
    kinds = [dtype, dtype, weight_dtype or dtype, weight_dtype or dtype]
    return [torch.randn(s, device=device).to(d) for s, d in zip(shapes, kinds, strict=True)]


def run(function, inputs, upstream, positions, **options):
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = function(*inputs, positions, **options)
    upstream = [g.to(y.dtype) for g, y in zip(upstream, outputs, strict=True)]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, inputs, upstream)]


def compare(draws, positions, **options):
    """The error rule over independent draws of the same shapes: norms of all together, the largest element in their
    median, since small heads cancel and one draw's worst is its one unlucky number, of the two passes as well."""
    rows = [[], [], []]
    for inputs in draws:
        upstream = [torch.randn_like(x) for x in inputs[:2]]
        wide = [x.double() for x in inputs]
        rows[0].append(run(amc.ops.qk_norm_mrope, inputs, upstream, positions, **options))
        rows[1].append(run(naive, inputs, upstream, positions, **options))
        rows[2].append(run(reference.qk_norm_mrope, wide, upstream, positions, **options))
    parts = [list(zip(*row, strict=True)) for row in rows]  # by part, then draw
    for name, *kinds in zip(PARTS, *parts, strict=True):
        each = list(zip(*kinds, strict=True))
        whole = measure(*(torch.cat([x.reshape(-1) for x in kind]) for kind in kinds))
        assert whole["ours_fro"] <= whole["limit_fro"], f"{name}: {whole}"
        largest = sorted(m["ours_max"] / m["limit_max"] for m in (measure(*draw) for draw in each))
        assert largest[len(largest) // 2] <= 1, f"{name}: largest elements are {largest[len(largest) // 2]:.2f} times"


def ours(inputs, positions, **options):
    return amc.ops.qk_norm_mrope(*inputs, positions, **QWEN, **options)


@DTYPES
@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "dim", "options"), MROPE)
def test_error_rule(isa, seed, tokens, heads, kv_heads, dim, options, dtype):
    for largest in (100, 200_000):
        draws = [draw(tokens, (heads, kv_heads), dim, dtype) for _ in range(draws_for(tokens * dim, 512))]
        compare(draws, torch.randint(0, largest, (3, tokens)), **options)


@DTYPES
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=["w-f32", "w-bf16"])
@pytest.mark.parametrize("options", [{"eps": 0.5}, {"zero_centered": False}, {"eps": 0.0}], ids=str)
def test_options(isa, seed, options, weight_dtype, dtype):
    inputs = draw(40, (4, 2), 80, dtype, weight_dtype)
    compare([inputs], torch.randint(0, 999, (3, 40)), **QWEN, **options)


@pytest.mark.parametrize("dim", [1500, 2048])
def test_heads_beyond_a_tile(isa, seed, dim):
    compare([draw(3, (2, 1), dim, torch.bfloat16)], torch.arange(3), **QWEN | {"rotary_dim": 512})


def test_one_operator_is_two(seed):
    """In float32 nothing rounds in between."""
    q, k, *weights = draw(50, (4, 2), 256, torch.float32)
    positions = torch.randint(0, 5000, (3, 50))
    normed = [amc.ops.rms_norm(x, w) for x, w in zip((q, k), weights, strict=True)]
    for x, y in zip(ours([q, k, *weights], positions), amc.ops.mrope(*normed, positions, **QWEN), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


def test_against_transformers(seed):
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    config = pytest.importorskip("transformers.models.qwen3_5.configuration_qwen3_5").Qwen3_5TextConfig()
    embedding, norms = modeling.Qwen3_5TextRotaryEmbedding(config), []
    q, k, *weights = draw(19, (4, 2), config.head_dim, torch.float32)
    for weight in weights:
        norms.append(modeling.Qwen3_5RMSNorm(config.head_dim, eps=config.rms_norm_eps))
        norms[-1].weight.data.copy_(weight)
    positions = torch.randint(0, 500, (3, 19))
    cos, sin = embedding(q, positions[:, None])
    normed = [norm(x).transpose(0, 1)[None] for norm, x in zip(norms, (q, k), strict=True)]
    theirs = modeling.apply_rotary_pos_emb(*normed, cos, sin)
    options = {
        "rotary_dim": cos.shape[-1],
        "theta": config.rope_parameters["rope_theta"],
        "section": config.rope_parameters.get("mrope_section", [11, 11, 10]),
        "eps": config.rms_norm_eps,
    }
    made, truth = (f(q, k, *weights, positions, **options) for f in (amc.ops.qk_norm_mrope, reference.qk_norm_mrope))
    for a, b, c in zip(made, theirs, truth, strict=True):
        assert_as_good_as(a, b[0].transpose(0, 1).detach(), c, name="transformers")


@given(seed=st.integers(0, 2**31), shift=st.integers(0, 10_000), tokens=st.integers(1, 20))
def test_laws(seed, shift, tokens):
    """Heads have length sqrt(D) where weights are 0, and the score of two tokens depends on their distance alone."""
    torch.manual_seed(seed)
    q, k, *_ = draw(tokens, (2, 1), 64, torch.float32)
    weights = [torch.zeros(64)] * 2
    positions = torch.randint(0, 1000, (3, tokens))
    y_q, y_k = ours([q, k, *weights], positions)
    torch.testing.assert_close(y_q.norm(dim=-1), torch.full((tokens, 2), 8.0), rtol=1e-4, atol=1e-4)
    z_q, z_k = ours([q, k, *weights], positions + shift)
    scores = [torch.einsum("thd,sd->hts", a.double(), b[:, 0].double()) for a, b in ((y_q, y_k), (z_q, z_k))]
    torch.testing.assert_close(*scores, atol=1e-3, rtol=1e-4)


@DTYPES
def test_strides_threads_and_gradients(seed, threads, dtype):
    """Bits depend neither on strides nor on threads."""
    wide = torch.randn(150, 5, 160).to(dtype)
    q, k = wide[:, :3, 8:72], wide[:, 3:, 88:152]
    weights = [torch.randn(64).to(dtype) for _ in range(2)]
    positions = torch.randint(0, 999, (3, 150))
    upstream = [torch.ones(1, 1, 1, dtype=dtype).expand(q.shape), torch.ones(64, 2, 150, dtype=dtype).permute(2, 1, 0)]
    function = lambda *a, **o: amc.ops.qk_norm_mrope(*a, **o)  # noqa: E731
    leaves = [x.requires_grad_() for x in (q, k, *weights)]
    outputs = function(*leaves, positions, **QWEN)
    found = [*outputs, *torch.autograd.grad(outputs, leaves, upstream)]
    _amcore.set_num_threads(3)
    plain = [x.detach().contiguous() for x in leaves]
    assert all(map(torch.equal, found, run(function, plain, [g.contiguous() for g in upstream], positions, **QWEN)))


@pytest.mark.parametrize("form", ["int32", "one-axis", "expanded", "strided"])
def test_forms_of_positions(seed, form):
    inputs, one = draw(9, (2, 1), 64, torch.float32), torch.randint(0, 999, (9,))
    positions = one.repeat(3, 1)
    other = {
        "int32": positions.int(),
        "one-axis": one,
        "expanded": one.expand(3, 9),
        "strided": positions.repeat_interleave(2, dim=1)[:, ::2],
    }[form]
    assert all(map(torch.equal, ours(inputs, positions), ours(inputs, other)))


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (3,), (2, 3), (0, 1)], ids=str)
def test_only_what_is_asked(seed, frozen):
    inputs, positions = draw(70, (4, 2), 64, torch.float32), torch.arange(70)
    upstream = [torch.randn_like(x) for x in inputs[:2]]
    whole = run(lambda *a, **o: amc.ops.qk_norm_mrope(*a, **o), inputs, upstream, positions, **QWEN)[2:]
    leaves = [x.clone().requires_grad_(i not in frozen) for i, x in enumerate(inputs)]
    torch.autograd.backward(ours(leaves, positions), upstream)
    for i, (leaf, grad) in enumerate(zip(leaves, whole, strict=True)):
        assert leaf.grad is None if i in frozen else torch.equal(leaf.grad, grad)


def test_one_output_used_and_inputs_untouched(seed):
    inputs = [x.requires_grad_() for x in draw(6, (1, 1), 64, torch.float32)]
    kept = [x.detach().clone() for x in inputs]
    ours(inputs, torch.arange(6))[0].sum().backward()
    assert (inputs[1].grad == 0).all() and (inputs[3].grad == 0).all() and (inputs[0].grad != 0).any()
    assert all(map(torch.equal, kept, (x.detach() for x in inputs)))


def test_nan_stays_in_its_head(seed):
    inputs, positions = draw(6, (2, 1), 64, torch.float32), torch.arange(6)
    whole = ours(inputs, positions)
    inputs[0][2, 1, 3] = torch.nan
    found = ours(inputs, positions)
    assert found[0][2, 1].isnan().all() and torch.equal(found[1], whole[1])
    found[0][2, 1] = whole[0][2, 1]
    assert torch.equal(found[0], whole[0])


def test_checkpoint_compile_meta_and_empty(seed):
    inputs, positions = draw(6, (2, 1), 64, torch.float32), torch.arange(6)
    upstream = [torch.randn_like(x) for x in inputs[:2]]
    function = lambda *a: amc.ops.qk_norm_mrope(*a, **QWEN)  # noqa: E731
    expected = run(function, inputs, upstream, positions)
    again = run(lambda *a: checkpoint(function, *a, use_reentrant=False), inputs, upstream, positions)
    compiled = run(torch.compile(function, fullgraph=True, backend="aot_eager"), inputs, upstream, positions)
    assert all(map(torch.equal, expected, again)) and all(map(torch.equal, expected, compiled))
    assert ours([x.to("meta") for x in inputs], positions.to("meta"))[1].shape == inputs[1].shape
    none = [x[:0].requires_grad_() for x in inputs[:2]] + [x.requires_grad_() for x in inputs[2:]]
    outputs = ours(none, positions[:0])
    assert outputs[0].shape == (0, 2, 64)
    grads = torch.autograd.grad(outputs, none, [torch.zeros_like(x) for x in outputs])
    assert all((g == 0).all() for g in grads[2:])
    without = ours([inputs[0], inputs[1][:, :0], *inputs[2:]], positions)
    assert without[1].shape == (6, 0, 64) and torch.equal(without[0], expected[0])


def test_second_derivative_is_refused():
    inputs = [x.requires_grad_() for x in draw(6, (1, 1), 64, torch.float32)]
    first = torch.autograd.grad(ours(inputs, torch.arange(6))[0].sum(), inputs[0], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="qk_norm_mrope_backward: a second derivative is not implemented"):
        first.sum().backward()


Q, P, W = torch.zeros(4, 2, 64), torch.zeros(3, 4, dtype=torch.int64), torch.zeros(64)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"k": torch.zeros(5, 2, 64)}, ValueError, "k has 5 tokens, q has 4"),
        ({"k": Q.bfloat16()}, TypeError, "k is bfloat16, q is float32"),
        ({"q": Q[0]}, ValueError, "q has 2 axes, 3 are needed"),
        ({"q_weight": W.double()}, TypeError, "q_weight is float64, float32 or bfloat16 is needed"),
        ({"q_weight": W[:63]}, ValueError, "q_weight has 63 elements, head dim is 64"),
        ({"k_weight": W[None]}, ValueError, "k_weight has 2 axes, 1 is needed"),
        ({"k_weight": torch.zeros(128)[::2]}, ValueError, "k_weight has stride 2, 1 is needed"),
        ({"q_weight": [0.0]}, TypeError, "argument 'q_weight' must be a torch tensor, not list"),
        ({"position_ids": P[:2]}, ValueError, "position_ids has 2 rows, 3 are needed"),
        ({"rotary_dim": 66}, ValueError, "rotary_dim is 66"),
        ({"section": [11, 11]}, ValueError, "section has 2 numbers, 3 are needed"),
        ({"section": [-1, 11, 10]}, ValueError, r"section\[0\] is -1"),
        ({"eps": -1.0}, ValueError, "eps is -1, it lies in"),
        ({"eps": float("nan")}, ValueError, "eps is nan"),
    ],
)
def test_errors(changes, error, words):
    arguments = {"q": Q, "k": Q, "q_weight": W, "k_weight": W, "position_ids": P, **QWEN, **changes}
    with pytest.raises(error, match=f"^qk_norm_mrope: {words}"):
        amc.ops.qk_norm_mrope(**arguments)


BACKWARD = {
    "dq": Q, "dk": Q, "dq_weight": W, "dk_weight": W, "partials": torch.zeros(1, 2, 64, dtype=torch.float64),
    "dq_out": Q, "dk_out": Q, "q": Q, "k": Q, "q_weight": W, "k_weight": W, "rstd": torch.zeros(4, 4),
    "position_ids": P,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"partials": torch.zeros(1, 2, 64)}, ValueError, r"partials must be contiguous float64 \[k, 2, 64\]"),
        ({"partials": torch.zeros(0, 2, 64).double()}, ValueError, "partials must be"),
        ({"rstd": torch.zeros(4, 3)}, ValueError, r"rstd must be contiguous float32 \[4, 4\]"),
        ({"dq_out": Q[:, :1]}, ValueError, "dq_out and dk_out have 1 and 2 heads, q and k 2 and 2"),
        ({"dk_out": Q[:3]}, ValueError, "dk_out has 3 tokens, q has 4"),
        ({"dq": Q.bfloat16()}, ValueError, "dq must be contiguous"),
        ({"dk_weight": W[:3]}, ValueError, "dk_weight has 3 elements"),
    ],
)
def test_backward_errors(changes, error, words):
    arguments = {name: x.clone() for name, x in (BACKWARD | changes).items()}
    with pytest.raises(error, match=f"^qk_norm_mrope: {words}"):
        _amcore.qk_norm_mrope_backward(*arguments.values(), **QWEN, zero_centered=True)


def test_reference_gradient():
    inputs = [x.double().requires_grad_() for x in draw(2, (1, 1), 8, torch.float32)]
    options = {"rotary_dim": 4, "theta": 1e4, "section": [2, 1, 1]}
    assert torch.autograd.gradcheck(lambda *x: reference.qk_norm_mrope(*x, torch.arange(2), **options), inputs)
