"""Routed experts: router, top-k, grouped expert products, and what the auxiliary losses need; the shared expert's join.

Letters: T tokens, H hidden size, E experts, I an expert's inner size, k experts a token, n tokens that are not padding.
"""

import functools
import operator

import torch

from automodel_c import _amcore
from automodel_c.ops import _alloc
from automodel_c.ops._experts import takes_weight_grads
from automodel_c.ops._library import define, require_tensors


def moe(
    hidden,
    router_weight,
    gate_up,
    down,
    *,
    top_k,
    padding=None,
    ep_group=None,
    return_aux=False,
    return_router_stats=False,
    need_output=True,
    weight_grads=None,
):
    """Sum over a token's `top_k` experts of its routing weight times `down_e @ (silu(gate_e x) * up_e x)`.

    The router's logits `router_weight @ x` are rounded to hidden's dtype, their softmax is float32, and the chosen
    experts' probabilities are divided by their sum. Experts with equal logits are taken in the order of their indices.

    Args:
        hidden: [T, H], float32 or bfloat16, last axis contiguous as of all others.
        router_weight: [E, H], hidden's dtype.
        gate_up: [E, 2I, H], hidden's dtype, the gate in the first half.
        down: [E, H, I], hidden's dtype.
        top_k: experts of a token, 1 to E.
        padding: bool [T] or None; True marks a row that is never routed, may hold NaN, and has output and gradient 0.
        ep_group: None, or the process group whose ranks share the E experts: rank r holds a contiguous range of
            them, its gate_up and down are those, and what is over goes to the first ranks. Every rank calls, with its
            own tokens; gradients of gate_up and down are those of all ranks' losses. What `return_aux` and
            `return_router_stats` tell is of the caller's tokens alone.
        return_aux: return (out, this layer's auxiliary loss): `per_layer_aux_loss` of the statistics.
        return_router_stats: return (out, load, prob_sum, real_rows): load int64 [E], how many tokens chose an expert;
            prob_sum float32 [E], differentiable, the sum of the full softmax over the tokens; real_rows int64 [], n.
        need_output: False where only backward will look at this call, as in a recomputation whose sum nobody reads: out
            is 0 and down's products, a third of the work, are not made. Not over ranks, where it changes nothing.
        weight_grads: None, or a function that backward calls for (dgate_up, ddown, accumulate): contiguous tensors of
            the weights' shapes, float32 or their dtype, where it puts their gradients, or with accumulate adds them,
            in float32 and rounded once. Autograd then gets none for gate_up and down. It is not asked where neither
            hidden nor router_weight has a gradient, nor gate_up and down both.

    Returns:
        out [T, H] in hidden's dtype, alone or with what was asked for.

    Raises:
        ValueError: shapes that disagree, a strided last axis, another device, a `top_k` out of range, both returns.
        TypeError: another dtype, an `ep_group` that is no process group. NotImplementedError: more than 1,024 experts
            on CUDA, or CUDA in a build without. RuntimeError: a second derivative.

    For backward the logits, choices and gate_up's products are kept, in hidden's dtype: T (E + 2 k I) numbers. The
    products are not made again, because that costs a third of the forward and activation checkpointing, which would
    then do it twice, already gives the memory back. A second forward routes alike, to the bit.
    """
    group, inputs = _group(ep_group), (hidden, router_weight, gate_up, down, padding)
    if group:
        from automodel_c.parallel.experts import moe_over_ranks  # it is built on the operators

        checked = functools.partial(_checked, *inputs, top_k, return_aux, return_router_stats)
        (out, *stats), _ = moe_over_ranks(*inputs, checked, group, weight_grads=weight_grads)
    else:
        count = _checked(*inputs, top_k, return_aux, return_router_stats)
        keep = torch.is_grad_enabled() and any(x.requires_grad for x in inputs[:4])
        if keep and takes_weight_grads(weight_grads, *inputs[:4]):
            out, *stats = _MoeInto.apply(*inputs[:2], gate_up.detach(), down.detach(), padding, count, need_output,
                                        weight_grads)  # fmt: skip
        else:
            out, *stats = _moe(*inputs, count, keep, need_output)[:4]
        if not need_output:
            out = out.expand(hidden.shape)
    if return_router_stats:
        return out, *stats
    return (out, per_layer_aux_loss(*stats, top_k=top_k)) if return_aux else out


