"""The gated delta rule against float64, by the error rule, and what must hold to the bit.

The plain twin is transformers' own fallback, torch_chunk_gated_delta_rule, run per document: chunks of 64 in fp32 from
inputs in the operator's dtype, which is what a user without this operator trains with.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from automodel_c import Pack, _amcore, docs_from_ids
from automodel_c.ops import _alloc, gdn
from automodel_c.ops.gdn import gated_delta_rule
from automodel_c.reference.gdn import closed_form
from automodel_c.reference.gdn import gated_delta_rule as reference
from tests.conftest import MACHINE_ISAS
from tests.guards import CheckedAllocator, Guards
from tests.numerics import assert_as_good_as, draws_for, pool
from tests.strategies import doc_ids, packed_docs

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = pytest.mark.parametrize("kind", [F32, BF16], ids=["fp32", "bf16"])
NAMES = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state")


@pytest.fixture(autouse=True, scope="module")
def _one_thread_for_references():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[(isa, kind) for isa in MACHINE_ISAS[:3] for kind in (F32, BF16)], ids=str)
def dtype(request):
    """Every row of kernels that this machine has, with each dtype."""
    before = _amcore.build_info()["isa"]
    _amcore.set_isa(request.param[0])
    yield request.param[1]
    _amcore.set_isa(before)


def offsets(lengths):
    return np.cumsum([0, *lengths])


def docs_of(cu_seqlens):
    return np.stack([cu_seqlens[:-1], cu_seqlens[1:]], 1)


def draw(tokens, docs=1, heads=(1, 2), dims=(16, 16), dtype=F32, beta_dtype=None, state=True):
    """q, k, v, g, beta, initial_state (or None), and the gradients of both results; seeded by the caller."""
    (hk, hv), (dk, dv) = heads, dims
    rows = [torch.randn(tokens, h, d).to(dtype) for h, d in ((hk, dk), (hk, dk), (hv, dv))]
    g = -torch.rand(tokens, hv) * torch.rand(hv)
    beta = torch.rand(tokens, hv).to(beta_dtype or dtype)
    initial, dfinal = torch.randn(2, docs, hv, dk, dv)
    return [*rows, g, beta, initial if state else None, torch.randn(tokens, hv, dv).to(dtype), dfinal]


def run(function, inputs, **options):
    """o, final state, and the gradients of q, k, v, g, beta and (where there is one) the initial state."""
    *leaves, initial, do, dfinal = inputs
    leaves = [x.detach().requires_grad_() for x in leaves]
    initial = None if initial is None else initial.detach().requires_grad_()
    o, final = function(*leaves, initial_state=initial, **options)
    wanted = leaves if initial is None else [*leaves, initial]
    grads = torch.autograd.grad((o, final), wanted, (do, dfinal), allow_unused=True)
    return [
        o.detach(),
        final.detach(),
        *(torch.zeros_like(x) if d is None else d for x, d in zip(wanted, grads, strict=True)),
    ]


def ours(inputs, **options):
    return run(gated_delta_rule, inputs, output_final_state=True, **options)


def plain(q, k, v, g, beta, docs, *, initial_state=None, scale=None, qk_l2norm=True):
    """transformers' fallback per document; o is linear in the scale, which it does not take, and some of its versions
    take as many key heads as value heads alone."""
    fallback = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5").torch_chunk_gated_delta_rule
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    factor = 1.0 if scale is None else scale * q.shape[2] ** 0.5
    rows, finals, places = [v[:0]], [], [torch.arange(0)]
    for n, (start, end) in enumerate(docs):
        state = None if initial_state is None else initial_state[n][None]
        if start == end:
            finals.append(v.new_zeros(1, v.shape[1], q.shape[2], v.shape[2], dtype=F32) if state is None else state)
            continue
        o, final = fallback(
            *(x[start:end][None] for x in (q, k, v, g, beta)), initial_state=state, output_final_state=True,
            use_qk_l2norm_in_kernel=qk_l2norm,
        )  # fmt: skip
        rows.append(factor * o[0])
        finals.append(final)
        places.append(torch.arange(int(start), int(end)))
    return torch.zeros_like(v).index_copy(0, torch.cat(places), torch.cat(rows)), torch.cat(finals)


def check(inputs, docs, *, more=(), made=None, formula=None, **options):
    """The error rule for both results and every gradient, over `inputs` and `more` draws; returns the first's."""
    draws, formula = [inputs, *more], formula or {}
    made = [ours(x, **formula, **options) for x in draws] if made is None else [made]
    naive = [run(plain, x, docs=docs, **formula) for x in draws]
    wide = [[None if t is None else t.double() for t in x] for x in draws]
    truth = [run(reference, x, docs=docs, **formula) for x in wide]
    for name, x, twin, true in zip(NAMES, pool(made), pool(naive), pool(truth), strict=False):
        assert_as_good_as(x, twin, true, name=name)
    return made[0]


