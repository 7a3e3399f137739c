"""Packed attention on CUDA against float64, by the error rule, and what must hold to the bit."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from automodel_c import Pack, _amcore, partition
from automodel_c.ops import _alloc
from automodel_c.ops.attention import attention
from tests.guards import CheckedAllocator, Guards
from tests.ops.test_attention import check, docs_of, draw, offsets, run, same_bits
from tests.strategies import doc_ids, packed_docs

pytestmark = pytest.mark.cuda

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["fp32", "bf16", "fp16"])


def on_cuda(tensors):
    return [x.cuda() for x in tensors]


def ours(*inputs, **options):
    """out, lse, dq, dk, dv of tensors on CUDA."""
    return run(*inputs, return_lse=True, **options)


def there(*inputs, **options):
    """The same of host tensors, back on the host."""
    return [x.cpu() for x in ours(*on_cuda(inputs), **options)]


def row_of(q, k, docs, *, causal=True, backward=False):
    return _amcore.attention_row(q, k, k, docs, causal=causal, backward=backward)


SHAPES = [
    (16, (2, 2), False), (16, (5, 1), True), (32, (4, 2), True), (64, (6, 2), False), (64, (2, 2), True),
    (72, (2, 2), False), (72, (16, 1), True), (80, (3, 1), True), (80, (4, 2), True), (128, (2, 1), True),
    (256, (2, 1), True), (256, (16, 1), True), (256, (32, 2), True), (256, (4, 4), False),
]  # fmt: skip


@DTYPES
@pytest.mark.parametrize(("dim", "heads", "causal"), SHAPES, ids=lambda x: "-".join(map(str, np.ravel(x))))
def test_attention_error_rule(seed, dtype, dim, heads, causal):
    cu = offsets([70, 1, 0, 193, 33])
    check(draw(cu[-1], heads, dim, dtype), docs_of(cu), causal=causal, by=there, cu_seqlens=cu)


@DTYPES
@pytest.mark.parametrize("dim", [64, 72, 128, 256])
@pytest.mark.parametrize(
    "tokens", [1, 31, 32, 33, 63, 64, 65, 79, 80, 81, 127, 128, 129, 160, 161, 191, 192, 193, 255, 256, 257, 385]
)
def test_tile_edges(seed, dtype, dim, tokens):
    inputs, *more = [draw(tokens, (16, 1), dim, dtype) for _ in range(2)]
    check(inputs, [(0, tokens)], more=more, by=there)


@DTYPES
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 4, 8, 16, 32, 64, 128])
def test_groups(seed, dtype, dim, group):
    cu = offsets([90, 133, 1])
    check(draw(cu[-1], (group, 1), dim, dtype), docs_of(cu), by=there, cu_seqlens=cu)


@DTYPES
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("lengths", [((5, 40, 0, 33), (80, 7, 9, 210)), ((700,), (20,)), ((20,), (700,))])
@pytest.mark.parametrize(("heads", "dim"), [((4, 2), 16), ((16, 1), 256)])
def test_attention_different_keys(seed, dtype, causal, lengths, heads, dim):
    cu, cu_k = map(offsets, lengths)
    inputs, *more = [draw(cu[-1], heads, dim, dtype, keys=cu_k[-1]) for _ in range(6 if dim == 16 else 1)]
    options = {"cu_seqlens": cu, "cu_seqlens_k": cu_k}
    check(inputs, docs_of(cu), docs_of(cu_k), causal=causal, more=more, by=there, **options)


@DTYPES
def test_attention_scale_and_large_logits(seed, dtype):
    inputs = draw(230, (2, 1), 64, dtype, times=3.0)
    check(inputs, [(0, 230)], by=there)
    check(inputs, [(0, 230)], scale=-0.1, by=there)


# What users of other kernels ran into.


@DTYPES
def test_keys_without_queries_get_zero_gradients(seed, dtype):
    cu, cu_k = offsets([0, 0, 1023]), offsets([0, 1, 2045])
    inputs = draw(1023, (4, 4), 128, dtype, keys=2046)
    made = check(inputs, docs_of(cu), docs_of(cu_k), by=there, cu_seqlens=cu, cu_seqlens_k=cu_k)
    assert not made[3][0].any() and not made[4][0].any()


@DTYPES
def test_one_query_among_empty_documents(seed, dtype):
    cu, cu_k = offsets([0, 1, 0, 1]), offsets([0, 3, 0, 5])
    inputs = draw(2, (9, 3), 64, dtype, keys=8)
    check(inputs, docs_of(cu), docs_of(cu_k), by=there, cu_seqlens=cu, cu_seqlens_k=cu_k)


@DTYPES
def test_empty_queries_beside_keys(seed, dtype):
    cu, cu_k = np.array([0, 150, 150, 300]), np.array([0, 100, 200, 300])
    inputs = draw(300, keys=300, dtype=dtype)
    made = check(inputs, docs_of(cu), docs_of(cu_k), by=there, cu_seqlens=cu, cu_seqlens_k=cu_k)
    assert not made[3][100:200].any() and not made[4][100:200].any()


@DTYPES
@pytest.mark.parametrize(("heads", "dim"), [((2, 1), 32), ((16, 1), 256)])
def test_more_queries_than_keys(seed, dtype, heads, dim):
    cu, cu_k = np.array([0, 76, 110, 256]), np.array([0, 1, 2, 3])
    inputs = draw(256, heads, dim, dtype, keys=3, times=3.0)
    inputs[3].fill_(1.0)
    out, lse, dq, _, _ = check(inputs, docs_of(cu), docs_of(cu_k), by=there, cu_seqlens=cu, cu_seqlens_k=cu_k)
    for start, end in docs_of(cu):
        assert not out[start : end - 1].any() and not dq[start : end - 1].any()
        assert (lse[start : end - 1] == -math.inf).all()


@DTYPES
@pytest.mark.parametrize("dim", [16, 256])
def test_one_token(seed, dtype, dim):
    q, k, v, dout = draw(1, (2, 2), dim, dtype, times=3.0)
    out, _, dq, dk, dv = there(q, k, v, dout)
    assert torch.equal(out, v) and torch.equal(dv, dout)
    assert not dq.any() and not dk.any()


@DTYPES
@pytest.mark.parametrize("times", [3.0, 100.0])
@pytest.mark.parametrize("dim", [128, 256])
def test_large_logits_stay_finite(seed, dtype, times, dim):
    out, lse, *gradients = there(*draw(1024, (1, 1), dim, dtype, times=times))
    assert out.isfinite().all() and lse.isfinite().all()
    if dtype != F16 or times == 3.0:  # at 100 the true gradients are beyond fp16
        assert all(x.isfinite().all() for x in gradients)


@DTYPES
@pytest.mark.parametrize("dim", [64, 72, 256])
def test_strides(seed, dtype, dim):
    cu = [0, 50, 51, 120]
    buffer = torch.randn(120, 36, dim, device="cuda").to(dtype)
    wide = torch.randn(120, 3, 32, dim, device="cuda").to(dtype)
    q, k, v, dout = buffer[:, :32], buffer[:, 32:34], buffer[:, 34:], wide[:, 1]
    whole = ours(*(x.clone() for x in (q, k, v, dout)), cu_seqlens=cu)
    assert same_bits(ours(q, k, v, dout, cu_seqlens=cu), whole)
    by_head = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v, dout)]
    assert same_bits(ours(*by_head, cu_seqlens=cu), whole)
    spread = dout.new_empty(*dout.shape, 2)[..., 0].copy_(dout)  # a gradient whose last axis has a stride
    assert same_bits(ours(q, k, v, spread, cu_seqlens=cu), whole)
    expanded = torch.ones((), dtype=dtype, device="cuda").expand(120, 32, dim)
    assert same_bits(ours(q, k, v, expanded, cu_seqlens=cu), ours(q, k, v, expanded.clone(), cu_seqlens=cu))


def test_poisoned_workspace_changes_nothing(seed, monkeypatch):
    cu = offsets([128, 37, 0, 130])
    inputs = on_cuda(draw(cu[-1], (16, 1), 256, BF16))
    poisoned = ours(*inputs, cu_seqlens=cu)
    allocator = CheckedAllocator(Guards())
    monkeypatch.setattr(_alloc, "workspace", lambda n, device: allocator.workspace(n, device).zero_())
    assert same_bits(poisoned, ours(*inputs, cu_seqlens=cu))
    allocator.guards.check()


@pytest.mark.parametrize("cu", [[0], [0, 0, 0]])
@pytest.mark.parametrize(("tokens", "keys"), [(0, 0), (0, 3), (3, 0), (3, 3)])
@pytest.mark.parametrize("dim", [16, 256])
def test_nothing_to_attend(cu, tokens, keys, dim):
    inputs = draw(tokens, dim=dim, keys=keys, dtype=BF16)
    out, lse, *gradients = there(*inputs, cu_seqlens=cu, cu_seqlens_k=cu)
    assert not out.any() and (lse == -math.inf).all() and not any(x.any() for x in gradients)


@pytest.mark.parametrize(("documents", "heads", "dim"), [(100_000, (1, 1), 64), (80_000, (16, 1), 256)])
def test_many_documents(seed, documents, heads, dim):
    cu = np.arange(0, 16 * documents + 1, 16)
    shapes = [(heads[0],), (heads[1],), (heads[1],), (heads[0],)]
    inputs = [torch.randn(documents, 16, *h, dim, device="cuda").to(BF16) for h in shapes]
    whole = ours(*(x.flatten(0, 1) for x in inputs), cu_seqlens=cu)
    for d in (0, 1, 65_535, 65_536, documents - 1):
        alone = ours(*(x[d] for x in inputs))
        assert same_bits(alone, [x[16 * d : 16 * d + 16] for x in whole])
    assert all(x.isfinite().all() for x in whole)


def test_uneven_documents_past_ten_thousand(seed):
    cu = offsets(np.random.default_rng(0).integers(8, 65, 12_000))
    q, k, v, dout = (torch.randn(cu[-1], 1, 256, device="cuda").to(BF16) for _ in range(4))
    made = ours(q, k, torch.ones_like(v), dout, cu_seqlens=cu)
    torch.testing.assert_close(made[0], torch.ones_like(q), rtol=0, atol=2**-7)


@pytest.mark.parametrize("documents", [511, 513])
def test_queries_beyond_two_to_the_31_elements(seed, documents, plain_memory):
    shapes = (32, 2, 2, 32)
    inputs = [torch.randn(documents, 512, heads, 256, device="cuda", dtype=BF16) for heads in shapes]
    whole = ours(*(x.flatten(0, 1) for x in inputs), cu_seqlens=np.arange(0, 512 * documents + 1, 512))
    for d in (0, 255, documents - 1):
        assert same_bits(ours(*(x[d] for x in inputs)), [x[512 * d : 512 * d + 512] for x in whole])


def test_row_offsets_of_dout_beyond_two_to_the_31(seed):
    tokens, heads, dim = 410_923, 16, 64
    cu = np.append(np.arange(0, tokens, 64), tokens)
    wide = torch.empty(tokens, 9728, dtype=BF16, device="cuda")
    dout = wide[:, : heads * dim].normal_().view(tokens, heads, dim)
    inputs = [torch.randn(tokens, heads, dim, device="cuda", dtype=BF16) for _ in range(3)]
    assert same_bits(ours(*inputs, dout, cu_seqlens=cu), ours(*inputs, dout.clone(), cu_seqlens=cu))


# Laws.


@DTYPES
@settings(max_examples=12)
@given(docs=packed_docs(400, 4), heads=st.sampled_from([(1, 1), (3, 1), (32, 2)]), causal=st.booleans())
def test_document_alone_is_document_in_a_pack(dtype, docs, heads, causal):
    torch.manual_seed(docs.tokens)
    inputs = on_cuda(draw(docs.tokens, heads, 256, dtype))
    packed = ours(*inputs, cu_seqlens=docs.cu_seqlens, causal=causal)
    for start, end in docs_of(np.array(docs.cu_seqlens)):
        alone = ours(*(x[start:end] for x in inputs), causal=causal)
        assert same_bits(alone, [x[start:end] for x in packed])


@DTYPES
@pytest.mark.parametrize(("heads", "dim"), [((4, 2), 64), ((4, 4), 72), ((8, 2), 128), ((32, 2), 256), ((3, 1), 256)])
def test_neighbours_are_irrelevant(seed, dtype, heads, dim):
    cu = offsets([40, 210, 33])
    inputs = on_cuda(draw(cu[-1], heads, dim, dtype))
    before = ours(*inputs, cu_seqlens=cu)
    for x in inputs:
        x[:40] = math.nan
        x[250:] = math.inf
    assert same_bits([x[40:250] for x in before], [x[40:250] for x in ours(*inputs, cu_seqlens=cu)])


@DTYPES
@settings(max_examples=12)
@given(ids=doc_ids(300), heads=st.sampled_from([(2, 1), (32, 2)]))
def test_padding_may_hold_anything(dtype, ids, heads):
    torch.manual_seed(len(ids))
    inputs = on_cuda(draw(len(ids), heads, 256, dtype))
    padding = (torch.tensor(ids, dtype=torch.int64) == 0).cuda()
    clean = ours(*inputs, doc_ids=ids)
    for x in inputs:
        x[padding] = math.nan
    made = ours(*inputs, doc_ids=ids)
    assert same_bits(clean, made)
    out, lse, *gradients = (x[padding] for x in made)
    assert not out.any() and (lse == -math.inf).all() and not any(x.any() for x in gradients)


@DTYPES
@pytest.mark.parametrize(("heads", "dim"), [((2, 1), 64), ((4, 2), 80), ((8, 2), 128), ((32, 2), 256), ((3, 1), 256)])
def test_repeats_to_the_bit_whatever_is_asked(seed, dtype, heads, dim):
    cu = offsets([650, 2350])
    inputs = on_cuda(draw(3000, heads, dim, dtype))
    runs = [ours(*inputs, cu_seqlens=cu, deterministic=wish) for wish in (None, True, False, None)]
    assert all(same_bits(runs[0], other) for other in runs[1:])


# The stream, the host, graphs.


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_operators_of_a_pack_do_not_wait(seed, plain_memory):
    pack = Pack(cu_seqlens=[0, 300, 301, 1000], device="cuda")
    q, k, v, dout = on_cuda(draw(1000, (32, 2), 256, BF16))
    expected = ours(q, k, v, dout, pack=pack)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    try:
        torch.cuda.set_sync_debug_mode("error")
        out = attention(q, k, v, pack=pack)
        out.backward(dout)
        alone = attention(q, k, v)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert same_bits([expected[0], *expected[2:]], [out.detach(), q.grad, k.grad, v.grad])
    assert alone.isfinite().all()


def test_work_goes_to_the_current_stream(seed, plain_memory):
    pack = Pack(cu_seqlens=[0, 300, 1000], device="cuda")
    inputs = on_cuda(draw(1000, (4, 2), 256, BF16))
    expected = ours(*inputs, pack=pack)
    late = [torch.zeros_like(x) for x in inputs]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)
        for x, y in zip(late, inputs, strict=True):
            x.copy_(y)
        assert same_bits(expected, ours(*late, pack=pack))


def test_captured_graph_replays_other_packs(seed, plain_memory):
    packs = [Pack(cu_seqlens=cu, device="cuda") for cu in ([0, 300, 700, 1000], [0, 10, 11, 990], [0, 0, 0, 1000])]
    inputs = on_cuda(draw(1000, (32, 2), 256, BF16))
    expected = [ours(*inputs, pack=pack) for pack in packs]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = ours(*inputs, pack=packs[0])
    plan = packs[0].device_plan.clone()
    for pack, wanted in zip(packs, expected, strict=True):
        packs[0].device_plan.copy_(plan if pack is packs[0] else pack.device_plan)
        for x in made:
            x.fill_(math.nan)
        graph.replay()
        assert same_bits(wanted, made)


def test_offsets_on_the_device_are_copied_with_a_warning(seed, monkeypatch):
    monkeypatch.setattr(partition, "_warned", [])
    inputs = on_cuda(draw(12))
    with pytest.warns(UserWarning, match="copied to the host at every call"):
        made = ours(*inputs, cu_seqlens=torch.tensor([0, 5, 12], device="cuda"))
    assert same_bits(made, ours(*inputs, cu_seqlens=[0, 5, 12]))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("where", ["cuda", "cpu"])
def test_offsets_under_capture_are_refused(seed, where):
    q, k, v, _ = on_cuda(draw(12))
    cu = torch.tensor([0, 5, 12], device=where)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(RuntimeError, match="Pack"):
        attention(q, k, v, cu_seqlens=cu)


def test_wrong_device_documents_are_refused():
    q, k, _, _ = on_cuda(draw(6))
    out, lse = torch.full_like(q, math.nan), torch.full((6, 2), math.nan, device="cuda")
    scratch = torch.empty(4096, dtype=torch.uint8, device="cuda")
    wide, short = torch.zeros(3, device="cuda"), torch.zeros(2, dtype=torch.int64, device="cuda")
    for docs, error in ((None, TypeError), (wide, TypeError), (short, ValueError)):
        with pytest.raises(error, match="device_docs"):
            _amcore.attention_forward(out, lse, scratch, q, k, k, [0, 6], None, None, docs, scale=1.0, causal=True)
    assert out.isnan().all() and lse.isnan().all()


def test_a_head_dim_without_a_row_is_refused():
    q, k, v, _ = on_cuda(draw(6, dim=96))
    with pytest.raises(NotImplementedError, match="are 16, 32, 64, 72, 80, 128, 256"):
        attention(q, k, v)


@pytest.mark.sm90
@pytest.mark.parametrize(
    ("heads", "dim", "dtype", "row", "backward"),
    [
        ((32, 2), 256, BF16, "d256 bf16 sm90", "d256 bf16 sm90"),
        ((32, 2), 256, F16, "d256 f16 sm90", "d256 f16 sm90"),
        ((4, 4), 256, BF16, "d256 bf16 sm90", "d256 bf16 sm90"),
        ((128, 1), 256, BF16, "d256 bf16 sm90", "simple"),
        ((3, 1), 256, BF16, "simple", "simple"),
        ((32, 2), 256, F32, "simple", "simple"),
        ((32, 8), 128, BF16, "d128 bf16 sm90", "d128 bf16 sm90"),
        ((32, 8), 128, F16, "d128 f16 sm90", "d128 f16 sm90"),
        ((4, 2), 64, BF16, "d64 bf16 sm90", "d64 bf16 sm90"),
        ((4, 2), 64, F16, "d64 f16 sm90", "d64 f16 sm90"),
        ((4, 2), 72, BF16, "d72 bf16 sm90", "d80 bf16 sm90"),
        ((4, 2), 80, BF16, "d80 bf16 sm90", "d80 bf16 sm90"),
        ((16, 16), 80, F16, "d80 f16 sm90", "d80 f16 sm90"),
        ((4, 2), 32, BF16, "simple", "simple"),
    ],
    ids=str,
)
def test_which_row_runs(heads, dim, dtype, row, backward):
    q, k, _, _ = on_cuda(draw(6, heads, dim, dtype))
    assert row_of(q, k, [0, 6]) == row_of(q, k, [0, 2, 2, 6], causal=False) == row
    assert row_of(q, k, [0, 6], backward=True) == backward
    odd = torch.empty(q.numel() + 1, dtype=dtype, device="cuda")[1:].view(q.shape)  # not on 16 bytes
    assert row_of(odd, k, [0, 6]) == row_of(odd, k, [0, 6], backward=True) == "simple"


@pytest.mark.sm90
def test_backward_repeats_beside_other_work(seed, plain_memory):
    """Fifty times the same bits, with something else on the GPU now and then."""
    pack = Pack(cu_seqlens=[0, 650, 651, 3000], device="cuda")
    q, k, v, dout = on_cuda(draw(3000, (32, 2), 256, BF16))
    other, side = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    first = ours(q, k, v, dout, pack=pack)
    for i in range(50):
        if i % 3:
            with torch.cuda.stream(side):
                torch.mm(other, other)
        assert same_bits(first, ours(q, k, v, dout, pack=pack))


@pytest.mark.sm90
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("heads", "dim", "causal"), [((2, 2), 72, False), ((8, 2), 64, True), ((8, 2), 128, True)])
def test_tiles_of_a_long_pack_give_the_bits_of_short_ones(seed, plain_memory, dtype, heads, dim, causal):
    """Documents of 256 tokens alone run in tiles of 128 rows where that pays, beside a long one in tiles of 192."""
    lengths = [256, 250, 129, 1, 8192]
    inputs = on_cuda(draw(sum(lengths), heads, dim, dtype))
    short = sum(lengths[:-1])
    packed = ours(*inputs, cu_seqlens=offsets(lengths), causal=causal)
    alone = ours(*(x[:short] for x in inputs), cu_seqlens=offsets(lengths[:-1]), causal=causal)
    assert same_bits(alone, [x[:short] for x in packed])


@pytest.mark.sm90
@pytest.mark.parametrize("causal", [True, False])
def test_pairs_of_key_tiles_give_the_bits_of_single_ones(seed, plain_memory, causal):
    """A long document runs its key tiles in pairs, in a pack with short ones it does not."""
    long = 26 * 1024 if causal else 13 * 1024
    lengths = [long + 1, *[3] * 40, long // 4]
    inputs = on_cuda(draw(sum(lengths), (16, 1), 256, BF16))
    packed = ours(*inputs, cu_seqlens=offsets(lengths), causal=causal)
    alone = ours(*(x[: long + 1] for x in inputs), causal=causal)
    assert same_bits(alone, [x[: long + 1] for x in packed])
    for x in inputs:
        x[long + 1 :] = math.nan  # keys that a pair's second tile lies on, behind the document
    padded = ours(*inputs, cu_seqlens=[0, long + 1], causal=causal)
    assert same_bits(alone, [x[: long + 1] for x in padded])
