"""Packed attention against float64, by the error rule, and what must hold to the bit."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from automodel_c import Pack, _amcore, docs_from_ids
from automodel_c.ops import _alloc
from automodel_c.ops.attention import attention
from automodel_c.reference.attention import attention as reference
from tests.conftest import MACHINE_ISAS
from tests.guards import CheckedAllocator, Guards
from tests.numerics import assert_as_good_as, pool
from tests.strategies import doc_ids, packed_docs

F32, BF16 = torch.float32, torch.bfloat16
ROWS = [(isa, F32) for isa in MACHINE_ISAS[:3]]  # fp32 has no kernels of its own beyond avx512
ROWS += [(isa, BF16) for isa in MACHINE_ISAS]
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])


@pytest.fixture(autouse=True, scope="module")
def _one_thread_for_references():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=ROWS, ids=lambda row: "-".join(map(str, row)).replace("torch.", ""))
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


def draw(tokens, heads=(2, 1), dim=16, dtype=torch.float32, keys=None, times=1.0):
    """q, k, v, dout; seeded by the caller."""
    keys = tokens if keys is None else keys
    shapes = ((tokens, heads[0]), (keys, heads[1]), (keys, heads[1]), (tokens, heads[0]))
    return [(times * torch.randn(*shape, dim)).to(dtype) for shape in shapes]


def run(q, k, v, dout, function=attention, **options):
    """out, lse, dq, dk, dv."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out, lse = function(q, k, v, **options)
    out.backward(dout)
    return [out.detach(), lse.detach(), q.grad, k.grad, v.grad]


def ours(q, k, v, dout, **options):
    return run(q, k, v, dout, return_lse=True, **options)


def eager(q, k, v, docs, docs_k=None, *, causal=True, scale=None):
    """As transformers computes it without a kernel: products and scaling in q's dtype, softmax in fp32."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -math.inf)
    for (q0, q1), (k0, k1) in zip(docs, docs if docs_k is None else docs_k, strict=True):
        first = max(q0, q1 - (k1 - k0)) if causal else q0  # rows before it see no key
        if first >= q1 or k0 >= k1:
            continue
        kh, vh = (x[k0:k1].transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
        scores = torch.matmul(q[first:q1].transpose(0, 1), kh.transpose(1, 2)) * scale
        if causal:
            hidden = torch.arange(k1 - k0)[None, :] > torch.arange(first, q1)[:, None] - q1 + k1 - k0
            scores = scores.masked_fill(hidden, torch.finfo(q.dtype).min)
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
        rows = torch.arange(int(first), int(q1))
        out = out.index_copy(0, rows, torch.matmul(weights, vh).transpose(0, 1))
        lse = lse.index_copy(0, rows, scores.detach().float().logsumexp(-1).T)
    return out, lse


def check(inputs, docs, docs_k=None, *, causal=True, scale=None, more=(), by=ours, **options):
    """The error rule for out, lse and every gradient, over `inputs` and `more` draws of them; returns the first's."""
    formula = {"docs": docs, "docs_k": docs_k, "causal": causal, "scale": scale}
    draws = [inputs, *more]
    made = [by(*x, causal=causal, scale=scale, **options) for x in draws]
    naive = [run(*x, eager, **formula) for x in draws]
    truth = [run(*(t.double() for t in x), reference, **formula) for x in draws]
    results = zip(pool(made), pool(naive), pool(truth), strict=True)
    for name, (x, plain, true) in zip(("out", "lse", "dq", "dk", "dv"), results, strict=True):
        assert_as_good_as(x, plain, true, name=name)
    return made[0]


def same_bits(xs, ys):
    return all(
        torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
        for x, y in zip(xs, ys, strict=True)
    )


SHAPES = [
    (16, (2, 2), False), (16, (5, 1), True), (32, (4, 2), True), (64, (6, 2), False), (72, (2, 2), False),
    (80, (3, 1), True), (128, (2, 1), True), (256, (2, 1), True),
]  # fmt: skip


