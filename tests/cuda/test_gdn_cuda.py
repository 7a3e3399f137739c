"""gated_delta_rule on CUDA against float64, by the error rule, and what must hold to the bit.

Truth and the plain twin are those of tests/ops/test_gdn.py, on the CPU.
"""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from automodel_c import Pack, _amcore, docs_from_ids
from automodel_c.ops.gdn import gated_delta_rule
from automodel_c.reference.gdn import gated_delta_rule as reference
from tests.cuda import device
from tests.cuda.device import on_cuda, same_bits
from tests.numerics import assert_as_good_as, draws_for, pool
from tests.ops.test_gdn import NAMES, SHAPES, docs_of, draw, offsets, ours, plain, run, split_at
from tests.strategies import doc_ids, packed_docs

pytestmark = pytest.mark.cuda

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])


def cuda(inputs):
    return [None if x is None else x.cuda() for x in inputs]


def made_by(inputs, **options):
    return [x.cpu() for x in ours(cuda(inputs), **options)]


def check(inputs, docs, *, more=(), formula=None, **options):
    """The error rule for both results and every gradient, over `inputs` and `more` draws; returns the first's.

    A float32 result of bfloat16 inputs has the floor of the operator's dtype.
    """
    draws, formula = [inputs, *more], formula or {}
    made = [made_by(x, **formula, **options) for x in draws]
    naive = [run(plain, x, docs=docs, **formula) for x in draws]
    wide = [[None if t is None else t.double() for t in x] for x in draws]
    truth = [run(reference, x, docs=docs, **formula) for x in wide]
    for name, x, twin, true in zip(NAMES, pool(made), pool(naive), pool(truth), strict=False):
        assert_as_good_as(x, twin, true, name=name, dtype=inputs[0].dtype)
    return made[0]


@DTYPES
@pytest.mark.parametrize(("heads", "dims", "state"), SHAPES, ids=lambda x: str(x))
def test_gated_delta_rule_error_rule(seed, dtype, heads, dims, state):
    cu = offsets([66, 0, 21])
    inputs, *more = [draw(cu[-1], 3, heads, dims, dtype, state=state) for _ in range(3)]
    check(inputs, docs_of(cu), more=more, cu_seqlens=cu)


@DTYPES
@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 63, 64, 65, 128, 129])
def test_edges_of_chunks(seed, dtype, tokens):
    inputs, *more = [draw(tokens, dtype=dtype) for _ in range(1 + draws_for(tokens))]
    check(inputs, [(0, tokens)], more=more)


@DTYPES
@pytest.mark.parametrize("formula", [{"scale": -0.7}, {"scale": 0.0}, {"qk_l2norm": False}], ids=str)
def test_scale_and_norm(seed, dtype, formula):
    draws = [draw(70, dtype=dtype) for _ in range(12)]
    for inputs in draws if "qk_l2norm" in formula else ():
        inputs[:2] = [0.2 * x for x in inputs[:2]]
    check(draws[0], [(0, 70)], more=draws[1:], formula=formula)


def test_beta_in_float32(seed):
    inputs, *more = [draw(70, dtype=BF16, beta_dtype=F32) for _ in range(4)]
    made = check(inputs, [(0, 70)], more=more)
    assert made[6].dtype == F32


@DTYPES
def test_zero_rows_of_q_and_k(seed, dtype):
    draws = [draw(70, dtype=dtype) for _ in range(4)]
    for inputs in draws:
        inputs[0][3:9] = 0
        inputs[1][5:20] = 0
    check(draws[0], [(0, 70)], more=draws[1:])


GATES = {
    "a-millionth-of-a-millionth": lambda t: torch.full(t.shape, math.log(1e-12)),
    "wiped-once": lambda t: torch.where(t == 0, -90.0, 0.0),
    "none": lambda t: torch.zeros(t.shape),
    "wiped": lambda t: torch.full(t.shape, -90.0),
    "small-after-large": lambda t: torch.where(t == 5, -90.0, -1e-3),
}


@DTYPES
@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_gates(seed, dtype, gate):
    draws = [draw(130, dtype=dtype) for _ in range(6)]
    for inputs in draws:
        inputs[3] = gate(torch.arange(130)).float()[:, None].expand(130, 2)
    made = check(draws[0], [(0, 130)], more=draws[1:])
    assert all(x.isfinite().all() for x in made)


