"""moe, its auxiliary losses and add_shared_expert against float64, and what their callers rely on."""

import statistics

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import automodel_c as amc
from automodel_c import _amcore
from automodel_c.ops import _alloc, _experts
from automodel_c.reference import moe as reference
from tests.numerics import assert_as_good_as, draws_for, measure, pool
from tests.strategies import with_layout

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
NAMES = ("hidden", "router_weight", "gate_up", "down")


def problem(tokens, size, inner, experts, k, dtype=torch.float32, scale=1.0):
    """Inputs whose choice of experts no rounding changes: rows without a clear margin are drawn again."""
    hidden = (scale * torch.randn(tokens, size)).to(dtype)
    router = (torch.randn(experts, size) / max(size, 1) ** 0.5).to(dtype)
    while k < experts and size:
        top = torch.topk(hidden.double() @ router.double().T, k + 1, dim=-1).values
        near = top[:, -2] - top[:, -1] < 0.02 * top.abs().amax(-1) if tokens else torch.zeros(0, dtype=torch.bool)
        if not near.any():
            break
        hidden[near] = (scale * torch.randn(int(near.sum()), size)).to(dtype)
    gate_up = (torch.randn(experts, 2 * inner, size) / max(size, 1) ** 0.5).to(dtype)
    down = (torch.randn(experts, size, inner) / max(inner, 1) ** 0.5).to(dtype)
    return [hidden, router, gate_up, down]


def naive(hidden, router_weight, gate_up, down, *, top_k, padding=None):
    """transformers' eager router and experts; (out, sum of probabilities), like `ours`."""
    real = torch.ones(len(hidden), dtype=torch.bool, device=hidden.device) if padding is None else ~padding
    x = hidden[real]
    p = F.softmax(F.linear(x, router_weight), dtype=torch.float, dim=-1)
    weights, chosen = torch.topk(p, top_k, dim=-1)
    weights = (weights / weights.sum(-1, keepdim=True)).to(hidden.dtype)
    out = torch.zeros_like(x)
    for e in range(len(router_weight)):
        token, place = torch.where(chosen == e)
        gate, up = F.linear(x[token], gate_up[e]).chunk(2, dim=-1)
        y = F.linear(F.silu(gate) * up, down[e]) * weights[token, place, None]
        out = out.index_add(0, token, y)
    return torch.zeros_like(hidden).index_copy(0, real.nonzero().flatten(), out), p.sum(0)


def ours(*inputs, **options):
    out, _, prob_sum, _ = amc.ops.moe(*inputs, **options, return_router_stats=True)
    return out, prob_sum


def oracle(*inputs, **options):
    out, _, prob_sum, _ = reference.moe(*inputs, **options)
    return out, prob_sum


def run(function, inputs, upstream, **options):
    """Outputs and the gradients of all inputs."""
    inputs = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in inputs]
    outputs = function(*inputs, **options)
    upstream = [g.to(y.dtype) for g, y in zip(upstream, outputs, strict=True)]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, inputs, upstream)]


def upstream_of(inputs):
    return [torch.randn(inputs[0].shape).to(inputs[0]), torch.randn(len(inputs[1])).to(inputs[0].device)]


def plain_run(inputs, seed=0, **options):
    torch.manual_seed(seed)
    return run(ours, inputs, upstream_of(inputs), **options)


PARTS = ("out", "prob_sum", *NAMES)


def results_of(inputs, **options):
    """Outputs and every gradient: ours, the plain formula's, the oracle's."""
    upstream, wide = upstream_of(inputs), [x.double() for x in inputs]
    return [run(f, x, upstream, **options) for f, x in ((ours, inputs), (naive, inputs), (oracle, wide))]


def compare(name, *draws, **options):
    """The error rule over one or more draws of inputs, outputs and every gradient."""
    found = [results_of(inputs, **options) for inputs in draws]
    mine, plain, truth = (pool(part) for part in zip(*found, strict=True))
    for part, a, b, c in zip(PARTS, mine, plain, truth, strict=True):
        assert_as_good_as(a, b, c, name=f"{name}[{part}]", dtype=draws[0][0].dtype)


def compare_in_the_median(name, *draws, **options):
    """The error rule where one number decides a draw's largest error, so that the twin may be lucky: the norm over all
    draws together, the largest element in the median of them."""
    found = [results_of(inputs, **options) for inputs in draws]
    dtype = draws[0][0].dtype
    mine, plain, truth = (pool(part) for part in zip(*found, strict=True))
    for k, part in enumerate(PARTS):
        numbers = measure(mine[k], plain[k], truth[k], dtype=dtype)
        assert numbers["ours_fro"] <= numbers["limit_fro"], f"{name}[{part}]: {numbers}"
        each = [measure(*(results[k] for results in draw), dtype=dtype) for draw in found]
        middle = statistics.median(n["ours_max"] / n["limit_max"] for n in each)
        assert middle <= 1, f"{name}[{part}]: the largest element is {middle:.2f} times its limit in the median"