def same_bits(xs, ys):
    return all(
        torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
        for x, y in zip(xs, ys, strict=True)
    )


SHAPES = [((1, 1), (8, 8), True), ((2, 4), (16, 32), True), ((2, 4), (16, 32), False), ((1, 3), (24, 40), True),
          ((1, 1), (128, 128), True), ((1, 1), (128, 128), False), ((1, 1), (256, 72), True),
          ((1, 2), (72, 256), True)]  # fmt: skip


@pytest.mark.parametrize(("heads", "dims", "state"), SHAPES, ids=lambda x: str(x))
def test_gated_delta_rule_error_rule(seed, dtype, heads, dims, state):
    cu = offsets([66, 0, 21])
    inputs, *more = [draw(cu[-1], 3, heads, dims, dtype, state=state) for _ in range(3)]  # first tokens' dg is largest
    check(inputs, docs_of(cu), more=more, cu_seqlens=cu)


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 15, 16, 17, 63, 64, 65, 128, 129])
def test_edges_of_chunks(seed, dtype, tokens):
    inputs, *more = [draw(tokens, dtype=dtype) for _ in range(1 + draws_for(tokens))]
    check(inputs, [(0, tokens)], more=more)


@pytest.mark.parametrize("formula", [{"scale": -0.7}, {"scale": 0.0}, {"qk_l2norm": False}], ids=str)
def test_scale_and_norm(seed, dtype, formula):
    draws = [draw(70, dtype=dtype) for _ in range(12)]
    for inputs in draws if "qk_l2norm" in formula else ():
        inputs[:2] = [0.2 * x for x in inputs[:2]]
    check(draws[0], [(0, 70)], more=draws[1:], formula=formula)


def test_beta_in_float32(seed, dtype):
    inputs, *more = [draw(70, dtype=dtype, beta_dtype=F32) for _ in range(4)]
    made = check(inputs, [(0, 70)], more=more)
    assert made[6].dtype == F32 and made[5].dtype == F32


def test_zero_rows_of_q_and_k(seed, dtype):
    draws = [draw(70, dtype=dtype) for _ in range(4)]
    for inputs in draws:
        inputs[0][3:9] = 0
        inputs[1][5:20] = 0
    check(draws[0], [(0, 70)], more=draws[1:])


# What users of other kernels ran into.


def gated(seed, dtype, g, tokens=64, more=6):
    def one():
        inputs = draw(tokens, dtype=dtype)
        inputs[3] = g(torch.arange(tokens)).float()[:, None].expand(tokens, 2)
        return inputs

    inputs, *others = [one() for _ in range(more)]
    made = check(inputs, [(0, tokens)], more=others)
    assert all(x.isfinite().all() for x in made)


def test_decay_of_a_millionth_of_a_millionth_each_token(seed, dtype):
    gated(seed, dtype, lambda t: torch.full(t.shape, math.log(1e-12)))


def test_first_gate_wipes_the_state_and_the_rest_keep_it(seed, dtype):
    gated(seed, dtype, lambda t: torch.where(t == 0, -90.0, 0.0))


@pytest.mark.parametrize("gate", [-50.0, -90.0])
def test_very_negative_gates(seed, dtype, gate):
    gated(seed, dtype, lambda t: torch.full(t.shape, gate), tokens=130)


def test_small_gates_after_a_large_one_keep_their_digits(seed, isa):
    inputs = draw(64)
    inputs[3] = torch.where(torch.arange(64) == 5, -90.0, -1e-3)[:, None].expand(64, 2)
    o = ours(inputs)[0]
    truth = run(reference, [x.double() for x in inputs], docs=[(0, 64)])[0]
    assert (o - truth).norm() < 1e-6 * truth.norm()