def log_sigmoid_gates(tokens, heads):
    """A quarter of the heads never forget."""
    g = F.logsigmoid(torch.randn(tokens, heads)) / 16
    g[:, ::4] = 0
    return g


def trained_gates(tokens, heads):
    A, bias = 16 * torch.rand(heads), torch.randn(heads)
    return -A * F.softplus(torch.randn(tokens, heads) + bias)


DISTRIBUTIONS = pytest.mark.parametrize("gates", [log_sigmoid_gates, trained_gates], ids=["log-sigmoid", "trained"])


@DTYPES
@DISTRIBUTIONS
def test_gates_of_models(seed, dtype, gates):
    cu = offsets([200, 1, 71])
    draws = [draw(cu[-1], 3, (2, 8), (64, 64), dtype) for _ in range(2)]
    for inputs in draws:
        inputs[3] = gates(cu[-1], 8)
    check(draws[0], docs_of(cu), more=draws[1:], cu_seqlens=cu)


def states_and_rows(tensors, states, rows):
    """Results or inputs: states of some documents, rows of the others."""
    places = (1, 7) if len(tensors) > 6 and tensors[1].ndim == 4 else (5, 7)
    return [None if x is None else x[states if i in places else rows] for i, x in enumerate(tensors)]


@DTYPES
@pytest.mark.parametrize("tokens", [1025, 2150, 9500])
def test_split_run_is_the_whole_run(seed, dtype, tokens):
    """To the bit, over kept states and over segments of the backward pass."""
    inputs = cuda(draw(tokens + 7, 2, dtype=dtype))
    made = ours(inputs, cu_seqlens=[0, 7, tokens + 7])
    alone = states_and_rows(inputs, slice(1, 2), slice(7, None))
    parts = run(split_at(*range(512, tokens, 512)), alone, output_final_state=True)
    assert same_bits(states_and_rows(made, slice(1, 2), slice(7, None)), parts)


@DTYPES
@settings(max_examples=12)
@given(docs=packed_docs(300, 4), heads=st.sampled_from([(1, 1), (1, 3), (2, 4)]), state=st.booleans())
def test_document_alone_is_document_in_a_pack(dtype, docs, heads, state):
    torch.manual_seed(docs.tokens)
    inputs = cuda(draw(docs.tokens, len(docs.lengths), heads, (16, 72), dtype, state=state))
    packed = ours(inputs, cu_seqlens=docs.cu_seqlens)
    for n, (start, end) in enumerate(docs_of(np.array(docs.cu_seqlens))):
        alone = ours(states_and_rows(inputs, slice(n, n + 1), slice(start, end)))
        assert same_bits(alone, states_and_rows(packed, slice(n, n + 1), slice(start, end)))


@DTYPES
@settings(max_examples=12)
@given(ids=doc_ids(300))
def test_padding_may_hold_anything(dtype, ids):
    torch.manual_seed(len(ids))
    docs = docs_from_ids(ids)
    inputs = cuda(draw(len(ids), len(docs), dtype=dtype))
    padding = (torch.tensor(ids, dtype=torch.int64) == 0).cuda()
    clean = ours(inputs, doc_ids=ids)
    for i, x in enumerate(inputs):
        if i not in (5, 7):
            x[padding] = math.nan
    made = ours(inputs, doc_ids=ids)
    assert same_bits(clean, made)
    assert not any(x[padding].any() for i, x in enumerate(made) if i not in (1, 7))
    cu = offsets([end - start for start, end in docs])
    squeezed = ours(states_and_rows(inputs, slice(None), ~padding), cu_seqlens=cu)
    assert same_bits(squeezed, states_and_rows(made, slice(None), ~padding))


@DTYPES
@pytest.mark.parametrize("state", [True, False], ids=["state", "no-state"])
def test_empty_documents_pass_their_state(seed, dtype, state):
    inputs = cuda(draw(5, 3, dtype=dtype, state=state))
    _, final, *_, last = ours(inputs, cu_seqlens=[0, 0, 5, 5])
    expected = inputs[5] if state else torch.zeros_like(final)
    assert torch.equal(final[[0, 2]], expected[[0, 2]]) and not torch.equal(final[1], expected[1])
    assert not state or torch.equal(last[[0, 2]], inputs[7][[0, 2]])