# tokens, hidden size, inner size, experts, k
SHAPES = [
    pytest.param(1, 1, 1, 1, 1, id="ones"),
    pytest.param(1, 8, 4, 3, 2, id="one-token"),
    pytest.param(5, 7, 3, 3, 3, id="all-experts"),
    pytest.param(47, 31, 15, 2, 1, id="tile-1"),
    pytest.param(48, 32, 16, 2, 1, id="tile"),
    pytest.param(49, 33, 17, 2, 1, id="tile+1"),
    pytest.param(60, 65, 65, 40, 5, id="many-experts"),
    pytest.param(30, 129, 130, 5, 2, id="wide"),
]


@DTYPES
@pytest.mark.parametrize(("tokens", "size", "inner", "experts", "k"), SHAPES)
def test_gate(isa, seed, tokens, size, inner, experts, k, dtype):
    draws = draws_for(4 * tokens)  # a token's choice has few degrees of freedom
    compare("moe", *(problem(tokens, size, inner, experts, k, dtype) for _ in range(draws)), top_k=k)


@DTYPES
def test_blocks_of_rows_and_of_depth(isa, seed, dtype):
    """More rows than share a packed weight, than a chain of additions, and a depth of several chains."""
    compare("rows", problem(1000, 16, 8, 2, 1, dtype), top_k=1)
    compare("depth", problem(20, 1100, 8, 3, 2, dtype), top_k=2)


@DTYPES
@pytest.mark.parametrize("scale", [1e-3, 20.0])
def test_small_and_large_values(isa, seed, scale, dtype):
    """With large logits, which are rounded coarsely, one token's weights decide the largest error. Of 60 runs of eight
    draws pooled, ours over the twin's was 0.9 to 1.0 in the median of every part, and up to 3.1 either way."""
    compare_in_the_median("scale", *(problem(40, 32, 16, 6, 2, dtype, scale) for _ in range(9)), top_k=2)


def same_without_output(inputs):
    """A recomputation that leaves its output out: its statistics, what it keeps for backward and so every gradient have
    the same bits."""
    upstream, calls = upstream_of(inputs), []

    def layer(*inputs):
        calls.append(None)
        out, _, prob_sum, _ = amc.ops.moe(*inputs, top_k=2, return_router_stats=True, need_output=len(calls) == 1)
        return out, prob_sum

    twice = lambda *inputs: checkpoint(layer, *inputs, use_reentrant=False)  # noqa: E731
    expected = run(ours, inputs, upstream, top_k=2)
    found = run(twice, inputs, upstream)
    assert len(calls) == 2 and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    whole = amc.ops.moe(*inputs, top_k=2, return_router_stats=True)
    without = amc.ops.moe(*inputs, top_k=2, return_router_stats=True, need_output=False)
    assert without[0].shape == whole[0].shape and without[0].dtype == inputs[0].dtype and not without[0].any()
    assert all(torch.equal(a, b) for a, b in zip(without[1:], whole[1:], strict=True))


@DTYPES
def test_a_recomputation_leaves_its_output_out(isa, seed, dtype):
    same_without_output(problem(60, 40, 24, 6, 2, dtype))


@DTYPES
def test_a_recomputation_of_experts_alone_leaves_their_sum_out(isa, seed, dtype):
    """What goes behind it takes the first forward's, as rows that travel home do: every gradient has the same bits."""
    hidden, router, gate_up, down = problem(60, 40, 24, 6, 2, dtype)
    weights, chosen, *_ = _experts.route(hidden, router, None, 2)
    chosen[7], chosen[8, 1] = -1, -1
    inputs = [x.detach().requires_grad_() for x in (hidden, gate_up, down, weights)]
    dout, calls = torch.randn_like(hidden), []

    def layer(x, gate_up, down, weights):
        calls.append(None)
        return _experts.experts(x, gate_up, down, chosen, weights, need_output=len(calls) == 1)

    found = torch.autograd.grad(checkpoint(layer, *inputs, use_reentrant=False), inputs, dout)
    x, gate_up, down, weights = inputs
    whole = _experts.experts(x, gate_up, down, chosen, weights)
    without = _experts.experts(x, gate_up, down, chosen, weights, need_output=False)
    assert len(calls) == 2 and not without.any() and without.shape == whole.shape and whole.any()
    expected = torch.autograd.grad(whole, inputs, dout)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_an_output_that_is_left_out_has_a_gradient_to_miss(isa, seed):
    """What comes after it saves for backward what it saved before; the zeros themselves are not differentiated."""
    inputs = problem(6, 8, 4, 3, 2, torch.float32)
    out = amc.ops.moe(*(x.requires_grad_(i == 3) for i, x in enumerate(inputs)), top_k=2, need_output=False)
    assert out.requires_grad and out.stride() == (0, 1)
    with pytest.raises(ValueError, match="dout"):
        out.sum().backward()


