"""Routed experts on CUDA against float64, by the error rule, and what must hold to the bit."""

import pytest
import torch

import automodel_c as amc
from automodel_c import _amcore
from automodel_c.ops import _experts
from automodel_c.reference import moe as reference
from tests.cuda import device
from tests.cuda.device import on_cuda, same_bits
from tests.numerics import assert_as_good_as, draws_for, pool
from tests.ops.test_moe import (
    NAMES,
    SHAPES,
    naive,
    oracle,
    ours,
    problem,
    run,
    same_without_output,
    upstream_of,
)
from tests.ops.test_moe_weight_grads import check_weight_grads, with_idle_experts

pytestmark = pytest.mark.cuda

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
LAYERS = pytest.mark.parametrize("layer", [(50, 33, 17, 5, 2), (300, 64, 40, 8, 2)], ids=["odd", "eights"])


def draw(tokens, size, inner, experts, k, dtype=F32, scale=1.0):
    return on_cuda(problem(tokens, size, inner, experts, k, dtype, scale))


def plain_run(inputs, seed=0, **options):
    torch.manual_seed(seed)
    return run(ours, inputs, upstream_of(inputs), **options)


def host(tensors):
    return [x.cpu() for x in tensors]


def compare(name, *draws, padding=None, **options):
    """The error rule over one or more draws, outputs and every gradient; float64 runs on the host."""
    found = []
    for inputs in draws:
        upstream = upstream_of(inputs)
        wide, host_padding = [x.double() for x in host(inputs)], None if padding is None else padding.cpu()
        parts = [run(f, inputs, upstream, padding=padding, **options) for f in (ours, naive)]
        parts.append(run(oracle, wide, host(upstream), padding=host_padding, **options))
        found.append(parts)
    mine, plain, truth = (pool(part) for part in zip(*found, strict=True))
    for part, a, b, c in zip(("out", "prob_sum", *NAMES), mine, plain, truth, strict=True):
        assert_as_good_as(a, b, c, name=f"{name}[{part}]", dtype=draws[0][0].dtype)


def row_of(inputs, k, backward=False):
    return _amcore.moe_row(*inputs, top_k=k, backward=backward)


@DTYPES
@pytest.mark.parametrize(("tokens", "size", "inner", "experts", "k"), SHAPES)
def test_moe_error_rule(seed, tokens, size, inner, experts, k, dtype):
    draws = draws_for(4 * tokens)
    compare("moe", *(draw(tokens, size, inner, experts, k, dtype) for _ in range(draws)), top_k=k)


TILES = [
    (1, 8, 8, 8, 1), (63, 64, 64, 8, 2), (64, 72, 8, 16, 1), (65, 136, 200, 3, 2), (127, 64, 128, 2, 1),
    (128, 256, 136, 8, 8), (129, 200, 264, 1, 1), (257, 128, 72, 8, 3), (700, 320, 192, 16, 4), (900, 64, 520, 2, 1),
]  # fmt: skip


@DTYPES
@pytest.mark.parametrize("layer", TILES, ids=lambda x: "-".join(map(str, x)))
def test_tile_edges(seed, layer, dtype):
    draws = [draw(*layer, dtype) for _ in range(draws_for(4 * layer[0]))]
    compare("tiles", *draws, top_k=layer[4])


@DTYPES
def test_many_experts_and_long_sums(seed, dtype):
    """More blocks of tokens than one, as many experts as the model has; sums over many rows; a depth of many steps."""
    compare("experts", draw(200, 64, 16, 256, 8, dtype), top_k=8)
    compare("rows", draw(1500, 16, 8, 2, 1, dtype), top_k=1)
    compare("depth", draw(40, 2048, 8, 3, 2, dtype), top_k=2)


@DTYPES
@pytest.mark.parametrize("scale", [1e-3, 20.0])
def test_small_and_large_values(seed, scale, dtype):
    compare("scale", *(draw(40, 32, 16, 6, 2, dtype, scale) for _ in range(8)), top_k=2)