@DTYPES
@pytest.mark.parametrize("dims", [(16, 16), (128, 72)], ids=str)
def test_strides(seed, dtype, dims):
    """q, k and v as slices of the convolution's one output; a gate and a beta that are columns of others."""
    cu, (dk, dv) = [0, 50, 51, 120], dims
    inputs = cuda(draw(120, 3, (2, 4), dims, dtype))
    mixed = torch.cat([x.flatten(1) for x in inputs[:3]], 1).split([2 * dk, 2 * dk, 4 * dv], 1)
    strided = [x.unflatten(1, (-1, d)) for x, d in zip(mixed, (dk, dk, dv), strict=True)]
    strided += [x.new_empty(*x.shape, 3)[..., 1].copy_(x) for x in inputs[3:5]]
    wide = inputs[5].new_empty(3, 4, 2, dk, 2 * dv)[:, :, 0, :, :dv].copy_(inputs[5])
    spread = inputs[6].new_empty(*inputs[6].shape, 2)[..., 0].copy_(inputs[6])
    found = run(gated_delta_rule, [*strided, wide, spread, inputs[7]], output_final_state=True, cu_seqlens=cu)
    assert same_bits(ours(inputs, cu_seqlens=cu), found)


def test_offsets_beyond_thirty_one_bits(seed):
    inputs = cuda(draw(140, heads=(1, 1), dtype=BF16))
    spread = list(inputs)
    for i in (0, 2, 6):
        memory = torch.empty(139 * (1 << 24) + 16, dtype=BF16, device="cuda")
        spread[i] = memory.as_strided((140, 1, 16), (1 << 24, 16, 1)).copy_(inputs[i])
    assert same_bits(ours(inputs), run(gated_delta_rule, spread, output_final_state=True))


@pytest.mark.parametrize(("tokens", "cu"), [(0, [0]), (0, [0, 0, 0]), (3, [0, 0])])
def test_nothing_to_do(tokens, cu):
    made = made_by(draw(tokens, len(cu) - 1), cu_seqlens=cu)
    assert not any(made[i].any() for i in (0, 2, 3, 4, 5, 6)) and made[1].shape[0] == len(cu) - 1


@pytest.mark.parametrize("first", [1350, 2711, 5400, 11_961])
def test_many_documents(seed, first):
    """Around an edge of the backward pass's segments, between two, and at the end: 39 of them by themselves."""
    cu = offsets(np.random.default_rng(0).integers(0, 7, 12_000))
    inputs = cuda(draw(cu[-1], 12_000, (1, 1), (8, 8), state=False))
    made = ours(inputs, cu_seqlens=cu)
    documents, rows = slice(first, first + 39), slice(int(cu[first]), int(cu[first + 39]))
    expected = ours(states_and_rows(inputs, documents, rows), cu_seqlens=cu[first : first + 40] - cu[first])
    assert same_bits(states_and_rows(made, documents, rows), expected)


@DTYPES
@pytest.mark.parametrize("lengths", [[1023, 7170, 1807], [700] * 20, [8190, 1, 1, 1, 900]], ids=str)
def test_each_document_over_an_edge_of_segments(seed, dtype, lengths):
    """A document that reaches over the edge without a step of its own behind it leaves its neighbours theirs."""
    cu = offsets(lengths)
    inputs = cuda(draw(cu[-1], len(lengths), (1, 2), (16, 24), dtype))
    made = ours(inputs, cu_seqlens=cu)
    for n, (start, end) in enumerate(docs_of(cu)):
        own = states_and_rows(inputs, slice(n, n + 1), slice(int(start), int(end)))
        expected = ours(own, cu_seqlens=[0, int(end - start)])
        assert same_bits(states_and_rows(made, slice(n, n + 1), slice(int(start), int(end))), expected), n


@DTYPES
@pytest.mark.parametrize("dims", [(16, 16), (128, 128)], ids=str)
def test_repeats_to_the_bit(seed, dtype, dims):
    cu = offsets([700, 3, 150])
    inputs = cuda(draw(cu[-1], 3, (2, 8), dims, dtype))
    first = ours(inputs, cu_seqlens=cu)
    assert all(same_bits(first, ours(inputs, cu_seqlens=cu)) for _ in range(3))


def of_pack(pack):
    """Of tensors alone: what the device's tests call."""
    return lambda *inputs: ours(inputs, pack=pack)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("lengths", [[700, 0, 3, 150], None], ids=["packed", "whole"])