@DTYPES
def test_padding(isa, seed, dtype):
    """Padding holds NaN, is 0 in output and gradient, and wherever it stands no other bit changes."""
    inputs = problem(60, 40, 24, 6, 2, dtype)
    padding = torch.rand(100) < 0.4
    padding[:60] = False
    padding = padding[torch.randperm(100)]
    padding[torch.nonzero(~padding)[60:]] = True
    real = torch.nonzero(~padding).flatten()
    spread = torch.full((100, 40), torch.nan, dtype=dtype)
    inputs[0] = inputs[0][: len(real)]
    spread[real] = inputs[0]
    upstream = upstream_of(inputs)
    wide = torch.full((100, 40), torch.nan, dtype=dtype).index_copy(0, real, upstream[0])
    expected = run(ours, inputs, upstream, top_k=2)
    found = run(ours, [spread, *inputs[1:]], [wide, upstream[1]], top_k=2, padding=padding)
    for part, (a, b) in enumerate(zip(expected, found, strict=True)):
        if part in (0, 2):
            assert (b[padding] == 0).all()
            b = b[real]
        assert torch.equal(a, b), f"part {part}"
    strided = torch.stack([padding, ~padding], 1)[:, 0]
    again = run(ours, [spread, *inputs[1:]], [wide, upstream[1]], top_k=2, padding=strided)
    assert all(map(torch.equal, found, again))


@settings(max_examples=8)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(0, 60),
    experts=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    data=st.data(),
)
def test_tokens_are_independent(seed, tokens, experts, dtype, data):
    """Permuted tokens permute outputs and hidden's gradient, to the bit; every real row is counted k times."""
    torch.manual_seed(seed)
    k = data.draw(st.integers(1, experts))
    inputs, padding, order = problem(tokens, 24, 8, experts, k, dtype), torch.rand(tokens) < 0.3, torch.randperm(tokens)
    upstream = upstream_of(inputs)
    first = run(ours, inputs, upstream, top_k=k, padding=padding)
    other = run(
        ours, [inputs[0][order], *inputs[1:]], [upstream[0][order], upstream[1]], top_k=k, padding=padding[order]
    )
    assert torch.equal(first[0][order], other[0]) and torch.equal(first[2][order], other[2])
    _, load, prob_sum, rows = amc.ops.moe(*inputs, top_k=k, padding=padding, return_router_stats=True)
    assert load.dtype == torch.int64 and rows.shape == () and prob_sum.dtype == torch.float32
    assert int(rows) == int((~padding).sum()) and int(load.sum()) == int(rows) * k
    torch.testing.assert_close(prob_sum.sum(), rows.float())


@DTYPES
def test_one_expert_is_dense(isa, seed, dtype):
    """One expert is the dense SwiGLU layer, whatever the router says."""
    x, router, gate_up, down = problem(50, 40, 30, 1, 1, dtype)

    def dense(x, gate_up, down, dtype=dtype):
        gate, up = F.linear(x.to(dtype), gate_up[0].to(dtype)).chunk(2, dim=-1)
        return (F.linear(F.silu(gate) * up, down[0].to(dtype)),)

    upstream = [torch.randn(50, 40).to(dtype)]
    mine = run(lambda x, g, d: (amc.ops.moe(x, router, g, d, top_k=1),), [x, gate_up, down], upstream)
    plain = run(dense, [x, gate_up, down], upstream)
    wide = [t.double() for t in (x, gate_up, down)]
    truth = run(lambda *t: dense(*t, dtype=torch.float64), wide, upstream)
    for part, (a, b, c) in enumerate(zip(mine, plain, truth, strict=True)):
        assert_as_good_as(a, b, c, name=f"dense[{part}]")