@DTYPES
@LAYERS
def test_padding(seed, layer, dtype):
    """Padding holds NaN, is 0 in output and gradient, and wherever it stands changes no bit but those of sums over
    tokens, whose blocks it moves."""
    tokens, size, _, _, k = layer
    inputs = draw(*layer, dtype)
    padding = (torch.randperm(tokens + 40) < 40).cuda()
    upstream = upstream_of(inputs)
    spread = [torch.full((tokens + 40, size), torch.nan, dtype=dtype, device="cuda") for _ in range(2)]
    for wide, rows in zip(spread, (inputs[0], upstream[0]), strict=True):
        wide[~padding] = rows
    expected = run(ours, inputs, upstream, top_k=k)
    found = run(ours, [spread[0], *inputs[1:]], [spread[1], upstream[1]], top_k=k, padding=padding)
    for part in (0, 2):
        assert (found[part][padding] == 0).all() and torch.equal(found[part][~padding], expected[part])
    for part in (4, 5):
        assert torch.equal(found[part], expected[part])
    for part in (1, 3):
        assert found[part].isfinite().all()
    strided = torch.stack([padding, ~padding], 1)[:, 0]
    again = run(ours, [spread[0], *inputs[1:]], [spread[1], upstream[1]], top_k=k, padding=strided)
    assert same_bits(found, again)
    inputs[0] = torch.where(padding[:, None], 0, spread[0])
    compare("padding", inputs, padding=padding, top_k=k)


@DTYPES
@LAYERS
def test_tokens_are_independent(seed, layer, dtype):
    inputs, order = draw(*layer, dtype), torch.randperm(layer[0]).cuda()
    upstream = upstream_of(inputs)
    first = run(ours, inputs, upstream, top_k=layer[4])
    other = run(ours, [inputs[0][order], *inputs[1:]], [upstream[0][order], upstream[1]], top_k=layer[4])
    assert torch.equal(first[0][order], other[0]) and torch.equal(first[2][order], other[2])


@DTYPES
@LAYERS
def test_router_statistics(seed, layer, dtype):
    inputs, padding = draw(*layer, dtype), (torch.rand(layer[0]) < 0.3).cuda()
    _, load, prob_sum, rows = amc.ops.moe(*inputs, top_k=layer[4], padding=padding, return_router_stats=True)
    truth = reference.moe(*(x.double() for x in host(inputs)), top_k=layer[4], padding=padding.cpu())
    assert load.dtype == torch.int64 and load.tolist() == truth[1].tolist() and int(rows) == truth[3]
    torch.testing.assert_close(prob_sum.sum().cpu(), rows.cpu().float())
    _, aux = amc.ops.moe(*inputs, top_k=layer[4], padding=padding, return_aux=True)
    torch.testing.assert_close(aux.cpu().double(), reference.aux_loss(*truth[1:], layer[4]), rtol=1e-2, atol=1e-3)


@DTYPES
def test_equal_logits_take_the_lowest_experts(seed, dtype):
    inputs = draw(30, 16, 8, 70, 40, dtype)
    inputs[1][:] = inputs[1][0]
    for k in (3, 40):
        load = amc.ops.moe(*inputs, top_k=k, return_router_stats=True)[1]
        assert load.tolist() == [30] * k + [0] * (70 - k)


@DTYPES
@pytest.mark.parametrize("size", [16, 17])
def test_experts_without_tokens(seed, size, dtype):
    """One expert gets every token; the others' weights are NaN, and their gradients 0."""
    inputs = draw(600, size, 24, 5, 1, dtype)
    inputs[0] = inputs[0].abs()
    inputs[1][:], inputs[1][2] = -1.0, 1.0
    others = [0, 1, 3, 4]
    inputs[2][others], inputs[3][others] = torch.nan, torch.nan
    results = plain_run(inputs, top_k=1)
    assert all(x.isfinite().all() for x in results)
    assert all((x[others] == 0).all() and (x[2] != 0).any() for x in results[4:])