@pytest.mark.parametrize("dims", [(24, 40), (128, 128)], ids=str)
def test_stream_waiting_and_capture(seed, dims, lengths, plain_memory):
    pack = None if lengths is None else Pack(cu_seqlens=offsets(lengths), device="cuda")
    tokens, docs = (500, 1) if lengths is None else (sum(lengths), len(lengths))
    inputs, others = (on_cuda(draw(tokens, docs, (2, 4), dims, BF16)) for _ in range(2))
    device.assert_goes_to_the_current_stream(of_pack(pack), inputs)
    device.assert_does_not_wait(of_pack(pack), inputs)
    device.assert_can_be_captured(of_pack(pack), inputs, others)


@pytest.mark.parametrize("dims", [(16, 16), (128, 128)], ids=str)
def test_a_captured_graph_replays_the_documents_of_its_buffer(seed, dims, plain_memory):
    packs = [Pack(cu_seqlens=[0, *ends], device="cuda") for ends in ([9, 300, 301, 960], [0, 32, 700, 940])]
    inputs = on_cuda(draw(960, 4, (2, 4), dims, BF16))
    wanted = [of_pack(pack)(*inputs) for pack in packs]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = of_pack(packs[0])(*inputs)
    plans = [pack.device_plan.clone() for pack in packs]
    for plan, expected in ((plans[1], wanted[1]), (plans[0], wanted[0])):
        packs[0].device_plan.copy_(plan)
        graph.replay()
        assert same_bits(expected, made)


def test_wrong_device_documents_are_refused():
    *inputs, _, _, _ = on_cuda(draw(6))
    o, scratch = torch.full_like(inputs[2], math.nan), torch.empty(0, dtype=torch.uint8, device="cuda")
    wide, short = torch.zeros(3, device="cuda"), torch.zeros(2, dtype=torch.int64, device="cuda")
    for docs, error in ((None, TypeError), (wide, TypeError), (short, ValueError)):
        with pytest.raises(error, match="device_docs"):
            _amcore.gated_delta_rule_forward(
                o, scratch, *inputs, [0, 6], None, None, None, docs, scale=1.0, l2norm=True
            )  # fmt: skip
    assert o.isnan().all()


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_rows_of_the_table(backward):
    """The plain kernels take what no other row does."""
    for dims, dtype in (((16, 16), BF16), ((128, 128), F32), ((256, 8), BF16), ((128, 64), BF16)):
        q, k, v, *_ = cuda(draw(6, dims=dims, dtype=dtype))
        assert _amcore.gated_delta_rule_row(q, k, v, [0, 6], backward=backward) == "simple"


# The Hopper row: dims of 128, bf16. Where states come in, the largest dg of a document is a sum of 16,384 products of
# bfloat16 numbers and few others are as large, so that each case is drawn several times.


def hopper(tokens, docs, heads=(2, 8), gates=None, **options):
    inputs = draw(tokens, docs, heads, (128, 128), BF16, **options)
    if gates is not None:
        inputs[3] = gates(tokens, heads[1])
    q, k, v = cuda(inputs[:3])
    for backward in (False, True):
        assert _amcore.gated_delta_rule_row(q, k, v, [0, tokens], backward=backward) == "d128 bf16 sm90"
    return inputs


@pytest.mark.sm90
@DISTRIBUTIONS
@pytest.mark.parametrize("state", [True, False], ids=["state", "no-state"])
@pytest.mark.parametrize("lengths", [[64], [200, 1, 71], [0, 3, 128, 0, 65, 63]], ids=str)
def test_hopper_error_rule(seed, lengths, state, gates):
    cu = offsets(lengths)
    inputs, *more = [hopper(cu[-1], len(lengths), gates=gates, state=state) for _ in range(6)]
    check(inputs, docs_of(cu), more=more, cu_seqlens=cu)


@pytest.mark.sm90
@pytest.mark.parametrize("heads", [(1, 1), (1, 3), (3, 3), (1, 9)], ids=str)
def test_hopper_groups(seed, heads):
    cu = offsets([70, 5])
    inputs, *more = [hopper(75, 2, heads) for _ in range(12)]
    check(inputs, docs_of(cu), more=more, cu_seqlens=cu)