@DTYPES
def test_equal_logits_take_the_lowest_experts(isa, seed, dtype):
    x, router, gate_up, down = problem(30, 16, 8, 7, 7, dtype)
    router[:] = router[0]
    out, load, _, _ = amc.ops.moe(x, router, gate_up, down, top_k=3, return_router_stats=True)
    assert load.tolist() == [30, 30, 30, 0, 0, 0, 0]
    alone = amc.ops.moe(x, router[:3], gate_up[:3], down[:3], top_k=3)
    torch.testing.assert_close(out, alone, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    router[4] = 2 * router[0]  # above the others where the logit is positive, below where it is negative
    sign = x.double() @ router[0].double() > 0
    load = amc.ops.moe(x, router, gate_up, down, top_k=3, return_router_stats=True)[1]
    assert load.tolist() == [30, 30, int((~sign).sum()), 0, int(sign.sum()), 0, 0]


@DTYPES
def test_experts_without_tokens(isa, seed, dtype):
    inputs = problem(20, 16, 8, 5, 2, dtype)
    inputs[0] = inputs[0].abs()
    inputs[1][2:] = -1.0
    inputs[1][:2] = 1.0
    inputs[2][2:], inputs[3][2:] = torch.nan, torch.nan
    results = plain_run(inputs, top_k=2)
    assert all(x.isfinite().all() for x in results)
    assert all((x[2:] == 0).all() and (x[:2] != 0).any() for x in results[4:])


@DTYPES
def test_no_tokens(isa, dtype):
    empty = problem(0, 16, 8, 5, 2, dtype)
    for inputs, options in (
        (empty, {}),
        ([torch.full((9, 16), torch.nan, dtype=dtype), *empty[1:]], {"padding": torch.ones(9, dtype=torch.bool)}),
    ):
        assert all((x == 0).all() for x in plain_run(inputs, top_k=2, **options))
        out, aux = amc.ops.moe(*inputs, top_k=2, return_aux=True, **options)
        assert (out == 0).all() and aux == 0 and aux.dtype == torch.float32
        stats = amc.ops.moe(*inputs, top_k=2, return_router_stats=True, **options)[1:]
        assert amc.ops.load_balancing_loss([stats]) == 0


@pytest.mark.parametrize("shape", [(3, 0, 4), (3, 4, 0)], ids=["H", "I"])
def test_empty_axes(isa, shape):
    tokens, size, inner = shape
    results = plain_run(problem(tokens, size, inner, 2, 1), top_k=1)
    assert all(x.isfinite().all() for x in results) and (results[0] == 0).all()


def test_a_bad_row_spoils_itself_alone(isa, seed):
    inputs = problem(10, 16, 8, 5, 2)
    expected = amc.ops.moe(*inputs, top_k=2)
    inputs[0][3] = torch.nan
    inputs[0][7, 2] = torch.inf
    found = amc.ops.moe(*inputs, top_k=2)
    good = [t for t in range(10) if t not in (3, 7)]
    assert torch.equal(found[good], expected[good]) and found[3].isnan().all()


# auxiliary losses


def test_aux_of_uniform_routing_is_one(isa):
    x, router, gate_up, down = problem(24, 16, 8, 6, 6)
    for k in (1, 2, 6):
        _, aux = amc.ops.moe(x, torch.zeros_like(router), gate_up, down, top_k=k, return_aux=True)
        torch.testing.assert_close(aux, torch.ones(()))


@DTYPES
def test_aux(isa, seed, dtype):
    """By the error rule, gradient included, with padding; and the loss has no part in the experts' gradients."""
    inputs, padding = problem(50, 32, 8, 6, 2, dtype), torch.rand(50) < 0.3

    def mine(x, router):
        return (amc.ops.moe(x, router, *inputs[2:], top_k=2, padding=padding, return_aux=True)[1].reshape(1),)

    def formula(x, router, wide=torch.float32):
        p = torch.softmax(F.linear(x, router)[~padding], dim=-1, dtype=wide)
        load = F.one_hot(torch.topk(p, 2, dim=-1).indices, 6).sum((0, 1)).to(wide)
        return (((load * 6 / (2 * len(p))) * (p.sum(0) / len(p))).sum()[None],)

    one = [torch.ones(1)]
    a, b = run(mine, inputs[:2], one), run(formula, inputs[:2], one)
    truth = run(lambda x, r: formula(x, r, torch.float64), [x.double() for x in inputs[:2]], one)
    for part, (x, y, z) in enumerate(zip(a, b, truth, strict=True)):
        assert_as_good_as(x, y, z, name=f"aux[{part}]", dtype=dtype)
    _, load, prob_sum, rows = amc.ops.moe(*inputs, top_k=2, padding=padding, return_router_stats=True)
    assert torch.equal(amc.ops.per_layer_aux_loss(load, prob_sum, rows, top_k=2), a[0][0])


def test_load_balancing_loss_is_transformers(seed):
    modeling = pytest.importorskip(
        "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe", reason="transformers is not installed"
    )
    mask = torch.ones(2, 15, dtype=torch.int64)
    mask[0, 11:] = mask[1, 4:] = 0
    layers = [problem(30, 16, 8, 6, 2) for _ in range(3)]
    logits = [(x @ router.T).requires_grad_() for x, router, *_ in layers]
    routers = [layer[1].requires_grad_() for layer in layers]
    for padding in (None, mask.reshape(-1) == 0):
        options = {"padding": padding, "top_k": 2, "return_router_stats": True}
        loss = amc.ops.load_balancing_loss([amc.ops.moe(*layer, **options)[1:] for layer in layers])
        theirs = modeling.load_balancing_loss_func(tuple(logits), 6, 2, None if padding is None else mask)
        torch.testing.assert_close(loss, theirs)
        found = torch.autograd.grad(loss, routers)
        expected = [g.T @ x[0] for g, x in zip(torch.autograd.grad(theirs, logits), layers, strict=True)]
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)
        truth = [reference.moe(*(x.detach() for x in layer), top_k=2, padding=padding)[1:] for layer in layers]
        torch.testing.assert_close(loss.double(), reference.load_balancing_loss(truth))