@pytest.mark.parametrize(("dim", "heads", "causal"), SHAPES, ids=lambda x: "-".join(map(str, np.ravel(x))))
def test_attention_error_rule(seed, dtype, dim, heads, causal):
    cu = offsets([70, 1, 0, 193, 33])
    check(draw(cu[-1], heads, dim, dtype), docs_of(cu), causal=causal, cu_seqlens=cu)


def test_attention_many_columns_and_tiles(seed, dtype):
    cu = offsets([3, 790, 31])
    check(draw(cu[-1], (3, 1), 16, dtype), docs_of(cu), cu_seqlens=cu)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("lengths", [((5, 40, 0, 33), (80, 7, 9, 210)), ((700,), (20,)), ((20,), (700,))])
def test_attention_different_keys(seed, dtype, causal, lengths):
    cu, cu_k = map(offsets, lengths)
    inputs, *more = [draw(cu[-1], (4, 2), 16, dtype, keys=cu_k[-1]) for _ in range(12)]
    check(inputs, docs_of(cu), docs_of(cu_k), causal=causal, more=more, cu_seqlens=cu, cu_seqlens_k=cu_k)


def test_attention_scale_and_large_logits(seed, dtype):
    inputs = draw(230, (2, 1), 64, dtype, times=3.0)
    check(inputs, [(0, 230)])
    check(inputs, [(0, 230)], scale=-0.1)


def test_attention_single_document_aligns_bottom_right(seed, dtype):
    inputs = draw(5, keys=40, dtype=dtype)
    made = check(inputs, [(0, 5)], [(0, 40)])
    assert same_bits(made, ours(*inputs, cu_seqlens=[0, 5], cu_seqlens_k=[0, 40]))


# What users of other kernels ran into.


def test_keys_without_queries_get_zero_gradients(seed, dtype):
    cu, cu_k = offsets([0, 0, 103]), offsets([0, 1, 205])
    made = check(draw(103, (4, 4), 128, dtype, keys=206), docs_of(cu), docs_of(cu_k), cu_seqlens=cu, cu_seqlens_k=cu_k)
    assert not made[3][0].any() and not made[4][0].any()


def test_one_query_among_empty_documents(seed, dtype):
    cu, cu_k = offsets([0, 1, 0, 1]), offsets([0, 3, 0, 5])
    check(draw(2, (9, 3), 64, dtype, keys=8), docs_of(cu), docs_of(cu_k), cu_seqlens=cu, cu_seqlens_k=cu_k)


def test_empty_queries_beside_keys(seed, dtype):
    cu, cu_k = np.array([0, 150, 150, 300]), np.array([0, 100, 200, 300])
    made = check(draw(300, keys=300, dtype=dtype), docs_of(cu), docs_of(cu_k), cu_seqlens=cu, cu_seqlens_k=cu_k)
    assert not made[3][100:200].any() and not made[4][100:200].any()


def test_more_queries_than_keys(seed, dtype):
    cu, cu_k = np.array([0, 76, 110, 256]), np.array([0, 1, 2, 3])
    inputs = draw(256, dim=32, dtype=dtype, keys=3, times=3.0)
    inputs[3].fill_(1.0)
    out, lse, dq, _, _ = check(inputs, docs_of(cu), docs_of(cu_k), cu_seqlens=cu, cu_seqlens_k=cu_k)
    for start, end in docs_of(cu):
        assert not out[start : end - 1].any() and not dq[start : end - 1].any()
        assert (lse[start : end - 1] == -math.inf).all()


def test_one_token(seed, dtype):
    q, k, v, dout = draw(1, (2, 2), dtype=dtype, times=3.0)
    out, _, dq, dk, dv = ours(q, k, v, dout)
    assert torch.equal(out, v) and torch.equal(dv, dout)
    assert not dq.any() and not dk.any()


@pytest.mark.parametrize("times", [3.0, 100.0])
def test_large_logits_stay_finite(seed, dtype, times):
    made = ours(*draw(260, (1, 1), 128, dtype, times=times))
    assert all(x.isfinite().all() for x in made)


