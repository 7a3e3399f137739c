"""The two halves of `ops.moe` as operators of their own, for experts that live on other ranks than their tokens.

Letters: T rows, H hidden size, E experts (of the group, or of this rank), I an expert's inner size, k experts a row.
"""

import torch

from automodel_c import _amcore
from automodel_c.ops import _alloc
from automodel_c.ops._library import define


def route(hidden, router_weight, padding, top_k):
    """The router. hidden [T, H], router_weight [E, H], padding bool [T] or None.

    Returns (weights float32 [T, k], chosen int32 [T, k], -1 in padding, load int64 [E], prob_sum float32 [E],
    real_rows int64 []), as `ops.moe` has them; differentiable in weights and prob_sum.
    """
    return _route(hidden, router_weight, padding, top_k)[:5]


def experts(hidden, gate_up, down, chosen, weights, need_output=True, weight_grads=None):
    """Sum over a row's experts of its weight times the expert's output -> [T, H]; rows without an expert here: 0.
    need_output: False where only backward will look at this call; the sum is then not made, zeros stand for it.
    weight_grads: as in `ops.moe`.

    hidden [T, H], gate_up [E, 2I, H], down [E, H, I], chosen int32 [T, k], -1 is no expert here, weights float32
    [T, k].
    """
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in (hidden, gate_up, down, weights))
    if keep and takes_weight_grads(weight_grads, hidden, weights, gate_up, down):
        out = _ExpertsInto.apply(hidden, gate_up.detach(), down.detach(), chosen, weights, need_output, weight_grads)
    else:
        out = _experts(hidden, gate_up, down, chosen, weights, keep, need_output)[0]
    return out if need_output else out.expand(hidden.shape)


def takes_weight_grads(weight_grads, first, second, gate_up, down):
    """Whether backward can give the weights' gradients to `weight_grads`: autograd must come there without them."""
    comes = first.requires_grad or second.requires_grad
    return weight_grads is not None and comes and gate_up.requires_grad and down.requires_grad


def _route_outputs(hidden, router_weight, top_k, empty):
    tokens, experts = hidden.shape[0], router_weight.shape[0]
    return (
        empty((tokens, top_k), torch.float32),
        empty((tokens, top_k), torch.int32),
        empty((experts,), torch.int64),
        empty((experts,), torch.float32),
        empty((), torch.int64),
        empty((tokens, experts), hidden.dtype),
    )


def _route_kernel(hidden, router_weight, padding, top_k):
    nbytes = _amcore.moe_workspace(hidden, router_weight, None, None, padding, top_k=top_k, backward=False)
    results = _route_outputs(hidden, router_weight, top_k, lambda s, d: _alloc.empty(s, d, hidden.device))
    weights, chosen, load, prob_sum, real_rows, logits = results
    scratch = _alloc.workspace(nbytes, hidden.device)
    _amcore.moe_route_forward(
        logits, chosen, weights, load, prob_sum, real_rows, scratch, hidden, router_weight, padding, top_k=top_k
    )
    return results


def _route_backward_kernel(dweights, dprob_sum, hidden, router_weight, padding, logits, chosen, weights):
    top_k = chosen.shape[1]
    nbytes = _amcore.moe_workspace(hidden, router_weight, None, None, padding, top_k=top_k, backward=True)
    scratch = _alloc.workspace(nbytes, hidden.device)
    grads = tuple(_alloc.empty(x.shape, x.dtype, x.device) for x in (hidden, router_weight))
    _amcore.moe_route_backward(
        scratch, hidden, router_weight, logits, chosen, weights, dweights, padding, dprob_sum, *grads, top_k=top_k
    )
    return grads


def _route_setup(ctx, inputs, output):
    hidden, router_weight, padding, _ = inputs
    weights, chosen, load, _, real_rows, logits = output
    ctx.mark_non_differentiable(chosen, load, real_rows, logits)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, router_weight, padding, logits, chosen, weights)


def _route_derivative(ctx, dweights, _, __, dprob_sum, *___):
    if dweights is None and dprob_sum is None:
        return (None,) * 4
    saved = ctx.saved_tensors
    dweights = torch.zeros_like(saved[-1]) if dweights is None else dweights.contiguous()
    dprob_sum = None if dprob_sum is None else dprob_sum.contiguous()
    return *_route_backward(dweights, dprob_sum, *saved), None, None


def _experts_outputs(hidden, down, chosen, keep, whole, empty):
    """A row stands for a sum that is not needed."""
    products = (chosen.numel(), 2 * down.shape[2]) if keep else (0,)
    return empty(hidden.shape if whole else hidden.shape[-1:], hidden.dtype), empty(products, hidden.dtype)