def test_transformers_block(seed):
    """The whole block of transformers: router, experts, shared expert and its gate."""
    modeling = pytest.importorskip(
        "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe", reason="transformers is not installed"
    )
    from transformers import Qwen3_5MoeTextConfig

    sizes = {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 8}
    config = Qwen3_5MoeTextConfig(hidden_size=16, num_experts=6, num_experts_per_tok=2, **sizes)
    config._experts_implementation = "eager"
    block = modeling.Qwen3_5MoeSparseMoeBlock(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(1, 20, 16)
    expected = block(x)[0]
    experts = block.experts
    routed = amc.ops.moe(x[0], block.gate.weight, experts.gate_up_proj, experts.down_proj, top_k=2)
    out = amc.ops.add_shared_expert(routed, block.shared_expert(x[0]), block.shared_expert_gate(x[0]))
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_load_is_counted_once_under_checkpointing(seed, recompute):
    """Tokens 2 x 3, k = 2: load sums to 12 once; outputs and gradients do not depend on what is made again."""
    inputs = [x.requires_grad_() for x in problem(6, 16, 8, 4, 2)]
    counted = []

    def layer(*x):
        out, load, prob_sum, _ = amc.ops.moe(*x, top_k=2, return_router_stats=True)
        counted.append(load)
        return out, prob_sum

    expected = run(ours, inputs, [torch.ones(6, 16), torch.ones(4)], top_k=2)
    if recompute == "none":
        outputs = layer(*inputs)
    else:
        policy = torch.utils.checkpoint.create_selective_checkpoint_contexts
        options = {"context_fn": lambda: policy([torch.ops.automodel_c.moe.default])} if recompute != "full" else {}
        outputs = checkpoint(layer, *inputs, use_reentrant=False, **options)
    total = counted[0].sum()
    found = [*outputs, *torch.autograd.grad(outputs, inputs, [torch.ones(6, 16), torch.ones(4)])]
    assert int(total) == 12 and all(torch.equal(counted[0], again) for again in counted)
    assert all(map(torch.equal, expected, found))


# what callers rely on


@DTYPES
def test_threads_change_no_bit(seed, dtype):
    inputs = problem(300, 72, 40, 5, 2, dtype)
    before, results = _amcore.build_info()["num_threads"], []
    for threads in (1, 2, 5):
        _amcore.set_num_threads(threads)
        results.append(plain_run(inputs, top_k=2))
    _amcore.set_num_threads(before)
    assert all(all(map(torch.equal, results[0], other)) for other in results[1:])


@DTYPES
@pytest.mark.parametrize("layout", ["rows", "offset"])
def test_layouts_change_no_bit(isa, seed, layout, dtype):
    inputs = problem(50, 33, 17, 5, 2, dtype)
    upstream = upstream_of(inputs)
    expected = run(ours, inputs, upstream, top_k=2)
    laid = [with_layout(x, layout) for x in inputs]
    laid[2] = laid[2].transpose(0, 1).clone().transpose(0, 1)
    found = run(ours, laid, [with_layout(upstream[0], "strided"), with_layout(upstream[1], "strided")], top_k=2)
    assert all(map(torch.equal, expected, found))
    spread = run(ours, inputs, [torch.ones(1, 1, dtype=dtype).expand(50, 33), torch.ones(1).expand(5)], top_k=2)
    ones = run(ours, inputs, [torch.ones(50, 33, dtype=dtype), torch.ones(5)], top_k=2)
    assert all(map(torch.equal, ones, spread))


def test_gradients_that_are_not_needed(seed):
    inputs = problem(30, 16, 8, 5, 2)
    g = torch.ones(30, 16)
    every = torch.autograd.grad(amc.ops.moe(*[x.requires_grad_() for x in inputs], top_k=2), inputs, g)
    for i in range(4):
        mixed = [x.detach().requires_grad_(j == i) for j, x in enumerate(inputs)]
        found = torch.autograd.grad(amc.ops.moe(*mixed, top_k=2), mixed[i], g)
        assert torch.equal(every[i], found[0])
    frozen = [x.detach() for x in inputs]
    assert torch.equal(amc.ops.moe(*frozen, top_k=2), amc.ops.moe(*inputs, top_k=2))


def test_only_the_statistics_have_a_gradient(seed):
    inputs = [x.requires_grad_() for x in problem(30, 16, 8, 5, 2)]
    _, aux = amc.ops.moe(*inputs, top_k=2, return_aux=True)
    grads = torch.autograd.grad(aux, inputs)
    assert (grads[0] != 0).any() and (grads[1] != 0).any() and (grads[2] == 0).all() and (grads[3] == 0).all()


def test_backward_again_and_second_derivative(seed):
    inputs = [x.requires_grad_() for x in problem(30, 16, 8, 5, 2)]
    out = amc.ops.moe(*inputs, top_k=2)
    first = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    again = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    assert all(map(torch.equal, first, again))
    graph = torch.autograd.grad(out.sum(), inputs[0], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="second derivative"):
        graph.sum().backward()


def test_compile_and_meta(seed):
    inputs, padding = problem(12, 16, 8, 5, 2), torch.arange(12) % 4 == 0
    upstream = upstream_of(inputs)

    def both(*x):
        out, aux = amc.ops.moe(*x, top_k=2, padding=padding, return_aux=True)
        return amc.ops.add_shared_expert(out, x[0], x[0][:, :1]), aux.reshape(1)

    expected = run(both, inputs, [upstream[0], torch.ones(1)])
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, expected, run(compiled, inputs, [upstream[0], torch.ones(1)])))
    meta = amc.ops.moe(*(x.to("meta") for x in inputs), top_k=2, return_router_stats=True)
    assert [tuple(x.shape) for x in meta] == [(12, 16), (5,), (5,), ()]