@pytest.mark.parametrize("dim", [64, 72, 256])
def test_strides(seed, dtype, dim):
    cu = [0, 50, 51, 120]
    buffer = torch.randn(120, 8, dim).to(dtype)
    wide = torch.randn(120, 3, 4, dim).to(dtype)
    q, k, v, dout = buffer[:, :4], buffer[:, 4:6], buffer[:, 6:], wide[:, 1]
    assert same_bits(ours(q, k, v, dout, cu_seqlens=cu), ours(*(x.clone() for x in (q, k, v, dout)), cu_seqlens=cu))
    by_head = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v, dout)]
    assert same_bits(ours(q, k, v, dout, cu_seqlens=cu), ours(*by_head, cu_seqlens=cu))
    spread = dout.new_empty(*dout.shape, 2)[..., 0].copy_(dout)  # a gradient whose last axis has a stride
    assert same_bits(ours(q, k, v, dout, cu_seqlens=cu), ours(q, k, v, spread, cu_seqlens=cu))
    expanded = torch.ones((), dtype=dtype).expand(120, 4, dim)
    assert same_bits(ours(q, k, v, expanded, cu_seqlens=cu), ours(q, k, v, expanded.clone(), cu_seqlens=cu))


def test_poisoned_workspace_changes_nothing(seed, dtype, monkeypatch):
    cu = offsets([128, 37, 0, 130])
    inputs = draw(cu[-1], (2, 1), 72, dtype)
    poisoned = ours(*inputs, cu_seqlens=cu)
    allocator = CheckedAllocator(Guards())
    monkeypatch.setattr(_alloc, "workspace", lambda n, device: allocator.workspace(n, device).zero_())
    assert same_bits(poisoned, ours(*inputs, cu_seqlens=cu))
    allocator.guards.check()


def test_one_token_past_a_block_and_an_empty_document(seed, dtype):
    cu = offsets([513, 1, 0, 255])
    assert all(x.isfinite().all() for x in ours(*draw(cu[-1], dim=32, dtype=dtype), cu_seqlens=cu))


@pytest.mark.parametrize("cu", [[0], [0, 0, 0]])
@pytest.mark.parametrize(("tokens", "keys"), [(0, 0), (0, 3), (3, 0), (3, 3)])
def test_nothing_to_attend(cu, tokens, keys):
    out, lse, *gradients = ours(*draw(tokens, keys=keys), cu_seqlens=cu, cu_seqlens_k=cu)
    assert not out.any() and (lse == -math.inf).all() and not any(x.any() for x in gradients)


@pytest.mark.parametrize(("documents", "length"), [(3000, 16), (80_000, 2)])
def test_many_documents(seed, documents, length):
    cu = np.arange(0, length * documents + 1, length)
    q, k, v, dout = draw(cu[-1], (1, 1), 16)
    whole = ours(q, k, v, dout, cu_seqlens=cu)
    batch = [x.view(documents, length, 16) for x in (q, k, v, dout)]
    stacked = [x.detach().requires_grad_() for x in batch[:3]]
    torch.nn.functional.scaled_dot_product_attention(*stacked, is_causal=True).backward(batch[3])
    for mine, peer in zip(whole[2:], stacked, strict=True):
        torch.testing.assert_close(mine.view(documents, length, 16), peer.grad, rtol=1e-4, atol=1e-4)


def test_uneven_documents_past_ten_thousand(seed):
    cu = offsets(np.random.default_rng(0).integers(0, 7, 12_000))
    q, k, v, dout = draw(cu[-1], (1, 1), 16)
    made = ours(q, k, torch.ones_like(v), dout, cu_seqlens=cu)
    torch.testing.assert_close(made[0], torch.ones_like(q), rtol=0, atol=1e-6)