def _experts_kernel(hidden, gate_up, down, chosen, weights, keep, whole):
    top_k = chosen.shape[1]
    nbytes = _amcore.moe_workspace(hidden, None, gate_up, down, top_k=top_k, backward=False)
    results = _experts_outputs(hidden, down, chosen, keep, whole, lambda s, d: _alloc.empty(s, d, hidden.device))
    scratch, products = _alloc.workspace(nbytes, hidden.device), results[1] if keep else None
    out = results[0] if whole else None
    if not whole:
        results[0].zero_()
    _amcore.moe_experts_forward(out, scratch, hidden, gate_up, down, chosen, weights, products, top_k=top_k)
    return results


def _experts_backward_kernel(dout, hidden, gate_up, down, chosen, weights, products):
    grads = [_alloc.empty(x.shape, x.dtype, x.device) for x in (hidden, gate_up, down, weights)]
    dhidden, dgate_up, ddown, dweights = grads
    _run_backward((dhidden, dweights, dgate_up, ddown), dout, hidden, gate_up, down, chosen, weights, products)
    return tuple(grads)


def _run_backward(grads, dout, hidden, gate_up, down, chosen, weights, products, accumulate=False):
    top_k = chosen.shape[1]
    nbytes = _amcore.moe_workspace(hidden, None, gate_up, down, top_k=top_k, backward=True)
    scratch = _alloc.workspace(nbytes, hidden.device)
    dout = dout if dout.shape[-1] <= 1 or dout.stride(-1) == 1 else dout.contiguous()
    inputs = (dout, hidden, gate_up, down, chosen, weights, products)
    _amcore.moe_experts_backward(scratch, *inputs, *grads, top_k=top_k, accumulate=accumulate)


class _ExpertsInto(torch.autograd.Function):
    """`_experts` whose backward puts the weights' gradients where its last argument says."""

    @staticmethod
    def forward(ctx, hidden, gate_up, down, chosen, weights, whole, weight_grads):
        out, products = _experts_kernel(hidden, gate_up, down, chosen, weights, True, whole)
        ctx.save_for_backward(hidden, gate_up, down, chosen, weights, products)
        ctx.weight_grads = weight_grads
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        hidden, *_, weights, _ = saved = ctx.saved_tensors
        dhidden, dweights = (_alloc.empty(x.shape, x.dtype, x.device) for x in (hidden, weights))
        dgate_up, ddown, accumulate = ctx.weight_grads()
        _run_backward((dhidden, dweights, dgate_up, ddown), dout, *saved, accumulate=accumulate)
        return dhidden, None, None, None, dweights, None, None


def _experts_setup(ctx, inputs, output):
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs[:5], output[1])


def _experts_derivative(ctx, dout, _):
    dhidden, dgate_up, ddown, dweights = _experts_backward(dout, *ctx.saved_tensors)
    return dhidden, dgate_up, ddown, None, dweights, None, None


_route_backward = define(
    "moe_route_backward(Tensor dweights, Tensor? dprob_sum, Tensor hidden, Tensor router_weight, Tensor? padding, "
    "Tensor logits, Tensor chosen, Tensor weights) -> (Tensor, Tensor)",
    _route_backward_kernel,
    lambda dweights, dprob_sum, hidden, router_weight, *_: (
        hidden.new_empty(hidden.shape),
        router_weight.new_empty(router_weight.shape),
    ),
)
_route = define(
    "moe_route(Tensor hidden, Tensor router_weight, Tensor? padding, int top_k) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _route_kernel,
    lambda hidden, router_weight, padding, top_k: _route_outputs(
        hidden, router_weight, top_k, lambda s, d: hidden.new_empty(s, dtype=d)
    ),
    setup=_route_setup,
    backward=_route_derivative,
)
_experts_backward = define(
    "moe_experts_backward(Tensor dout, Tensor hidden, Tensor gate_up, Tensor down, Tensor chosen, Tensor weights, "
    "Tensor products) -> (Tensor, Tensor, Tensor, Tensor)",
    _experts_backward_kernel,
    lambda dout, hidden, gate_up, down, chosen, weights, products: tuple(
        x.new_empty(x.shape) for x in (hidden, gate_up, down, weights)
    ),
)
_experts = define(
    "moe_experts(Tensor hidden, Tensor gate_up, Tensor down, Tensor chosen, Tensor weights, bool keep, "
    "bool whole) "
    "-> (Tensor, Tensor)",
    _experts_kernel,
    lambda hidden, gate_up, down, chosen, weights, keep, whole: _experts_outputs(
        hidden, down, chosen, keep, whole, lambda s, d: hidden.new_empty(s, dtype=d)
    ),
    setup=_experts_setup,
    backward=_experts_derivative,
)