@pytest.mark.parametrize("tokens", [64, 128, 256])
@pytest.mark.parametrize("dims", [(100 // 8 * 8, 96), (64, 64)], ids=str)
def test_gradients_of_gates_and_betas(seed, isa, tokens, dims):
    inputs, *more = [draw(tokens, heads=(1, 1), dims=dims) for _ in range(3)]
    check(inputs, [(0, tokens)], more=more)


def test_gradients_of_gates_and_betas_over_many_chunks(seed):
    check(draw(1024, heads=(1, 1), dims=(64, 64), state=False), [(0, 1024)])


def split_at(*cuts):
    """The rule over the parts between the cuts, each from the state that the one before left."""

    def split(*tensors, initial_state, **options):
        rows, state = [], initial_state
        for part in zip(*(torch.tensor_split(x, cuts) for x in tensors), strict=True):
            o, state = gated_delta_rule(*part, initial_state=state, **options)
            rows.append(o)
        return torch.cat(rows), state

    return split


@pytest.mark.parametrize("first", [256, 100])
def test_split_run_is_the_whole_run(seed, dtype, first):
    inputs = draw(512, dtype=dtype)
    made = run(split_at(first), inputs, output_final_state=True)
    check(inputs, [(0, 512)], made=made)
    assert first % 64 or same_bits(made, ours(inputs))


@pytest.mark.parametrize("tokens", [1023, 1024, 1025, 2048, 2150])
def test_kept_states_are_the_states(seed, dtype, tokens):
    inputs = draw(tokens + 7, 2, dtype=dtype)
    made = ours(inputs, cu_seqlens=[0, 7, tokens + 7])
    alone = [x[1:] if i in (5, 7) else x[7:] for i, x in enumerate(inputs)]
    parts = run(split_at(*range(512, tokens, 512)), alone, output_final_state=True)
    assert same_bits([x[1:] if i in (1, 7) else x[7:] for i, x in enumerate(made)], parts)


def test_packed_documents_do_not_leak(seed, dtype):
    cu = offsets([100, 60])
    inputs, *more = [draw(160, 2, dtype=dtype) for _ in range(2)]
    check(inputs, docs_of(cu), more=more, cu_seqlens=cu)
    joined = gated_delta_rule(*inputs[:5])[0]  # no boundaries from the call before
    alone = gated_delta_rule(*(x[100:] for x in inputs[:5]))[0]
    assert not same_bits([joined[100:]], [alone])
    assert same_bits([gated_delta_rule(*inputs[:5], cu_seqlens=cu)[0][100:]], [alone])


def test_tiny_documents_of_large_heads(seed, dtype):
    cu = np.array([0, 57, 59, 64])
    inputs, *more = [draw(64, 3, (4, 4), (128, 128), dtype) for _ in range(2)]
    check(inputs, docs_of(cu), more=more, cu_seqlens=cu)


def test_offsets_beyond_thirty_one_bits(seed):
    """Rows 2^24 elements apart: the last one's offset does not fit in 32 bits. Only the rows touched cost memory."""
    inputs = draw(140, heads=(1, 1), dtype=BF16)
    spread = list(inputs)
    for i in (0, 2, 6):
        memory = torch.empty(139 * (1 << 24) + 16, dtype=BF16)
        spread[i] = memory.as_strided((140, 1, 16), (1 << 24, 16, 1)).copy_(inputs[i])
    assert same_bits(ours(inputs), run(gated_delta_rule, spread, output_final_state=True))


def test_chunks_are_the_recurrence(seed, isa):
    inputs = draw(130, heads=(2, 2))
    o = ours(inputs)[0]
    assert (o - reference(*inputs[:5], [(0, 130)], initial_state=inputs[5])[0]).abs().max() < 1e-6


# Laws.


def test_without_decay_and_without_writing(seed, dtype):
    draws = [draw(70, dtype=dtype) for _ in range(4)]
    for inputs in draws:
        inputs[3] = torch.zeros_like(inputs[3])
    check(draws[0], [(0, 70)], more=draws[1:])
    for inputs in draws:
        inputs[4] = torch.zeros_like(inputs[4])
    made = check(draws[0], [(0, 70)], more=draws[1:])
    assert torch.equal(made[1], draws[0][5]) and not made[4].any() and made[6].any()


@pytest.mark.parametrize("state", [True, False], ids=["state", "no-state"])
def test_empty_documents_pass_their_state(seed, dtype, state):
    cu = [0, 0, 5, 5]
    inputs = draw(5, 3, dtype=dtype, state=state)
    _, final, *_, last = ours(inputs, cu_seqlens=cu)
    expected = inputs[5] if state else torch.zeros_like(final)
    assert torch.equal(final[[0, 2]], expected[[0, 2]]) and not torch.equal(final[1], expected[1])
    assert not state or torch.equal(last[[0, 2]], inputs[7][[0, 2]])


@DTYPES
@settings(max_examples=8)
@given(docs=packed_docs(300, 4), heads=st.sampled_from([(1, 1), (1, 3), (2, 4)]), state=st.booleans())
def test_document_alone_is_document_in_a_pack(kind, docs, heads, state):
    torch.manual_seed(docs.tokens)
    inputs = draw(docs.tokens, len(docs.lengths), heads, (16, 24), kind, state=state)
    packed = ours(inputs, cu_seqlens=docs.cu_seqlens)
    for n, (start, end) in enumerate(docs_of(np.array(docs.cu_seqlens))):
        rows, states = slice(start, end), slice(n, n + 1)
        alone = ours([None if x is None else x[states if i in (5, 7) else rows] for i, x in enumerate(inputs)])
        assert same_bits(alone, [x[states if i in (1, 7) else rows] for i, x in enumerate(packed)])


def test_permuting_documents_permutes_results(seed, dtype):
    lengths, order = [200, 1, 64, 0, 97], [4, 3, 0, 2, 1]
    cu = offsets(lengths)
    inputs = draw(cu[-1], 5, dtype=dtype)
    rows = torch.cat([torch.arange(cu[n], cu[n + 1]) for n in order])
    straight = ours(inputs, cu_seqlens=cu)
    moved = [x[order if i in (5, 7) else rows] for i, x in enumerate(inputs)]
    permuted = ours(moved, cu_seqlens=offsets([lengths[n] for n in order]))
    assert same_bits([x[order if i in (1, 7) else rows] for i, x in enumerate(straight)], permuted)


def test_neighbours_are_irrelevant(seed, dtype):
    cu = offsets([40, 210, 33])
    inputs = draw(cu[-1], 3, dtype=dtype)
    before = ours(inputs, cu_seqlens=cu)
    for i, x in enumerate(inputs):
        for part in ([0], [2]) if i in (5, 7) else (slice(0, 40), slice(250, 283)):
            x[part] = math.nan
    after = ours(inputs, cu_seqlens=cu)
    parts = [[1] if i in (1, 7) else slice(40, 250) for i in range(8)]
    assert same_bits(
        [x[p] for x, p in zip(before, parts, strict=True)], [x[p] for x, p in zip(after, parts, strict=True)]
    )


def test_threads_do_not_matter(seed, dtype, threads):
    cu = offsets([700, 3, 150])
    inputs = draw(cu[-1], 3, (1, 4), dtype=dtype)
    made = ours(inputs, cu_seqlens=cu)
    _amcore.set_num_threads(3)
    assert same_bits(made, ours(inputs, cu_seqlens=cu))


@DTYPES
@settings(max_examples=10)
@given(ids=doc_ids(300))
def test_padding_may_hold_anything(kind, ids):
    torch.manual_seed(len(ids))
    docs = docs_from_ids(ids)
    inputs = draw(len(ids), len(docs), dtype=kind)
    padding = torch.tensor(ids, dtype=torch.int64) == 0
    clean = ours(inputs, doc_ids=ids)
    for i, x in enumerate(inputs):
        if i not in (5, 7):
            x[padding] = math.nan
    made = ours(inputs, doc_ids=ids)
    assert same_bits(clean, made)
    assert not any(x[padding].any() for i, x in enumerate(made) if i not in (1, 7))
    cu = offsets([end - start for start, end in docs])
    squeezed = ours([x if i in (5, 7) else x[~padding] for i, x in enumerate(inputs)], cu_seqlens=cu)
    assert same_bits(squeezed, [x if i in (1, 7) else x[~padding] for i, x in enumerate(made)])


@pytest.mark.parametrize("dims", [(16, 16), (128, 72)], ids=str)
def test_strides(seed, dtype, dims):
    """q, k and v as slices of the convolution's one output; a gate and a beta that are columns of others."""
    cu, (dk, dv) = [0, 50, 51, 120], dims
    inputs = draw(120, 3, (2, 4), dims, dtype)
    mixed = torch.cat([x.flatten(1) for x in inputs[:3]], 1).split([2 * dk, 2 * dk, 4 * dv], 1)
    strided = [x.unflatten(1, (-1, d)) for x, d in zip(mixed, (dk, dk, dv), strict=True)]
    strided += [x.new_empty(*x.shape, 3)[..., 1].copy_(x) for x in inputs[3:5]]
    wide = inputs[5].new_empty(3, 4, 2, dk, 2 * dv)[:, :, 0, :, :dv].copy_(inputs[5])
    spread = (
        inputs[6].new_empty(*inputs[6].shape, 2)[..., 0].copy_(inputs[6])
    )  # a gradient whose last axis has a stride
    found = run(gated_delta_rule, [*strided, wide, spread, inputs[7]], output_final_state=True, cu_seqlens=cu)
    assert same_bits(ours(inputs, cu_seqlens=cu), found)
    ones = [*inputs[:6], torch.ones((), dtype=dtype).expand(120, 4, dv), inputs[7]]
    assert same_bits(ours(ones, cu_seqlens=cu), ours([*ones[:6], ones[6].clone(), ones[7]], cu_seqlens=cu))


def test_poisoned_workspace_changes_nothing(seed, dtype, monkeypatch):
    cu = offsets([128, 37, 0, 130])
    inputs = draw(cu[-1], 4, dims=(24, 40), dtype=dtype)
    poisoned = ours(inputs, cu_seqlens=cu)
    allocator = CheckedAllocator(Guards())
    monkeypatch.setattr(_alloc, "workspace", lambda n, device: allocator.workspace(n, device).zero_())
    assert same_bits(poisoned, ours(inputs, cu_seqlens=cu))
    allocator.guards.check()


def test_descriptions_of_a_pack_agree(seed):
    inputs = draw(12, 2)
    cu, ids = [0, 5, 12], [1] * 5 + [7] * 7
    by_offsets = ours(inputs, cu_seqlens=torch.tensor(cu, dtype=torch.int32))
    for options in ({"doc_ids": ids}, {"pack": Pack(cu_seqlens=cu)}, {"pack": Pack(doc_ids=np.array(ids))}):
        assert same_bits(by_offsets, ours(inputs, **options))


@pytest.mark.parametrize(("tokens", "cu"), [(0, [0]), (0, [0, 0, 0]), (3, [0, 0])])
def test_nothing_to_do(tokens, cu):
    made = ours(draw(tokens, len(cu) - 1), cu_seqlens=cu)
    assert not any(made[i].any() for i in (0, 2, 3, 4, 5, 6)) and made[1].shape[0] == len(cu) - 1


def test_many_documents(seed):
    cu = offsets(np.random.default_rng(0).integers(0, 7, 12_000))
    inputs = draw(cu[-1], 12_000, (1, 1), (8, 8), state=False)
    o = gated_delta_rule(*inputs[:5], cu_seqlens=cu)[0]
    last = slice(int(cu[-40]), int(cu[-1]))
    expected = gated_delta_rule(*(x[last] for x in inputs[:5]), cu_seqlens=cu[-40:] - cu[-40])[0]
    assert same_bits([o[last]], [expected])


# Errors.


def tensors(**changes):
    made = dict(zip(("q", "k", "v", "g", "beta"), draw(6, heads=(2, 4)), strict=False))
    made.update({name: change(made[name]) for name, change in changes.items()})
    return made.values()


STATE = {"initial_state": torch.zeros(1, 4, 16, 16)}
ERRORS = {
    "two-descriptions": ({"cu_seqlens": [0, 6], "doc_ids": [1] * 6}, {}, ValueError, "at most one"),
    "pack-kind": ({"pack": [0, 6]}, {}, TypeError, "argument 'pack' must be an automodel_c.Pack, not list"),
    "beyond-the-tokens": ({"cu_seqlens": [0, 7]}, {}, ValueError, "q has 6 tokens, the pack ends at 7"),
    "float-offsets": ({"cu_seqlens": torch.tensor([0.0, 6.0])}, {}, TypeError, "int32 or int64"),
    "half": ({}, {"q": lambda q: q.half()}, TypeError, "q is float16"),
    "mixed-dtypes": ({}, {"k": lambda k: k.bfloat16()}, TypeError, "k is bfloat16, q is float32"),
    "g-dtype": ({}, {"g": lambda g: g.bfloat16()}, TypeError, "g is bfloat16, float32 is needed"),
    "beta-dtype": ({}, {"beta": lambda b: b.bfloat16()}, TypeError, "beta is bfloat16, float32 or q's float32"),
    "key-dim": ({}, {n: lambda x: x[..., :12] for n in "qk"}, NotImplementedError, "key dim 12 .* multiples of 8"),
    "value-dim": ({}, {"v": lambda v: v.repeat(1, 1, 17)}, NotImplementedError, "value dim 272"),
    "last-axis": ({}, {"k": lambda k: k.transpose(1, 2).contiguous().transpose(1, 2)}, ValueError, "k has stride 2"),
    "heads": ({}, {"v": lambda v: v[:, :3]}, ValueError, "3 value heads are not a multiple of 2"),
    "k-heads": ({}, {"k": lambda k: k[:, :1]}, ValueError, "k has extent 1 on axis 1, 2 is needed"),
    "v-tokens": ({}, {"v": lambda v: v[:5]}, ValueError, "v has extent 5 on axis 0, 6 is needed"),
    "g-heads": ({}, {"g": lambda g: g[:, :2]}, ValueError, "g has extent 2 on axis 1, 4 is needed"),
    "beta-axes": ({}, {"beta": lambda b: b[0]}, ValueError, "beta has 1 axes, 2 are needed"),
    "device": ({}, {"k": lambda k: k.to("meta")}, ValueError, "k is on meta, q on cpu"),
    "scale": ({"scale": math.nan}, {}, ValueError, "scale is nan"),
    "kind": ({}, {"v": lambda v: v.numpy()}, TypeError, "argument 'v' must be a torch tensor"),
    "states": ({**STATE, "cu_seqlens": [0, 3, 6]}, {}, ValueError, "initial_state has extent 1 on axis 0, 2 is needed"),
    "state-dtype": ({"initial_state": STATE["initial_state"].double()}, {}, TypeError, "initial_state is float64"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "changes", "error", "words"), ERRORS.values(), ids=ERRORS)
def test_gated_delta_rule_errors(options, changes, error, words):
    with pytest.raises(error, match=words):
        gated_delta_rule(*tensors(**changes), **options)


def test_small_workspace_is_refused(guarded):
    *inputs, _, _, _ = draw(6)
    o, scratch = guarded((6, 2, 16)), torch.empty(1000, dtype=torch.uint8)
    with pytest.raises(ValueError, match="workspace has 1000 bytes"):
        _amcore.gated_delta_rule_forward(o, scratch, *inputs, [0, 6], scale=1.0, l2norm=True)
    assert o.isnan().all()


@pytest.mark.parametrize("docs", [[0, 6, 5], [3, 2], [0, 7], [-1, 3]])
def test_documents_are_checked_in_c(docs):
    q, k, v, *_ = draw(6)
    with pytest.raises(ValueError, match="docs"):
        _amcore.gated_delta_rule_workspace(q, v, docs, backward=False)
    with pytest.raises(ValueError, match="docs"):
        _amcore.gated_delta_rule_row(q, k, v, docs, backward=False)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_rows_have_the_names_of_instruction_sets(isa, backward):
    q, k, v, *_ = draw(6)
    row = _amcore.gated_delta_rule_row(q, k, v, [0, 6], backward=backward)
    assert row == _amcore.build_info()["isa"].removesuffix("_bf16")


# With the rest of torch.


def test_reference_gradients():
    torch.manual_seed(0)
    inputs = [x.double().requires_grad_() for x in draw(5, 2, dims=(4, 4))[:6]]
    docs = [(0, 3), (3, 5)]
    assert torch.autograd.gradcheck(
        lambda *x: reference(*x[:5], docs, initial_state=x[5]), inputs, fast_mode=True
    )  # fmt: skip


def test_closed_form_is_the_recurrence(seed):
    docs = docs_of(offsets([3, 70, 0, 9]))
    inputs = [x.double().requires_grad_() for x in draw(84, heads=(2, 4), dims=(8, 12), state=False)[:5]]
    found, expected = closed_form(*inputs, docs), reference(*inputs, docs)[0]
    assert found.shape == expected.shape
    up = torch.randn_like(found)
    pairs = zip(*(torch.autograd.grad(o, inputs, up) for o in (found, expected)), strict=True)
    for a, b in ((found, expected), *pairs):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_meta_tensors():
    inputs = [x.to("meta").requires_grad_() for x in draw(9, 2, dtype=BF16)[:6]]
    o, final = gated_delta_rule(*inputs[:5], cu_seqlens=[0, 4, 9], initial_state=inputs[5], output_final_state=True)
    assert o.is_meta and o.shape == inputs[2].shape and o.dtype == BF16
    assert final.shape == inputs[5].shape and final.dtype == F32
    (o.sum() + final.sum()).backward()
    assert all(x.grad.shape == x.shape for x in inputs)


def test_checkpoint_compile_and_repeated_backward(seed):
    pack, inputs = Pack(cu_seqlens=[0, 4, 9]), draw(9, 2)

    def step(*x, initial_state):
        return gated_delta_rule(*x, initial_state=initial_state, output_final_state=True, pack=pack)

    def recomputed(*x, initial_state):
        return checkpoint(step, *x, initial_state=initial_state, use_reentrant=False)

    expected = run(step, inputs)
    assert same_bits(expected, run(recomputed, inputs))
    assert same_bits(expected, run(torch.compile(step, backend="aot_eager", fullgraph=True), inputs))
    q, *rest = (x.requires_grad_() for x in inputs[:5])
    total = gated_delta_rule(q, *rest, pack=pack)[0].square().sum()
    first, second = (torch.autograd.grad(total, [q, *rest], retain_graph=True) for _ in range(2))
    assert same_bits(first, second)


@pytest.mark.parametrize("state", [True, False], ids=["state", "no-state"])
def test_operators_are_registered_rightly(seed, monkeypatch, state):
    monkeypatch.setattr(_alloc, "empty", lambda shape, dtype, device: torch.empty(shape, dtype=dtype, device=device))
    *tensors_, initial, _, _ = (None if x is None else x.requires_grad_() for x in draw(9, 2, state=state))
    arguments = (*tensors_, torch.tensor([0, 4, 4, 9]), None, initial, 0.25, True, state, True)
    torch.library.opcheck(torch.ops.automodel_c.gated_delta_rule_forward.default, arguments)


def test_second_derivative_is_refused(seed):
    inputs = [x.requires_grad_() for x in draw(5)[:5]]
    first = torch.autograd.grad(gated_delta_rule(*inputs)[0].sum(), inputs[0], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="second derivative"):
        first.sum().backward()


def test_only_what_is_asked_for_is_kept(seed):
    inputs = draw(1500)
    assert gated_delta_rule(*inputs[:5])[1] is None
    forward = torch.ops.automodel_c.gated_delta_rule_forward
    sizes = [
        forward(*inputs[:5], torch.tensor([0, 1500]), None, None, 0.25, True, *flags)[1:]
        for flags in ((False, False), (True, True))
    ]
    assert [[len(x) for x in pair] for pair in sizes] == [[0, 0], [1, 1]]


def test_what_comes_early_and_the_rest_are_the_whole(seed):
    *tensors, initial, _, _ = draw(1500, state=True)
    arguments = *tensors, torch.tensor([0, 1500]), None
    whole = gdn._forward(*arguments, initial, 0.25, True, True, True)
    rest = gdn._forward(*arguments, initial, 0.25, True, True, True, gdn.prepare(*arguments, 0.25, True))
    assert all(same_bits([a], [b]) for a, b in zip(whole, rest, strict=True))
    o, final, states = whole
    back = torch.randn_like(o), torch.randn_like(final), *arguments, initial, states, 0.25, True
    assert same_bits([gdn.initial_gradient(*back)], [gdn._backward(*back, True)[5]])


def test_parts_of_a_pass_that_there_are_none_of(seed):
    q, k, v, g, beta = draw(6)[:5]
    scratch = _alloc.workspace(1 << 22, "cpu")
    with pytest.raises(ValueError, match="part is 3 of 0, 1, 2"):
        _amcore.gated_delta_rule_forward(
            torch.empty_like(v), scratch, q, k, v, g, beta, [0, 6], scale=1.0, l2norm=True, part=3
        )
    grads = [torch.empty_like(x) for x in (q, k, v, g, beta)]
    with pytest.raises(ValueError, match="part is 2, backward has 0 and 1"):
        _amcore.gated_delta_rule_backward(
            *grads, scratch, torch.empty_like(v), q, k, v, g, beta, [0, 6], scale=1.0, l2norm=True, part=2
        )