def test_one_document_more_changes_no_bit_of_the_others(seed):
    inputs = draw(2 * 513, (32, 2), 256, BF16)
    made = [ours(*(x[: 2 * n] for x in inputs), cu_seqlens=offsets([2] * n)) for n in (511, 512, 513)]
    for more in made[1:]:
        assert same_bits(made[0], [x[: 2 * 511] for x in more])


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_offsets_beyond_thirty_one_bits(seed, name):
    """Rows 2^24 elements apart: the last one's offset does not fit in 32 bits. Only the rows touched cost memory."""
    inputs = dict(zip(("q", "k", "v", "dout"), draw(140, (1, 1), dtype=BF16), strict=True))
    memory = torch.empty(139 * (1 << 24) + 16, dtype=BF16)
    spread = {**inputs, name: memory.as_strided((140, 1, 16), (1 << 24, 16, 1)).copy_(inputs[name])}
    cu = [0, 3, 140]
    assert same_bits(ours(**inputs, cu_seqlens=cu), ours(**spread, cu_seqlens=cu))


def test_last_queries_of_documents_at_edges_of_tiles(seed, dtype):
    """The first document of a shard: few of its rows are queries here, keys go back by any number of tiles."""
    queries = [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1, 17, 65]
    earlier = [1, 63, 64, 127, 128, 255, 256, 511, 512, 513, 0, 65, 31, 1024, 1023, 1025]
    cu, cu_k = offsets(queries), offsets(np.add(queries, earlier))
    inputs, *more = [draw(cu[-1], (4, 1), 32, dtype, keys=cu_k[-1]) for _ in range(2)]
    check(inputs, docs_of(cu), docs_of(cu_k), more=more, cu_seqlens=cu, cu_seqlens_k=cu_k)


# Laws.


@DTYPES
@settings(max_examples=8)
@given(docs=packed_docs(300, 4), heads=st.sampled_from([(1, 1), (3, 1), (4, 2)]), causal=st.booleans())
def test_document_alone_is_document_in_a_pack(dtype, docs, heads, causal):
    torch.manual_seed(docs.tokens)
    inputs = draw(docs.tokens, heads, 32, dtype)
    packed = ours(*inputs, cu_seqlens=docs.cu_seqlens, causal=causal)
    for start, end in docs_of(np.array(docs.cu_seqlens)):
        alone = ours(*(x[start:end] for x in inputs), causal=causal)
        assert same_bits(alone, [x[start:end] for x in packed])


def test_permuting_documents_permutes_results(seed, dtype):
    lengths, order = [200, 1, 64, 0, 97], [4, 3, 0, 2, 1]
    cu = offsets(lengths)
    inputs = draw(cu[-1], (4, 2), 64, dtype)
    rows = torch.cat([torch.arange(cu[n], cu[n + 1]) for n in order])
    straight = ours(*inputs, cu_seqlens=cu)
    permuted = ours(*(x[rows] for x in inputs), cu_seqlens=offsets([lengths[n] for n in order]))
    assert same_bits([x[rows] for x in straight], permuted)


def test_neighbours_are_irrelevant(seed, dtype):
    cu = offsets([40, 210, 33])
    inputs = draw(cu[-1], (2, 1), 64, dtype)
    before = ours(*inputs, cu_seqlens=cu)
    for x in inputs:
        x[:40] = math.nan
        x[250:] = math.inf
    assert same_bits([x[40:250] for x in before], [x[40:250] for x in ours(*inputs, cu_seqlens=cu)])


def test_values_of_one_average_to_one(seed, dtype):
    q, k, v, dout = draw(300, (4, 2), 16, dtype)
    out = ours(q, k, torch.ones_like(v), dout, cu_seqlens=[0, 100, 300])[0]
    torch.testing.assert_close(out, torch.ones_like(q), rtol=0, atol=2e-6 if dtype == torch.float32 else 2**-7)


def test_threads_do_not_matter(seed, dtype):
    cu = offsets([700, 3, 150])
    inputs = draw(cu[-1], (2, 2), 32, dtype)
    before = _amcore.build_info()["num_threads"]
    try:
        made = []
        for n in (1, 2, 5):
            _amcore.set_num_threads(n)
            made.append(ours(*inputs, cu_seqlens=cu))
    finally:
        _amcore.set_num_threads(before)
    assert same_bits(made[0], made[1]) and same_bits(made[0], made[2])


def test_repeats_to_the_bit_whatever_is_asked(seed):
    cu = offsets([650, 350])
    inputs = draw(1000, (2, 1), 256)
    runs = [ours(*inputs, cu_seqlens=cu, deterministic=wish) for wish in (None, True, False, None)]
    assert all(same_bits(runs[0], other) for other in runs[1:])