def test_operators_are_registered_rightly(seed, monkeypatch):
    monkeypatch.setattr(_alloc, "empty", lambda shape, dtype, device: torch.empty(shape, dtype=dtype, device=device))
    inputs = [x.requires_grad_() for x in problem(6, 8, 4, 3, 2)]
    torch.library.opcheck(torch.ops.automodel_c.moe.default, (*inputs, None, 2, True, True))
    known = ("test_schema", "test_autograd_registration", "test_faketensor")  # the rest differentiates what is left out
    torch.library.opcheck(torch.ops.automodel_c.moe.default, (*inputs, None, 2, True, False), test_utils=known)
    torch.library.opcheck(torch.ops.automodel_c.moe_route.default, (*inputs[:2], None, 2))
    chosen, weights = torch.tensor([[0, 2], [-1, -1]] * 3, dtype=torch.int32), torch.rand(6, 2, requires_grad=True)
    rows = (inputs[0], *inputs[2:], chosen, weights, True)
    torch.library.opcheck(torch.ops.automodel_c.moe_experts.default, (*rows, True))
    torch.library.opcheck(torch.ops.automodel_c.moe_experts.default, (*rows, False), test_utils=known)
    shared = [torch.randn(*s, requires_grad=True) for s in ((6, 8), (6, 8), (6, 1))]
    torch.library.opcheck(torch.ops.automodel_c.add_shared_expert.default, shared)


def halves(hidden, router_weight, gate_up, down, *, top_k, padding=None):
    """`ours` by the router alone, then the experts in two lots, as two ranks would hold them."""
    weights, chosen, _, prob_sum, _ = _experts.route(hidden, router_weight, padding, top_k)
    cut, out = len(gate_up) // 2, 0
    for lot in (slice(0, cut), slice(cut, None)):
        first, end, _ = lot.indices(len(gate_up))
        here = torch.where((chosen >= first) & (chosen < end), chosen - first, -1)
        out = out + _experts.experts(hidden, gate_up[lot], down[lot], here, weights)
    return out, prob_sum


@DTYPES
def test_halves(isa, seed, threads, dtype):
    """Router and experts apart give the layer: the choice to the bit, the rest within the error rule."""
    inputs = problem(60, 40, 24, 6, 3, dtype)
    padding = torch.rand(60) < 0.3
    inputs[0][padding] = torch.nan
    clean = [inputs[0].nan_to_num(), *inputs[1:]]
    upstream = upstream_of(inputs)
    found = run(halves, inputs, upstream, top_k=3, padding=padding)
    plain = run(naive, clean, upstream, top_k=3, padding=padding)
    truth = run(oracle, [x.double() for x in clean], upstream, top_k=3, padding=padding)
    for part, a, b, c in zip(("out", "prob_sum", *NAMES), found, plain, truth, strict=True):
        assert_as_good_as(a, b, c, name=part, dtype=dtype)
    _, chosen, load, prob_sum, real = _experts.route(*inputs[:2], padding, 3)
    whole = amc.ops.moe(*inputs, top_k=3, padding=padding, return_router_stats=True)
    assert all(torch.equal(a, b) for a, b in zip((load, prob_sum, real), whole[1:], strict=True))
    assert (chosen[padding] == -1).all() and not found[0][padding].any() and not found[2][padding].any()
    nobody = torch.full_like(chosen, -1)
    assert not _experts.experts(*inputs[:1], *inputs[2:], nobody, torch.rand(60, 3)).any()


def test_groups(seed):
    inputs = problem(6, 8, 4, 3, 2)
    expected = amc.ops.moe(*inputs, top_k=2)
    group = torch.distributed.ProcessGroup
    assert torch.equal(amc.ops.moe(*inputs, top_k=2, ep_group=group(0, 1)), expected)
    with pytest.raises(TypeError, match="moe: ep_group must be a process group or None, not str"):
        amc.ops.moe(*inputs, top_k=2, ep_group="ep")


