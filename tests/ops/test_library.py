"""An operator that goes past the dispatcher does what it does through it, also for tensors that only look plain."""

import warnings

import pytest
import torch

from automodel_c import ops
from automodel_c.ops import _library


@pytest.mark.parametrize("shape", [(5, 8), (0, 8)])
def test_a_negated_view(seed, shape):
    x, up = torch.randn(2, *shape)
    view = torch._neg_view(x)
    assert view.is_neg()
    assert torch.equal(ops.swiglu(view, up), ops.swiglu(-x, up))


def test_batches_of_gradients(seed):
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8)
    y, grads = ops.rms_norm(x, weight), torch.randn(4, 3, 8)
    one_by_one = [torch.autograd.grad(y, x, grad, retain_graph=True)[0] for grad in grads]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has no rule for batches of it
        assert torch.equal(torch.autograd.grad(y, x, grads, is_grads_batched=True)[0], torch.stack(one_by_one))


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_a_trace_holds_the_operator(seed):
    weight = torch.randn(8)
    traced = torch.jit.trace(lambda x: ops.rms_norm(x, weight), (torch.randn(2, 8),), check_trace=False)
    x = torch.randn(5, 8)
    assert "automodel_c::rms_norm" in str(traced.graph)
    assert torch.equal(traced(x), ops.rms_norm(x, weight))


def test_other_layouts_have_no_kernel():
    sparse = torch.eye(8).to_sparse()
    with pytest.raises(NotImplementedError, match="SparseCPU"):
        ops.gelu(sparse)


def test_functional_tensors_stay_functional():
    assert torch._is_functional_tensor(ops.gelu(torch._to_functional_tensor(torch.randn(2, 8))))


def test_plain_tensors_go_past_it():
    """In each grad mode, parameters too; else the other tests here would show nothing."""
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            assert _library._are_ordinary((torch.ones(2), torch.nn.Parameter(torch.ones(2)), None, 1.0))
    assert not _library._are_ordinary((torch.ones(2, device="meta"),))