@DTYPES
@settings(max_examples=10)
@given(ids=doc_ids(300))
def test_padding_may_hold_anything(dtype, ids):
    torch.manual_seed(len(ids))
    inputs = draw(len(ids), (2, 1), 16, dtype)
    padding = torch.tensor(ids, dtype=torch.int64) == 0
    clean = ours(*inputs, doc_ids=ids)
    for x in inputs:
        x[padding] = math.nan
    made = ours(*inputs, doc_ids=ids)
    assert same_bits(clean, made)
    out, lse, *gradients = (x[padding] for x in made)
    assert not out.any() and (lse == -math.inf).all() and not any(x.any() for x in gradients)
    docs = docs_from_ids(ids)
    real = torch.tensor([i for i, n in enumerate(ids) if n], dtype=torch.int64)
    cu = offsets([end - start for start, end in docs])
    for x in inputs:
        x[padding] = 0
    squeezed = ours(*(x[real] for x in inputs), cu_seqlens=cu)
    assert same_bits(squeezed, [x[real] for x in made])


def test_descriptions_of_a_pack_agree(seed):
    inputs = draw(12)
    cu, ids = [0, 5, 12], [1] * 5 + [7] * 7
    by_offsets = ours(*inputs, cu_seqlens=torch.tensor(cu, dtype=torch.int32))
    for options in ({"doc_ids": ids}, {"pack": Pack(cu_seqlens=cu)}, {"pack": Pack(doc_ids=np.array(ids))}):
        assert same_bits(by_offsets, ours(*inputs, **options))


# Errors.


def tensors(**changes):
    made = dict(zip("qkv", draw(6, (4, 2), 16), strict=False))
    made.update({name: change(made[name]) for name, change in changes.items()})
    return made.values()


ERRORS = {
    "pack-kind": ({"pack": [0, 6]}, {}, TypeError, "argument 'pack' must be an automodel_c.Pack, not list"),
    "two-descriptions": ({"cu_seqlens": [0, 6], "doc_ids": [1] * 6}, {}, ValueError, "at most one"),
    "pack-and-offsets": ({"cu_seqlens": [0, 6], "pack": Pack(cu_seqlens=[0, 6])}, {}, ValueError, "at most one"),
    "beyond-the-tokens": ({"cu_seqlens": [0, 7]}, {}, ValueError, "q has 6 tokens, the pack ends at 7"),
    "ids-of-other-length": ({"doc_ids": [1] * 5}, {}, ValueError, "6 tokens"),
    "float-offsets": ({"cu_seqlens": torch.tensor([0.0, 6.0])}, {}, TypeError, "int32 or int64"),
    "documents-of-keys": ({"cu_seqlens": [0, 6], "cu_seqlens_k": [0, 3, 6]}, {}, ValueError, "have 2 documents"),
    "keys-need-offsets": ({"cu_seqlens": [0, 6]}, {n: lambda x: x[:5] for n in "kv"}, ValueError, "cu_seqlens_k"),
    "half": ({}, {"q": lambda q: q.half()}, TypeError, "float16"),
    "mixed-dtypes": ({}, {"k": lambda k: k.bfloat16()}, TypeError, "k is bfloat16, q is float32"),
    "head-dim": ({}, {n: lambda x: x[..., :8] for n in "qkv"}, NotImplementedError, "are 16, 32, 64, 72, 80, 128,"),
    "last-axis": ({}, {"k": lambda k: k.transpose(1, 2).contiguous().transpose(1, 2)}, ValueError, "k has stride 2"),
    "heads": ({}, {"q": lambda q: q[:, :3]}, ValueError, "3 query heads are not a multiple of 2"),
    "v-heads": ({}, {"v": lambda v: v[:, :1]}, ValueError, "v is \\[6, 1, 16\\]"),
    "v-dim": ({}, {"v": lambda v: v.repeat(1, 1, 10)}, ValueError, "v is \\[6, 2, 160\\]"),
    "head-dim-96": ({}, {n: lambda x: x.repeat(1, 1, 6) for n in "qkv"}, NotImplementedError, "96"),
    "v-tokens": ({}, {"v": lambda v: v[:5]}, ValueError, "v is \\[5, 2, 16\\]"),
    "axes": ({}, {"q": lambda q: q[0]}, ValueError, "q has 2 axes"),
    "device": ({}, {"k": lambda k: k.to("meta")}, ValueError, "k is on meta, q on cpu"),
    "scale": ({"scale": math.nan}, {}, ValueError, "scale is nan"),
    "kind": ({}, {"v": lambda v: v.numpy()}, TypeError, "v must be a tensor"),
    "deterministic": ({"deterministic": "no"}, {}, TypeError, "deterministic"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "changes", "error", "words"), ERRORS.values(), ids=ERRORS)