@DTYPES
def test_no_tokens(dtype):
    empty = draw(0, 16, 8, 5, 2, dtype)
    padded = [torch.full((300, 16), torch.nan, dtype=dtype, device="cuda"), *empty[1:]]
    every = torch.ones(300, dtype=torch.bool, device="cuda")
    for inputs, options in ((empty, {}), (padded, {"padding": every})):
        assert all((x == 0).all() for x in plain_run(inputs, top_k=2, **options))
        _, aux = amc.ops.moe(*inputs, top_k=2, return_aux=True, **options)
        assert aux == 0 and aux.dtype == F32


@pytest.mark.parametrize("shape", [(3, 0, 4), (3, 4, 0)], ids=["H", "I"])
def test_empty_axes(shape):
    tokens, size, inner = shape
    results = plain_run(draw(tokens, size, inner, 2, 1), top_k=1)
    assert all(x.isfinite().all() for x in results) and (results[0] == 0).all()


@DTYPES
def test_a_recomputation_leaves_its_output_out(seed, dtype):
    same_without_output(draw(60, 64, 32, 6, 2, dtype))


@DTYPES
@pytest.mark.parametrize("size", [16, 17])
def test_a_bad_row_spoils_itself_alone(seed, size, dtype):
    """Also beside the last rows of an expert, which share a tile with the next one's first."""
    inputs = draw(100, size, 8, 5, 2, dtype)
    expected = amc.ops.moe(*inputs, top_k=2)
    inputs[0][3] = torch.nan
    inputs[0][7, 2] = torch.inf
    found = amc.ops.moe(*inputs, top_k=2)
    good = [t for t in range(100) if t not in (3, 7)]
    assert torch.equal(found[good], expected[good]) and found[3].isnan().all()


@pytest.mark.parametrize("size", [64, 65])
def test_bad_rows_stay_in_their_expert(seed, size):
    """dgate_up and ddown of an expert hold nothing of the rows of its neighbours, which may be NaN."""
    inputs = draw(500, size, 16, 4, 1, BF16)
    chosen = torch.arange(500, device="cuda")[:, None].int() % 4
    rows, weights = inputs[0].clone(), torch.ones(500, 1, device="cuda")
    rows[1::4] = torch.nan

    def call(x, gate_up, down):
        return (_experts.experts(x, gate_up, down, chosen, weights),)

    upstream = [torch.randn(500, size, dtype=BF16, device="cuda")]
    clean = run(call, [inputs[0], *inputs[2:]], upstream)
    found = run(call, [rows, *inputs[2:]], upstream)
    for part in (2, 3):
        assert torch.equal(found[part][[0, 2, 3]], clean[part][[0, 2, 3]]) and found[part][1].isnan().any()


# rows


@pytest.mark.parametrize(
    ("layer", "dtype", "row"),
    [
        ((40, 64, 32, 8, 2), BF16, "bf16 sm90"),
        ((40, 64, 32, 8, 2), F32, "simple"),
        ((40, 65, 32, 8, 2), BF16, "simple"),
        ((40, 64, 33, 8, 2), BF16, "simple"),
    ],
)
def test_rows_by_name(layer, dtype, row):
    inputs = draw(*layer, dtype)
    assert row_of(inputs, 2) == row_of(inputs, 2, backward=True) == row
    router = _amcore.moe_row(*inputs[:2], top_k=2, backward=False)
    assert router == ("simple" if dtype == F32 or layer[1] % 8 else "bf16 sm90")
    pushed = torch.empty(inputs[0].numel() + 1, dtype=dtype, device="cuda")[1:].view(inputs[0].shape)
    assert _amcore.moe_row(pushed, inputs[1], top_k=2, backward=False) == "simple"


def counts_of(chosen, experts):
    return torch.bincount(chosen[chosen >= 0].flatten(), minlength=experts).tolist()


