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


def test_dims_without_a_row_are_refused():
    inputs = cuda(draw(6, dims=(264, 16)))
    with pytest.raises(NotImplementedError, match="multiples of 8 up to 256"):
        gated_delta_rule(*inputs[:5])