def test_attention_errors(options, changes, error, words):
    with pytest.raises(error, match=words):
        attention(*tensors(**changes), **options)


def test_small_workspace_is_refused(guarded):
    q, k, v, _ = draw(6)
    out, lse = guarded((6, 2, 16)), guarded((6, 2))
    scratch = torch.empty(1000, dtype=torch.uint8)
    with pytest.raises(ValueError, match="workspace has 1000 bytes"):
        _amcore.attention_forward(out, lse, scratch, q, k, v, [0, 6], scale=1.0, causal=True)
    assert out.isnan().all() and lse.isnan().all()


@pytest.mark.parametrize("docs", [[0, 6, 5], [3, 2], [0, 7], [-1, 3]])
def test_documents_are_checked_in_c(docs):
    q, k, v, _ = draw(6)
    with pytest.raises(ValueError, match="docs"):
        _amcore.attention_workspace(q, k, v, docs, causal=True, backward=False)


# With the rest of torch.


def test_reference_gradients():
    torch.manual_seed(0)
    q, k, v = (torch.randn(7, heads, 4, dtype=torch.float64, requires_grad=True) for heads in (2, 1, 1))
    docs, docs_k = [(0, 3), (3, 7)], [(0, 5), (5, 7)]
    assert torch.autograd.gradcheck(lambda *x: reference(*x, docs, docs_k)[0], (q, k, v), fast_mode=True)


def test_meta_tensors():
    q, k, v = (
        torch.empty(9, heads, 64, device="meta", dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)
    )
    out, lse = attention(q, k, v, cu_seqlens=[0, 4, 9], return_lse=True)
    assert out.is_meta and out.shape == q.shape and out.dtype == q.dtype
    assert lse.shape == (9, 4) and lse.dtype == torch.float32 and not lse.requires_grad
    out.sum().backward()
    assert k.grad.shape == k.shape


def test_compile_in_one_graph(seed):
    pack = Pack(cu_seqlens=[0, 4, 9])
    q, k, v, dout = draw(9)

    def step(q, k, v):
        return attention(2 * q, k, v, pack=pack, return_lse=True)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert same_bits(run(q, k, v, dout, step), run(q, k, v, dout, compiled))


def test_operators_are_registered_rightly(seed, monkeypatch):
    monkeypatch.setattr(_alloc, "empty", lambda shape, dtype, device: torch.empty(shape, dtype=dtype, device=device))
    q, k, v, _ = (x.requires_grad_() for x in draw(9))
    torch.library.opcheck(
        torch.ops.automodel_c.attention_forward.default, (q, k, v, torch.tensor([0, 4, 4, 9]), None, None, 0.25, True)
    )


def test_activation_checkpointing(seed):
    q, k, v, dout = draw(9)
    options = {"cu_seqlens": [0, 4, 9], "return_lse": True}

    def recomputed(q, k, v):
        return checkpoint(lambda *x: attention(*x, **options), q, k, v, use_reentrant=False)

    assert same_bits(ours(q, k, v, dout, cu_seqlens=[0, 4, 9]), run(q, k, v, dout, recomputed))


def test_lse_has_no_gradient(seed):
    q, k, v, _ = (x.requires_grad_() for x in draw(5))
    assert not attention(q, k, v, return_lse=True)[1].requires_grad