def by_row(inputs, chosen, weights, dout, counts=None, to=None, held=None):
    """(out, dhidden, dweights, dgate_up, ddown) of the experts, the row asserted that makes them; weights' gradients in
    `to` or, where they are held, added to copies."""
    hidden, _, gate_up, down = inputs
    k, to = chosen.shape[1], to or hidden.dtype
    options = {"top_k": k, "counts": counts}
    x = (hidden, gate_up, down, chosen, weights)
    empty = lambda *shape, dtype=hidden.dtype: torch.full(shape, torch.nan, dtype=dtype, device="cuda")  # noqa: E731
    rows = [_amcore.moe_row(hidden, None, gate_up, down, backward=b, **options) for b in (False, True)]
    scratch = [
        torch.empty(_amcore.moe_workspace(hidden, None, gate_up, down, backward=b, **options), dtype=torch.uint8,
                    device="cuda")
        for b in (False, True)
    ]  # fmt: skip
    out, products = empty(*hidden.shape), empty(chosen.numel(), gate_up.shape[1])
    _amcore.moe_experts_forward(out, scratch[0], *x, products, **options)
    grads = [empty(*hidden.shape), empty(*weights.shape, dtype=F32)]
    grads += [g.clone() for g in held] if held else [empty(*w.shape, dtype=to) for w in (gate_up, down)]
    _amcore.moe_experts_backward(scratch[1], dout, *x, products, *grads, accumulate=held is not None, **options)
    return rows, [out, *grads]


@DTYPES
@pytest.mark.parametrize("layer", [(50, 33, 17, 5, 2), (300, 64, 40, 8, 2), (900, 256, 128, 6, 1)], ids=str)
def test_cublaslt_row(seed, layer, dtype):
    """By the error rule as our kernels are, with gradients of weights in either dtype and added; experts without rows,
    and rows without an expert here."""
    inputs, k = draw(*layer, dtype), layer[4]
    hidden, _, gate_up, down = inputs
    chosen = torch.rand(layer[0], layer[3] - 1, device="cuda").topk(k).indices.int()  # the last one is nobody's choice
    chosen[:3] = -1
    weights = torch.rand(layer[0], k, device="cuda").to(dtype).float()
    dout, counts = torch.randn_like(hidden), counts_of(chosen, layer[3])
    rows, mine = by_row(inputs, chosen, weights, dout)
    assert set(rows) == {"simple" if dtype == F32 or layer[1] % 8 else "bf16 sm90"}
    rows, theirs = by_row(inputs, chosen, weights, dout, counts)
    assert set(rows) == {"cublasLt"}

    def plain(x, w, gate_up, down):
        out = torch.zeros_like(x)
        for e in range(layer[3]):
            token, j = torch.where(chosen.to(x.device) == e)
            gate, up = torch.nn.functional.linear(x[token], gate_up[e]).chunk(2, -1)
            y = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, down[e])
            out = out.index_add(0, token, y * w[token, j, None].to(y.dtype))
        return (out,)

    inputs = [hidden, weights, gate_up, down]
    naive_parts = run(plain, inputs, [dout])
    truth = run(plain, [x.double() for x in host(inputs)], host([dout]))
    for name, *parts in zip(("out", "dhidden", "dweights", *NAMES[2:]), mine, theirs, naive_parts, truth, strict=True):
        for row, found in zip(("ours", "cublasLt"), parts[:2], strict=True):
            assert_as_good_as(found, *parts[2:], name=f"{name}[{row}]", dtype=dtype)
    assert not theirs[3][-1].any() and not theirs[4][-1].any()


@DTYPES
def test_cublaslt_adds_gradients(seed, dtype):
    inputs = draw(300, 64, 40, 8, 2, dtype)
    chosen = torch.rand(300, 7, device="cuda").topk(2).indices.int()
    weights, dout = torch.rand(300, 2, device="cuda"), torch.randn_like(inputs[0])
    counts = counts_of(chosen, 8)
    fresh = by_row(inputs, chosen, weights, dout, counts, to=F32)[1][3:]
    held = [torch.randn(x.shape, device="cuda") for x in inputs[2:]]
    added = by_row(inputs, chosen, weights, dout, counts, held=held)[1][3:]
    for before, part, after in zip(held, fresh, added, strict=True):
        torch.testing.assert_close(after, before + part, rtol=1e-5, atol=1e-4)
        assert torch.equal(after[-1], before[-1])