@pytest.mark.sm90
@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_hopper_gates(seed, gate):
    inputs, *more = [
        hopper(130, 1, (1, 2), lambda t, h: gate(torch.arange(t)).float()[:, None].expand(t, h)) for _ in range(6)
    ]
    made = check(inputs, [(0, 130)], more=more)
    assert all(x.isfinite().all() for x in made)


@pytest.mark.sm90
@pytest.mark.parametrize("formula", [{"scale": -0.7}, {"scale": 0.0}, {"qk_l2norm": False}], ids=str)
def test_hopper_scale_and_norm(seed, formula):
    draws = [hopper(130, 1, (1, 2)) for _ in range(4)]
    for inputs in draws if "qk_l2norm" in formula else ():
        inputs[:2] = [0.08 * x for x in inputs[:2]]
    check(draws[0], [(0, 130)], more=draws[1:], formula=formula)


@pytest.mark.sm90
def test_hopper_equal_keys(seed):
    """One key all over, and beta 1: no inverse is larger."""
    draws = [hopper(200, 1, (1, 2)) for _ in range(4)]
    for inputs in draws:
        inputs[1] = inputs[1][:1].expand(200, 1, 128).contiguous()
        inputs[3], inputs[4] = torch.zeros(200, 2), torch.ones(200, 2, dtype=BF16)
    check(draws[0], [(0, 200)], more=draws[1:])


@pytest.mark.sm90
def test_hopper_is_the_plain_row_on_long_documents(seed):
    """Beyond what the recurrence is told in: kept states, and documents that begin anywhere."""
    cu = offsets([7, 2300, 0, 1, 1500])
    inputs = cuda(hopper(cu[-1], 5))
    wide = [x.float() if x.dtype == BF16 else x for x in inputs]
    for name, x, y in zip(NAMES, ours(inputs, cu_seqlens=cu), ours(wide, cu_seqlens=cu), strict=True):
        assert (x.float() - y).norm() < 0.01 * y.norm(), name


@pytest.mark.sm90
@settings(max_examples=10)
@given(docs=packed_docs(400, 5), state=st.booleans())
def test_hopper_document_alone_is_document_in_a_pack(docs, state):
    """To the bit, with neighbours and padding that hold NaN."""
    torch.manual_seed(docs.tokens)
    inputs = cuda(hopper(max(docs.tokens, 1), len(docs.lengths), state=state))
    ends = docs_of(np.array(docs.cu_seqlens))
    inputs = [x if x is None or i in (5, 7) else x[: docs.tokens] for i, x in enumerate(inputs)]
    packed = ours(inputs, cu_seqlens=docs.cu_seqlens)
    for n, (start, end) in enumerate(ends):
        mine = list(inputs)
        for i in (0, 1, 2, 3, 4, 6):
            mine[i] = torch.full_like(inputs[i], math.nan)
            mine[i][start:end] = inputs[i][start:end]
        ids = torch.zeros(docs.tokens, dtype=torch.int64)
        ids[start:end] = 1
        if start == end:
            continue
        alone = ours([x[n : n + 1] if i in (5, 7) and x is not None else x for i, x in enumerate(mine)], doc_ids=ids)
        expected = states_and_rows(packed, slice(n, n + 1), slice(start, end))
        assert same_bits(states_and_rows(alone, slice(None), slice(start, end)), expected)
        assert not any(x[:start].any() or x[end:].any() for i, x in enumerate(alone) if i not in (1, 7))


@pytest.mark.sm90
def test_hopper_strides(seed):
    """Slices on whole words are the same to the bit; slices off them take the plain kernels."""
    cu = [0, 50, 51, 120]
    inputs = cuda(hopper(120, 3))
    mixed = torch.cat([x.flatten(1) for x in inputs[:3]], 1).split([256, 256, 1024], 1)
    strided = [x.unflatten(1, (-1, 128)) for x in mixed]
    assert same_bits(ours(inputs, cu_seqlens=cu), ours([*strided, *inputs[3:]], cu_seqlens=cu))
    odd = [x.new_empty(*x.shape[:2], 129)[..., 1:].copy_(x) for x in inputs[:3]]
    for backward in (False, True):
        assert _amcore.gated_delta_rule_row(*odd, [0, 120], backward=backward) == "simple"


def test_dims_without_a_row_are_refused():
    inputs = cuda(draw(6, dims=(264, 16)))
    with pytest.raises(NotImplementedError, match="multiples of 8 up to 256"):
        gated_delta_rule(*inputs[:5])