def per_layer_aux_loss(load, prob_sum, real_rows, *, top_k):
    """Sum over e of (load_e E / (k N)) (prob_sum_e / N), N = max(real_rows, 1): 1 when all experts are used alike.

    The statistics are those of `moe(..., return_router_stats=True)`, perhaps summed over ranks. A scalar float32 whose
    gradient goes through prob_sum alone; 0 without real rows.
    """
    require_tensors("per_layer_aux_loss", load=load, prob_sum=prob_sum, real_rows=real_rows)
    top_k = _count("per_layer_aux_loss", top_k)
    n = real_rows.clamp(min=1).float()
    return ((load.float() * (len(load) / top_k) / n) * (prob_sum / n)).sum()


def load_balancing_loss(stats):
    """transformers' load_balancing_loss_func: E times the sum over e of (sum of load_e / N) (sum of prob_sum_e / N).

    Args:
        stats: for every layer (load, prob_sum, real_rows) of `moe(..., return_router_stats=True)`.

    Returns:
        A scalar float32, top_k when all experts are used alike; 0 without real rows.

    Raises:
        ValueError: no layer, or layers whose numbers of experts differ.
    """
    stats = [tuple(layer) for layer in stats]
    if not stats:
        raise ValueError("load_balancing_loss: stats has 0 layers, at least 1 is needed")
    for i, layer in enumerate(stats):
        if len(layer) != 3:
            raise ValueError(f"load_balancing_loss: layer {i} has {len(layer)} statistics, 3 are needed")
        if len(layer[0]) != len(stats[0][0]):
            raise ValueError(f"load_balancing_loss: layer {i} has {len(layer[0])} experts, layer 0 {len(stats[0][0])}")
    loads, prob_sums, rows = zip(*stats, strict=True)
    n = torch.stack(rows).sum().clamp(min=1).float()
    load, prob_sum = torch.stack(loads).sum(0).float(), torch.stack(prob_sums).sum(0)
    return ((load / n) * (prob_sum / n)).sum() * len(load)


def add_shared_expert(out, shared, gate):
    """`out + sigmoid(gate) * shared`, rounded after each of the three operations.

    Args:
        out, shared: [T, H], float32 or bfloat16, last axis contiguous: the routed experts' sum, the shared expert.
        gate: [T, 1] or [T], the same dtype, before the sigmoid.

    Returns:
        [T, H].

    Raises:
        ValueError: shapes that disagree, a strided last axis. TypeError: another dtype. RuntimeError: a second
        derivative.
    """
    require_tensors("add_shared_expert", out=out, shared=shared, gate=gate)
    return _join(out, shared, gate)


def _group(ep_group):
    """The group, None where one rank holds all experts."""
    if ep_group is None:
        return None
    if not (torch.distributed.is_available() and isinstance(ep_group, torch.distributed.ProcessGroup)):
        raise TypeError(f"moe: ep_group must be a process group or None, not {type(ep_group).__name__}")
    return ep_group if ep_group.size() > 1 else None


def _checked(hidden, router_weight, gate_up, down, padding, top_k, return_aux, return_router_stats):
    """top_k as an int, when everything is of the right kind."""
    tensors = {"hidden": hidden, "router_weight": router_weight, "gate_up": gate_up, "down": down}
    require_tensors("moe", **tensors, **({} if padding is None else {"padding": padding}))
    if return_aux and return_router_stats:
        raise ValueError("moe: return_aux and return_router_stats are both given, at most 1 is possible")
    return _count("moe", top_k)