def test_counts_are_checked(seed):
    hidden, _, gate_up, down = draw(6, 8, 4, 3, 2)
    for counts, words in (
        ([4, 8], "counts has 2 elements, there are 3"),
        ([4, 9, 0], r"counts\[1\] is 9, 0 to 8 rows"),
    ):
        with pytest.raises(ValueError, match=words):
            _amcore.moe_row(hidden, None, gate_up, down, top_k=2, backward=False, counts=counts)


@DTYPES
@pytest.mark.parametrize("shape", [(40, 33, 17, 6, 2), (600, 144, 40, 4, 1), (500, 320, 264, 5, 2)], ids=str)
def test_weight_gradients_of_either_dtype(seed, shape, dtype):
    check_weight_grads(on_cuda(with_idle_experts(*shape, dtype)), shape[-1])


@DTYPES
@LAYERS
def test_repeats_to_the_bit(seed, layer, dtype):
    inputs = draw(*layer, dtype)
    first = plain_run(inputs, top_k=layer[4])
    assert all(same_bits(first, plain_run(inputs, top_k=layer[4])) for _ in range(3))


@DTYPES
@LAYERS
def test_strided_inputs(seed, layer, dtype):
    inputs = draw(*layer, dtype)
    upstream = upstream_of(inputs)
    expected = run(ours, inputs, upstream, top_k=layer[4])

    def apart(x):
        wide = torch.full((*x.shape[:-1], x.shape[-1] + 24), torch.nan, dtype=x.dtype, device="cuda")
        return wide[..., 8 : 8 + x.shape[-1]].copy_(x)

    laid = [apart(x) for x in inputs]
    laid[2] = laid[2].transpose(0, 1).clone().transpose(0, 1)
    found = run(ours, laid, [apart(upstream[0]), upstream[1]], top_k=layer[4])
    assert same_bits(expected, found)
    spread = run(
        ours, inputs, [torch.ones(1, 1, dtype=dtype, device="cuda").expand(inputs[0].shape), upstream[1]], top_k=2
    )
    ones = run(ours, inputs, [torch.ones_like(inputs[0]), upstream[1]], top_k=2)
    assert same_bits(ones, spread)


@DTYPES
@LAYERS
def test_halves(seed, layer, dtype):
    """The router and the experts apart give the whole layer, to the bit where nothing is added twice."""
    inputs, k = draw(*layer, dtype), layer[4]
    upstream = upstream_of(inputs)

    def apart(hidden, router_weight, gate_up, down):
        weights, chosen, _, prob_sum, _ = _experts.route(hidden, router_weight, None, k)
        return _experts.experts(hidden, gate_up, down, chosen, weights), prob_sum

    whole, halves = run(ours, inputs, upstream, top_k=k), run(apart, inputs, upstream)
    for part in (0, 1, 3, 4, 5):
        assert torch.equal(whole[part], halves[part]), f"part {part}"
    truth = run(oracle, [x.double() for x in host(inputs)], host(upstream), top_k=k)
    plain = run(naive, inputs, upstream, top_k=k)
    assert_as_good_as(halves[2], plain[2], truth[2], name="dhidden")


@DTYPES
def test_rows_without_an_expert_here(seed, dtype):
    hidden, _, gate_up, down = draw(300, 64, 40, 8, 2, dtype)
    chosen = torch.randint(-1, 8, (300, 1), device="cuda", dtype=torch.int32)
    chosen = torch.cat([chosen, torch.where(chosen == 0, -1, chosen - 1)], 1).clamp(min=-1)
    weights = torch.rand(300, 2, device="cuda").to(dtype).float()
    call = lambda x, g, d, w: (_experts.experts(x, g, d, chosen, w),)  # noqa: E731
    upstream = [torch.randn_like(hidden)]
    out, dhidden, _, _, dweights = run(call, [hidden, gate_up, down, weights], upstream)
    none = (chosen < 0).all(1)
    assert none.any() and (out[none] == 0).all() and (dhidden[none] == 0).all() and (dweights[chosen < 0] == 0).all()
    assert (out[~none] != 0).any(1).all() and (dweights[chosen >= 0] != 0).all()


