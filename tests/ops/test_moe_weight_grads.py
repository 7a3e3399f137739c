"""Gradients of the weights of experts in float32 or the weights' dtype, and added to what is held."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import automodel_c as amc
from automodel_c import _amcore
from automodel_c.ops.moe import _moe_kernel
from automodel_c.reference import moe as reference
from tests.numerics import assert_as_good_as
from tests.ops.test_moe import DTYPES, NAMES, naive, ours, problem, run, same_bytes, upstream_of


def weight_grads_of(inputs, k, dtype, upstream=None, held=None):
    """(dgate_up, ddown) in `dtype`, added to copies of those that are held."""
    logits, chosen, weights, products = _moe_kernel(*inputs, None, k, True, True)[4:]
    grads = [torch.full_like(x, torch.nan, dtype=dtype) for x in inputs[2:]] if held is None else held
    grads = [x.clone() for x in grads]
    nbytes = _amcore.moe_workspace(*inputs, top_k=k, backward=True)
    scratch = torch.empty(nbytes, dtype=torch.uint8, device=inputs[0].device)
    kept = (logits, chosen, weights, products, None, None, None, None, *grads)
    upstream = upstream_of(inputs)[0] if upstream is None else upstream
    _amcore.moe_backward(scratch, upstream, *inputs, *kept, top_k=k, accumulate=held is not None)
    return grads


def check_weight_grads(inputs, k):
    """Float32 gradients are those of the weights' dtype before they are rounded; what is held is added to them, rounded
    once, and stays as it is for an expert without rows."""
    upstream, dtype = upstream_of(inputs)[0], inputs[2].dtype
    narrow, wide = (weight_grads_of(inputs, k, d, upstream) for d in (dtype, torch.float32))
    assert all(torch.equal(a, b.to(dtype)) for a, b in zip(narrow, wide, strict=True))
    empty = [(x == 0).flatten(1).all(1) for x in wide]
    assert torch.equal(*empty) and empty[0].any() and not empty[0].all()
    for held_dtype in {dtype, torch.float32}:
        held = [torch.randn(x.shape, device=x.device).to(held_dtype) for x in wide]
        for x in held:
            x[empty[0]] = torch.nan
        added = weight_grads_of(inputs, k, held_dtype, upstream, held)
        for before, fresh, after in zip(held, wide, added, strict=True):
            assert torch.equal(after[~empty[0]], (before.float() + fresh).to(held_dtype)[~empty[0]])
            assert same_bytes(after[empty[0]], before[empty[0]])


def with_idle_experts(tokens, size, inner, experts, k, dtype):
    inputs = problem(tokens, size, inner, experts, k, dtype)
    inputs[0] = inputs[0].abs()
    inputs[1][-2:] = -inputs[1].abs().amax()  # the last two are nobody's choice
    return inputs


@DTYPES
@pytest.mark.parametrize("shape", [(40, 33, 17, 6, 2), (600, 140, 40, 4, 1), (1, 8, 4, 5, 2)], ids=str)
def test_weight_gradients_of_either_dtype(isa, seed, shape, dtype):
    check_weight_grads(with_idle_experts(*shape, dtype), shape[-1])


@DTYPES
def test_weight_gradients_of_microbatches(isa, seed, threads, dtype):
    """Added over microbatches where the caller says, by autograd's own way there, made again or not."""
    tokens, *weights = problem(180, 40, 24, 6, 2, dtype)
    sums = [torch.zeros(x.shape) for x in weights[1:]]
    for again in (False, True):
        calls = []

        def into(calls=calls):
            calls.append(None)
            return *sums, len(calls) > 1

        exact = None
        plain = [torch.zeros(x.shape) for x in weights[1:]]
        for hidden in tokens.chunk(3):
            inputs = [hidden, *weights]
            upstream = upstream_of(inputs)
            layer = lambda *x: ours(*x, top_k=2, weight_grads=into)  # noqa: E731
            mine = [x.detach().requires_grad_() for x in inputs]
            outputs = checkpoint(layer, *mine, use_reentrant=False) if again else layer(*mine)
            torch.autograd.backward(outputs, upstream)
            expected = run(ours, inputs, upstream, top_k=2)
            found = [*(x.detach() for x in outputs), *(x.grad for x in mine[:2])]
            assert all(torch.equal(a, b) for a, b in zip(found, expected[:4], strict=True))
            assert mine[2].grad is None and mine[3].grad is None
            for total, part in zip(plain, run(naive, inputs, upstream, top_k=2)[4:], strict=True):
                total += part
            exact = reference.weight_grads(*inputs, upstream[0], top_k=2, held=exact)
        assert len(calls) == 3
        for name, a, b, c in zip(NAMES[2:], sums, plain, exact, strict=True):
            assert_as_good_as(a, b, c, name=name, dtype=dtype)


def test_weight_gradients_that_are_not_asked_for(seed):
    """Where autograd would not come there without the weights, and where not both have a gradient, it has theirs."""
    inputs, never = problem(30, 16, 8, 5, 2), lambda: pytest.fail("asked")
    for needs in ((0, 0, 1, 1), (1, 1, 1, 0), (1, 0, 0, 1)):
        mine = [x.detach().requires_grad_(bool(need)) for x, need in zip(inputs, needs, strict=True)]
        amc.ops.moe(*mine, top_k=2, weight_grads=never).sum().backward()
        assert [x.grad is not None for x in mine] == [bool(need) for need in needs]
    with torch.no_grad():
        amc.ops.moe(*(x.requires_grad_() for x in inputs), top_k=2, weight_grads=never)


def test_weight_gradients_are_checked(seed):
    inputs = problem(6, 8, 4, 3, 2)
    for held, error, words in (
        ([torch.zeros(3, 8, 8, dtype=torch.float64), torch.zeros(3, 8, 4)], TypeError, "dgate_up is float64, float32"),
        ([torch.zeros(3, 8, 8), torch.zeros(3, 8, 4).bfloat16()], TypeError, "ddown is bfloat16, float32 is needed"),
        ([torch.zeros(3, 8, 9), torch.zeros(3, 8, 4)], ValueError, "dgate_up has extent 9 on axis 2, 8 is needed"),
    ):
        with pytest.raises(error, match=words):
            weight_grads_of(inputs, 2, None, held=held)
    with pytest.raises(NotImplementedError, match="moe: counts are for cuBLASLt, hidden is on the CPU"):
        _amcore.moe_row(*inputs, top_k=2, backward=False, counts=[4, 4, 4])