def _count(name, top_k):
    if isinstance(top_k, bool) or not hasattr(top_k, "__index__"):
        raise TypeError(f"{name}: top_k is {type(top_k).__name__}, an int is needed")
    count = operator.index(top_k)
    if count >= 2**63 or count < 1:
        raise ValueError(f"{name}: top_k is {count}, at least 1 and less than 2^63 is needed")
    return count


def _outputs(hidden, router_weight, down, top_k, keep, whole, empty):
    """Forward's outputs, from `empty(shape, dtype)`; a row stands for an output that is not needed."""
    (tokens, experts), inner = (hidden.shape[0], router_weight.shape[0]), down.shape[2]
    return (
        empty(hidden.shape if whole else hidden.shape[-1:], hidden.dtype),
        empty((experts,), torch.int64),
        empty((experts,), torch.float32),
        empty((), torch.int64),
        empty((tokens, experts), hidden.dtype),
        empty((tokens, top_k), torch.int32),
        empty((tokens, top_k), torch.float32),
        empty((tokens * top_k, 2 * inner) if keep else (0,), hidden.dtype),
    )


def _moe_kernel(hidden, router_weight, gate_up, down, padding, top_k, keep, whole):
    inputs = (hidden, router_weight, gate_up, down, padding)
    nbytes = _amcore.moe_workspace(*inputs, top_k=top_k, backward=False)
    results = _outputs(hidden, router_weight, down, top_k, keep, whole, lambda s, d: _alloc.empty(s, d, hidden.device))
    scratch = _alloc.workspace(nbytes, hidden.device)
    out, products = results[0] if whole else None, results[7] if keep else None
    if not whole:
        results[0].zero_()
    _amcore.moe_forward(out, *results[1:7], scratch, *inputs, products, top_k=top_k)
    return results


def _moe_fake(hidden, router_weight, gate_up, down, padding, top_k, keep, whole):
    return _outputs(hidden, router_weight, down, top_k, keep, whole, lambda s, d: hidden.new_empty(s, dtype=d))


def _moe_backward_kernel(
    dout, dprob_sum, hidden, router_weight, gate_up, down, padding, logits, chosen, weights, products, need
):
    inputs = (hidden, router_weight, gate_up, down)
    grads = _gradients(inputs, need, _alloc.empty)
    wanted = [x if needed else None for x, needed in zip(grads, need, strict=True)]
    _run_backward(wanted, dout, dprob_sum, inputs, padding, (logits, chosen, weights, products))
    return grads


def _run_backward(wanted, dout, dprob_sum, inputs, padding, kept, accumulate=False):
    top_k = kept[1].shape[1]
    nbytes = _amcore.moe_workspace(*inputs, padding, top_k=top_k, backward=True)
    scratch = _alloc.workspace(nbytes, dout.device)
    dout = dout if dout.shape[-1] <= 1 or dout.stride(-1) == 1 else dout.contiguous()
    _amcore.moe_backward(scratch, dout, *inputs, *kept, padding, dprob_sum, *wanted, top_k=top_k, accumulate=accumulate)


class _MoeInto(torch.autograd.Function):
    """`_moe` whose backward puts the weights' gradients where its last argument says."""

    @staticmethod
    def forward(ctx, hidden, router_weight, gate_up, down, padding, top_k, whole, weight_grads):
        inputs = (hidden, router_weight, gate_up, down, padding)
        out, load, prob_sum, real_rows, *kept = _moe_kernel(*inputs, top_k, True, whole)
        ctx.mark_non_differentiable(load, real_rows)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, *kept)
        ctx.weight_grads = weight_grads
        return out, load, prob_sum, real_rows

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, _, dprob_sum, __):
        if dout is None and dprob_sum is None:
            return (None,) * 8
        *inputs, padding, logits, chosen, weights, products = ctx.saved_tensors
        dout = torch.zeros_like(inputs[0]) if dout is None else dout
        dprob_sum = None if dprob_sum is None else dprob_sum.contiguous()
        need = ctx.needs_input_grad[:2]
        grads = [_alloc.empty(x.shape, x.dtype, x.device) if n else None for x, n in zip(inputs, need, strict=False)]
        dgate_up, ddown, accumulate = ctx.weight_grads()
        kept = (logits, chosen, weights, products)
        _run_backward([*grads, dgate_up, ddown], dout, dprob_sum, inputs, padding, kept, accumulate)
        return *grads, *(None,) * 6