def test_gradients_that_are_not_needed(seed):
    inputs = draw(300, 64, 40, 8, 2, BF16)
    g = torch.ones_like(inputs[0])
    every = torch.autograd.grad(amc.ops.moe(*[x.requires_grad_() for x in inputs], top_k=2), inputs, g)
    for i in range(4):
        mixed = [x.detach().requires_grad_(j == i) for j, x in enumerate(inputs)]
        found = torch.autograd.grad(amc.ops.moe(*mixed, top_k=2), mixed[i], g)
        assert torch.equal(every[i], found[0])
    frozen = [x.detach() for x in inputs]
    assert torch.equal(amc.ops.moe(*frozen, top_k=2), amc.ops.moe(*inputs, top_k=2))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@DTYPES
@LAYERS
def test_stream_waiting_and_capture(seed, layer, dtype, plain_memory):
    """A captured graph routes what its memory holds at the replay."""
    inputs, others = draw(*layer, dtype), draw(*layer, dtype)
    upstream = upstream_of(inputs)
    call = lambda *x: run(ours, x, upstream, top_k=layer[4])  # noqa: E731
    device.assert_goes_to_the_current_stream(call, inputs)
    device.assert_does_not_wait(call, inputs)
    device.assert_can_be_captured(call, inputs, others)


def test_nothing_is_kept(seed, plain_memory):
    inputs = draw(300, 64, 40, 8, 2, BF16)
    plain_run(inputs, top_k=2)
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        plain_run(inputs, top_k=2)
    assert torch.cuda.memory_allocated() == before


def test_what_cuda_refuses():
    inputs = draw(4, 8, 8, 1025, 1)
    with pytest.raises(NotImplementedError, match="1025 experts, at most 1024"):
        amc.ops.moe(*inputs, top_k=1)
    with pytest.raises(ValueError, match="padding is on cpu"):
        amc.ops.moe(*draw(4, 8, 8, 3, 1), top_k=1, padding=torch.zeros(4, dtype=torch.bool))


# the shared expert


@DTYPES
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (300, 64), (65, 3072), (2, 0), (0, 8)], ids=str)
def test_shared_expert(seed, shape, dtype):
    found = []
    for _ in range(draws_for(min(shape[0], shape[0] * shape[1]))):
        inputs = [torch.randn(s, device="cuda").to(dtype) for s in (shape, shape, (shape[0], 1))]
        upstream = [torch.randn(shape, device="cuda").to(dtype)]
        plain = lambda out, shared, gate: (out + torch.sigmoid(gate) * shared,)  # noqa: E731
        mine = lambda *x: (amc.ops.add_shared_expert(*x),)  # noqa: E731
        oracle64 = lambda *x: (reference.add_shared_expert(*x),)  # noqa: E731
        cases = ((mine, inputs), (plain, inputs), (oracle64, [x.double() for x in inputs]))
        found.append([run(f, x, upstream) for f, x in cases])
    mine, plain, truth = (pool(part) for part in zip(*found, strict=True))
    for part, (a, b, c) in enumerate(zip(mine, plain, truth, strict=True)):
        assert_as_good_as(a, b, c, name=f"shared[{part}]")


@DTYPES
def test_shared_expert_layouts(seed, dtype):
    out, shared, gate = (torch.randn(33, n, device="cuda").to(dtype) for n in (64, 64, 1))
    upstream = [torch.randn(33, 64, device="cuda").to(dtype)]
    call = lambda *x: (amc.ops.add_shared_expert(*x),)  # noqa: E731
    expected = run(call, [out, shared, gate], upstream)
    flat = run(call, [out, shared, gate[:, 0]], upstream)
    assert all(torch.equal(x, y.view(x.shape)) for x, y in zip(expected, flat, strict=True))
    wide = torch.full((33, 99), torch.nan, dtype=dtype, device="cuda")
    found = run(call, [wide[:, 3:67].copy_(out), shared, gate], upstream)
    assert same_bits(expected[:1], found[:1])
