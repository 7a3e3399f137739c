"""clip_grad_norm_ on one rank, against float64 and torch."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from automodel_c.optim import clip_grad_norm_
from automodel_c.reference import adam as reference
from tests.numerics import assert_as_good_as, ulp_of

F32, BF16 = torch.float32, torch.bfloat16


def with_grads(*grads):
    params = [torch.zeros_like(g).requires_grad_() for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    return params


def test_three_four_and_an_empty_shard():
    params = with_grads(torch.tensor([3.0, 4.0]), torch.empty(0))
    norm = clip_grad_norm_(params, 1.0)
    assert norm == 5.0 and norm.shape == () and norm.dtype == F32
    assert torch.equal(params[0].grad, torch.tensor([0.6, 0.8]))


def test_huge_gradients_stay_finite():
    params = with_grads(torch.full((4,), 6e31), torch.empty(0))
    assert clip_grad_norm_(params, 1.0) > 1e31
    assert torch.equal(params[0].grad, torch.full((4,), 0.5))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
def test_clip_against_float64(isa, seed, dtype):
    grads = [torch.randn(n).to(dtype) for n in (5, 0, 1000, 70_000)]
    params, twins = with_grads(*grads), with_grads(*grads)
    truth, norm = reference.clip(grads, 2.0)
    assert abs(clip_grad_norm_(params, 2.0).double() - norm) <= ulp_of(float(norm), "float32")
    torch.nn.utils.clip_grad_norm_(twins, 2.0)
    for p, q, ref in zip(params, twins, truth, strict=True):
        assert_as_good_as(p.grad, q.grad, ref, name="grad")
    assert abs(clip_grad_norm_(params, math.inf).item() - 2.0) < 1e-3


@given(st.lists(st.floats(-100, 100, width=32), max_size=20), st.floats(0, 200))
def test_below_the_limit_no_bit_changes(values, max_norm):
    params = with_grads(torch.tensor(values), torch.empty(0))
    before, version = params[0].grad.clone(), params[0].grad._version
    norm = math.sqrt(math.fsum(v * v for v in torch.tensor(values, dtype=F32).double().tolist()))
    assert clip_grad_norm_(params, max_norm) == torch.tensor(norm, dtype=F32)
    if norm <= max_norm:
        assert torch.equal(before, params[0].grad) and params[0].grad._version == version
    else:
        assert params[0].grad.double().norm() <= max_norm + 1e-6 * (1 + max_norm)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_non_finite_norm_shows_and_leaves_the_gradients(bad):
    params = with_grads(torch.tensor([3.0, bad]), torch.tensor([1e3]))
    norm = clip_grad_norm_(params, 1.0)
    assert norm.isnan() if math.isnan(bad) else norm == math.inf
    assert params[0].grad[0] == 3.0 and params[1].grad[0] == 1e3


def test_what_may_be_passed():
    p = with_grads(torch.tensor([3.0, 4.0]))[0]
    assert clip_grad_norm_(p, 10) == 5.0
    assert clip_grad_norm_((x for x in [p, torch.ones(2, requires_grad=True)]), torch.tensor(10.0)) == 5.0
    assert clip_grad_norm_([p, p], 10.0) == 5.0
    assert clip_grad_norm_([], 1.0) == 0.0
    assert clip_grad_norm_([torch.ones(2, requires_grad=True)], 1.0) == 0.0


def test_zero_gradients_and_zero_limit():
    params = with_grads(torch.zeros(3))
    assert clip_grad_norm_(params, 0.0) == 0.0
    params = with_grads(torch.ones(4))
    assert clip_grad_norm_(params, 0.0) == 2.0
    assert not params[0].grad.any()


def test_clipping_moves_version_counters():
    params = with_grads(torch.ones(4))
    before = params[0].grad._version
    clip_grad_norm_(params, 1.0)
    assert params[0].grad._version > before


@pytest.mark.parametrize("max_norm", [-1.0, math.nan])
def test_bad_limit(max_norm):
    with pytest.raises(ValueError, match="at least 0 is needed"):
        clip_grad_norm_(with_grads(torch.ones(1)), max_norm)


def test_half_precision_is_refused():
    with pytest.raises(TypeError, match=r"grads\[0\] is float16"):
        clip_grad_norm_(with_grads(torch.ones(1, dtype=torch.float16)), 1.0)