def _gradients(inputs, need, empty):
    """A tensor like each input, without elements where it is not needed."""
    pairs = zip(inputs, need, strict=True)
    return tuple(empty(x.shape if needed else (0,), x.dtype, x.device) for x, needed in pairs)


def _moe_backward_fake(dout, dprob_sum, hidden, router_weight, gate_up, down, *rest):
    def empty(shape, dtype, device):
        return hidden.new_empty(shape)

    return _gradients((hidden, router_weight, gate_up, down), rest[-1], empty)


def _moe_setup(ctx, inputs, output):
    hidden, router_weight, gate_up, down, padding, *_ = inputs
    _, load, _, real_rows, logits, chosen, weights, products = output
    ctx.mark_non_differentiable(load, real_rows, logits, chosen, weights, products)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, router_weight, gate_up, down, padding, logits, chosen, weights, products)


def _moe_derivative(ctx, dout, _, dprob_sum, *__):
    hidden, *saved = ctx.saved_tensors
    need = ctx.needs_input_grad[:4]
    if dout is None and dprob_sum is None:
        return (None,) * 8
    dout = torch.zeros_like(hidden) if dout is None else dout
    dprob_sum = None if dprob_sum is None else dprob_sum.contiguous()
    grads = _moe_backward(dout, dprob_sum, hidden, *saved, need)
    return *(x if needed else None for x, needed in zip(grads, need, strict=True)), None, None, None, None


def _join_kernel(out, shared, gate):
    result = _alloc.empty(shared.shape, shared.dtype, shared.device)
    _amcore.shared_expert_forward(result, out, shared, gate)
    return result


def _join_backward_kernel(dout, shared, gate):
    dshared = _alloc.empty(shared.shape, shared.dtype, shared.device)
    dgate = _alloc.empty(gate.shape, gate.dtype, gate.device)
    dout = dout if dout.shape[-1] <= 1 or dout.stride(-1) == 1 else dout.contiguous()
    _amcore.shared_expert_backward(dshared, dgate, dout, shared, gate)
    return dshared, dgate


def _join_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[1:])


_moe_backward = define(
    "moe_backward(Tensor dout, Tensor? dprob_sum, Tensor hidden, Tensor router_weight, Tensor gate_up, Tensor down, "
    "Tensor? padding, Tensor logits, Tensor chosen, Tensor weights, Tensor products, bool[] need) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _moe_backward_kernel,
    _moe_backward_fake,
)
_moe = define(
    "moe(Tensor hidden, Tensor router_weight, Tensor gate_up, Tensor down, Tensor? padding, int top_k, bool keep, "
    "bool whole) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _moe_kernel,
    _moe_fake,
    setup=_moe_setup,
    backward=_moe_derivative,
)
_join_backward = define(
    "add_shared_expert_backward(Tensor dout, Tensor shared, Tensor gate) -> (Tensor, Tensor)",
    _join_backward_kernel,
    lambda dout, shared, gate: (shared.new_empty(shared.shape), gate.new_empty(gate.shape)),
)
_join = define(
    "add_shared_expert(Tensor out, Tensor shared, Tensor gate) -> Tensor",
    _join_kernel,
    lambda out, shared, gate: shared.new_empty(shared.shape),
    setup=_join_setup,
    backward=lambda ctx, dout: (dout, *_join_backward(dout, *ctx.saved_tensors)),
)