X = {"hidden": torch.zeros(6, 4), "router_weight": torch.zeros(3, 4)}
X |= {"gate_up": torch.zeros(3, 10, 4), "down": torch.zeros(3, 4, 5)}
ERRORS = [
    ({"hidden": [[1.0]]}, TypeError, "argument 'hidden' must be a torch tensor, not list"),
    ({"hidden": torch.zeros(6, 4).double()}, TypeError, "hidden is float64, float32 or bfloat16 is needed"),
    ({"hidden": torch.zeros(6, 4).half()}, TypeError, "hidden is float16"),
    ({"hidden": torch.zeros(4)}, ValueError, r"hidden has 1 axes, \[T, H\] is needed"),
    ({"hidden": torch.zeros(4, 6).T}, ValueError, "hidden has stride 6 on its last axis, 1 is needed"),
    ({"hidden": torch.zeros(6, 5)}, ValueError, "router_weight has extent 4 on axis 1, 5 is needed"),
    ({"router_weight": torch.zeros(3, 4).bfloat16()}, TypeError, "router_weight is bfloat16, hidden is float32"),
    ({"router_weight": torch.zeros(3)}, ValueError, "router_weight has 1 axes"),
    ({"router_weight": torch.zeros(4, 4)}, ValueError, "gate_up has extent 3 on axis 0, 4 is needed"),
    ({"gate_up": torch.zeros(3, 9, 4)}, ValueError, "gate_up has extent 9 on axis 1, 10 is needed"),
    ({"gate_up": torch.zeros(3, 10, 4).bfloat16()}, TypeError, "gate_up is bfloat16, hidden is float32"),
    ({"gate_up": torch.zeros(3, 4, 10).mT}, ValueError, "gate_up has stride 10 on its last axis"),
    ({"down": torch.zeros(3, 5, 5)}, ValueError, "down has extent 5 on axis 1, 4 is needed"),
    ({"down": torch.zeros(3, 4)}, ValueError, "down has 2 axes"),
    ({"down": None}, TypeError, "argument 'down' must be a torch tensor, not NoneType"),
    ({"top_k": 0}, ValueError, "top_k is 0, at least 1"),
    ({"top_k": 2**70}, ValueError, "top_k is 1180591620717411303424, at least 1 and less than"),
    ({"top_k": 4}, ValueError, "top_k is 4, 1 to 3 experts are possible"),
    ({"top_k": -1}, ValueError, "top_k is -1"),
    ({"top_k": 2.0}, TypeError, "top_k is float, an int is needed"),
    ({"top_k": True}, TypeError, "top_k is bool, an int is needed"),
    ({"padding": torch.zeros(6)}, TypeError, "padding is float32, bool is needed"),
    ({"padding": torch.zeros(5, dtype=torch.bool)}, ValueError, "padding has extent 5 on axis 0, 6 is needed"),
    ({"padding": torch.zeros(6, 1, dtype=torch.bool)}, ValueError, "padding has 2 axes, 1 are needed"),
    ({"padding": [True] * 6}, TypeError, "argument 'padding' must be a torch tensor, not list"),
    ({"down": torch.zeros(3, 4, 5, device="meta")}, ValueError, "down is on meta, hidden on cpu"),
    ({"return_aux": True, "return_router_stats": True}, ValueError, "return_aux and return_router_stats"),
]


@pytest.mark.parametrize(("changes", "error", "words"), ERRORS, ids=[words[:30] for _, _, words in ERRORS])
def test_errors(changes, error, words):
    with pytest.raises(error, match=f"^moe: {words}"):
        amc.ops.moe(**{"top_k": 2, **X, **changes})


LOAD, SUM, ROWS = torch.ones(3, dtype=torch.int64), torch.ones(3), torch.tensor(6)


@pytest.mark.parametrize(
    ("stats", "words"),
    [
        ([], "stats has 0 layers"),
        ([(LOAD, SUM)], "layer 0 has 2 statistics, 3 are needed"),
        ([(LOAD, SUM, ROWS), (LOAD[:2], SUM[:2], ROWS)], "layer 1 has 2 experts, layer 0 3"),
    ],
)
def test_load_balancing_loss_errors(stats, words):
    with pytest.raises(ValueError, match=f"^load_balancing_loss: {words}"):
        amc.ops.load_balancing_loss(iter(stats))


@pytest.mark.parametrize(
    ("rows", "top_k", "error", "words"),
    [
        (ROWS, 0, ValueError, "top_k is 0, at least 1"),
        (ROWS, 1.5, TypeError, "top_k is float, an int is needed"),
        (6, 2, TypeError, "argument 'real_rows' must be a torch tensor, not int"),
    ],
)
def test_per_layer_aux_loss_errors(rows, top_k, error, words):
    with pytest.raises(error, match=f"^per_layer_aux_loss: {words}"):
        amc.ops.per_layer_aux_loss(LOAD, SUM, rows, top_k=top_k)


def same_bytes(a, b):
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def test_nothing_is_written_after_an_error(guarded):
    inputs = problem(6, 8, 4, 3, 2)
    outputs = [guarded((6, 8)), guarded(3, torch.int64), guarded(3), guarded((), torch.int64), guarded((6, 3))]
    outputs += [guarded((6, 2), torch.int32), guarded((6, 2))]
    before = [x.clone() for x in outputs]
    scratch = torch.zeros(_amcore.moe_workspace(*inputs, top_k=2, backward=False), dtype=torch.uint8)
    with pytest.raises(ValueError, match="moe: products has extent 11 on axis 0, 12 is needed"):
        _amcore.moe_forward(*outputs, scratch, *inputs, None, torch.zeros(11, 8), top_k=2)
    with pytest.raises(ValueError, match="moe: workspace has 9 bytes"):
        _amcore.moe_forward(*outputs, scratch[:9], *inputs, None, None, top_k=2)
    assert all(map(same_bytes, before, outputs))
    _amcore.moe_forward(*outputs, scratch, *inputs, None, None, top_k=2)
    chosen = outputs[5].clone()
    chosen[3, 1] = 3
    grad = guarded((6, 8))
    kept = grad.clone()
    backward = torch.zeros(_amcore.moe_workspace(*inputs, top_k=2, backward=True), dtype=torch.uint8)
    saved = [outputs[4], chosen, outputs[6], torch.zeros(12, 8)]
    with pytest.raises(ValueError, match=r"moe: chosen\[7\] is 3, there are 3 experts"):
        _amcore.moe_backward(backward, inputs[0], *inputs, *saved, dhidden=grad, top_k=2)
    assert same_bytes(kept, grad)


# the shared expert


def join_naive(out, shared, gate):
    return (out + torch.sigmoid(gate.reshape(-1, 1)) * shared,)


def join(*x):
    return (amc.ops.add_shared_expert(*x),)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 1), (5, 63), (3, 64), (7, 65), (2, 1500)], ids=str)
@pytest.mark.parametrize("column", [True, False], ids=["T1", "T"])
def test_add_shared_expert(isa, seed, shape, column, dtype):
    found = []
    for _ in range(draws_for(shape[0])):
        gate = torch.randn(shape[0], 1) if column else torch.randn(shape[0])
        inputs = [x.to(dtype) for x in (torch.randn(shape), torch.randn(shape), 3 * gate)]
        g = [torch.randn(shape).to(dtype)]
        truth = run(lambda *x: (reference.add_shared_expert(*x),), [x.double() for x in inputs], g)
        found.append([run(join, inputs, g), run(join_naive, inputs, g), truth])
    mine, plain, truth = (pool(part) for part in zip(*found, strict=True))
    for name, a, b, c in zip(("y", "out", "shared", "gate"), mine, plain, truth, strict=True):
        assert_as_good_as(a, b, c, name=name)


def test_add_shared_expert_rounds_like_eager_code(isa, seed):
    inputs = [torch.randn(40, 70).bfloat16(), torch.randn(40, 70).bfloat16(), torch.randn(40, 1).bfloat16()]
    mine, plain = join(*inputs)[0], join_naive(*inputs)[0]
    assert torch.equal(mine, plain)


def test_add_shared_expert_layouts_threads_and_errors(seed, threads):
    inputs = [torch.randn(300, 70), torch.randn(300, 70), torch.randn(300, 1)]
    g = [torch.ones(1, 1).expand(300, 70)]
    expected = run(join, inputs, g)
    laid = [with_layout(inputs[0], "rows"), with_layout(inputs[1], "offset"), with_layout(inputs[2], "strided")]
    assert all(map(torch.equal, expected, run(join, laid, g)))
    for shape in ((0, 4), (3, 0)):
        empty = run(join, [torch.zeros(shape), torch.zeros(shape), torch.zeros(shape[0])], [torch.zeros(shape)])
        assert (empty[3] == 0).all()
    x = torch.zeros(2, 4)
    for arguments, error, words in (
        ((x, x.double(), x[:, :1]), TypeError, "shared is float64"),
        ((x[:1], x, x[:, :1]), ValueError, "out has extent 1 on axis 0, shared has 2"),
        ((x.bfloat16(), x, x[:, :1]), TypeError, "out is bfloat16, shared is float32"),
        ((x, x, x), ValueError, r"gate has 2 axes, \[T\] or \[T, 1\] is needed"),
        ((x, x, torch.zeros(3)), ValueError, "gate has 3 rows, shared has 2"),
        ((x, torch.zeros(4, 2).T, x[:, 0]), ValueError, "shared has stride 2 on its last axis"),
        ((x, x, x[:, :1].to("meta")), ValueError, "gate is on meta, out on cpu"),
        ((x, x, 1.0), TypeError, "argument 'gate' must be a torch tensor, not float"),
    ):
        with pytest.raises(error, match=f"^add_shared_expert: {words}"):
            amc.ops.add_shared_expert(*arguments)


def test_reference_gradient(seed):
    inputs = [x.double().requires_grad_() for x in problem(3, 4, 2, 3, 2)]
    assert torch.autograd.gradcheck(lambda *x: oracle(*x, top_k=2), inputs)
