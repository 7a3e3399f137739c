"""Normalisation over the last axis: RMSNorm, gated RMSNorm, LayerNorm. H is the length of that axis."""

import torch

from automodel_c import _amcore
from automodel_c.ops import _alloc
from automodel_c.ops._library import define, require_tensors


def rms_norm(x, weight, *, eps=1e-6, zero_centered=True, residual=None):
    """`x / sqrt(mean(x^2) + eps) * (1 + weight)` in float32, rounded once; with a residual, of `x + residual`.

    Args:
        x: [.., H], float32 or bfloat16, last axis contiguous.
        weight: [H], float32 or bfloat16.
        zero_centered: False multiplies by `weight` instead of `1 + weight`.
        residual: like x, or None.

    Returns:
        y [.., H]; with a residual (y, x + residual), the sum rounded once to x's dtype and y made from the rounded sum.

    Raises:
        ValueError: shapes that disagree, a strided last axis, a negative eps. TypeError: another dtype.
        RuntimeError: a second derivative.
    """
    require_tensors("rms_norm", x=x, weight=weight)
    if residual is None:
        return _rms(x, weight, eps, zero_centered)[0]
    require_tensors("rms_norm", x=x, residual=residual)
    return _rms_residual(x, residual, weight, eps, zero_centered)[:2]


def gated_rms_norm(x, z, weight, *, eps=1e-6):
    """RMSNorm times SiLU(z), rounded where transformers' eager code rounds.

    Args:
        x: [.., H], float32 or bfloat16, last axis contiguous.
        z: like x, the gate.
        weight: [H], float32 or bfloat16; not zero-centred.

    Returns:
        y [.., H] = [weight * cast(x / sqrt(mean(x^2) + eps))] * silu(float32(z)). Errors as for `rms_norm`.
    """
    require_tensors("gated_rms_norm", x=x, z=z, weight=weight)
    return _gated(x, z, weight, eps)[0]


def layer_norm(x, weight, bias, *, eps=1e-6):
    """`(x - mean) / sqrt(var + eps) * weight + bias` in float32, rounded once.

    Args:
        x: [.., H], float32 or bfloat16, last axis contiguous.
        weight, bias: [H], float32 or bfloat16.

    Returns:
        y [.., H]. Errors as for `rms_norm`.
    """
    require_tensors("layer_norm", x=x, weight=weight, bias=bias)
    return _layer(x, weight, bias, eps)[0]


def _like(x):
    return _alloc.empty(x.shape, x.dtype, x.device)


def _per_row(x):
    return _alloc.empty(x.shape[:-1], torch.float32, x.device)


def _partials(x, sums):
    """Scratch of weight gradients: a run of at least 16 rows each, at most 64 runs, on CUDA one a multiprocessor.

    Decides the order of the sum.
    """
    rows = x.numel() // x.shape[-1] if x.ndim and x.shape[-1] else 0
    most = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 64
    runs = min(most, max(1, rows // 16))
    return _alloc.empty((runs, sums, x.shape[-1] if x.ndim else 0), torch.float64, x.device)


def _optional(weight, needed):
    """An output like `weight`, or an empty tensor for autograd and None for C."""
    out = _alloc.empty(weight.shape if needed else (0,), weight.dtype, weight.device)
    return out, out if needed else None


def _rms_kernel(x, weight, eps, zero_centered):
    y, rstd = _like(x), _per_row(x)
    _amcore.rms_norm_forward(y, rstd, x, weight, eps=eps, zero_centered=zero_centered)
    return y, rstd


def _rms_residual_kernel(x, residual, weight, eps, zero_centered):
    y, total, rstd = _like(x), _like(x), _per_row(x)
    _amcore.rms_norm_forward(y, rstd, x, weight, sum=total, residual=residual, eps=eps, zero_centered=zero_centered)
    return y, total, rstd


def _rms_backward_kernel(dy, dsum, x, weight, rstd, zero_centered, need_weight):
    dx = _like(x)
    dweight, wanted = _optional(weight, need_weight)
    _amcore.rms_norm_backward(
        dx, wanted, _partials(x, 1), _unit(dy), x, weight, rstd, dsum=_unit(dsum), zero_centered=zero_centered
    )
    return dx, dweight


def _unit(grad):
    """A gradient whose last axis is contiguous: autograd hands out expanded and transposed ones."""
    if grad is None or grad.shape[-1] <= 1 or grad.stride(-1) == 1:
        return grad
    return grad.contiguous()


def _rms_setup(ctx, inputs, output):
    x, weight, _, ctx.zero_centered = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, output[1])


def _rms_derivative(ctx, dy, _):
    if dy is None:
        return None, None, None, None
    x, weight, rstd = ctx.saved_tensors
    need = ctx.needs_input_grad[1]
    dx, dweight = _rms_backward(dy, None, x, weight, rstd, ctx.zero_centered, need)
    return dx, dweight if need else None, None, None


def _rms_residual_setup(ctx, inputs, output):
    _, _, weight, _, ctx.zero_centered = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], weight, output[2])


def _rms_residual_derivative(ctx, dy, dsum, _):
    if dy is None:
        return dsum, dsum, None, None, None
    total, weight, rstd = ctx.saved_tensors
    need = ctx.needs_input_grad[2]
    dx, dweight = _rms_backward(dy, dsum, total, weight, rstd, ctx.zero_centered, need)
    return dx, dx, dweight if need else None, None, None


def _gated_kernel(x, z, weight, eps):
    y, rstd = _like(x), _per_row(x)
    _amcore.gated_rms_norm_forward(y, rstd, x, z, weight, eps=eps)
    return y, rstd


def _gated_backward_kernel(dy, x, z, weight, rstd, need_weight):
    dx, dz = _like(x), _like(x)
    dweight, wanted = _optional(weight, need_weight)
    _amcore.gated_rms_norm_backward(dx, dz, wanted, _partials(x, 1), _unit(dy), x, z, weight, rstd)
    return dx, dz, dweight


def _gated_setup(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:3], output[1])


def _gated_derivative(ctx, dy, _):
    if dy is None:
        return None, None, None, None
    need = ctx.needs_input_grad[2]
    dx, dz, dweight = _gated_backward(dy, *ctx.saved_tensors, need)
    return dx, dz, dweight if need else None, None


def _layer_kernel(x, weight, bias, eps):
    y, mean, rstd = _like(x), _per_row(x), _per_row(x)
    _amcore.layer_norm_forward(y, mean, rstd, x, weight, bias, eps=eps)
    return y, mean, rstd


def _layer_backward_kernel(dy, x, weight, bias, mean, rstd, need_weight, need_bias):
    dx = _like(x)
    dweight, wanted_weight = _optional(weight, need_weight)
    dbias, wanted_bias = _optional(bias, need_bias)
    _amcore.layer_norm_backward(dx, wanted_weight, wanted_bias, _partials(x, 2), _unit(dy), x, weight, mean, rstd)
    return dx, dweight, dbias


def _layer_setup(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:3], *output[1:])


def _layer_derivative(ctx, dy, *_):
    if dy is None:
        return None, None, None, None
    need_weight, need_bias = ctx.needs_input_grad[1:3]
    dx, dweight, dbias = _layer_backward(dy, *ctx.saved_tensors, need_weight, need_bias)
    return dx, dweight if need_weight else None, dbias if need_bias else None, None


def _fake_like(x):
    return x.new_empty(x.shape)


def _fake_per_row(x):
    return x.new_empty(x.shape[:-1], dtype=torch.float32)


def _fake_optional(weight, needed):
    return weight.new_empty(weight.shape if needed else (0,))


_rms_backward = define(
    "rms_norm_backward(Tensor dy, Tensor? dsum, Tensor x, Tensor weight, Tensor rstd, bool zero_centered, "
    "bool need_weight) -> (Tensor, Tensor)",
    _rms_backward_kernel,
    lambda dy, dsum, x, weight, rstd, _, need: (_fake_like(x), _fake_optional(weight, need)),
)
_rms = define(
    "rms_norm(Tensor x, Tensor weight, float eps, bool zero_centered) -> (Tensor, Tensor)",
    _rms_kernel,
    lambda x, *_: (_fake_like(x), _fake_per_row(x)),
    setup=_rms_setup,
    backward=_rms_derivative,
)
_rms_residual = define(
    "rms_norm_residual(Tensor x, Tensor residual, Tensor weight, float eps, bool zero_centered) "
    "-> (Tensor, Tensor, Tensor)",
    _rms_residual_kernel,
    lambda x, *_: (_fake_like(x), _fake_like(x), _fake_per_row(x)),
    setup=_rms_residual_setup,
    backward=_rms_residual_derivative,
)
_gated_backward = define(
    "gated_rms_norm_backward(Tensor dy, Tensor x, Tensor z, Tensor weight, Tensor rstd, bool need_weight) "
    "-> (Tensor, Tensor, Tensor)",
    _gated_backward_kernel,
    lambda dy, x, z, weight, rstd, need: (_fake_like(x), _fake_like(x), _fake_optional(weight, need)),
)
_gated = define(
    "gated_rms_norm(Tensor x, Tensor z, Tensor weight, float eps) -> (Tensor, Tensor)",
    _gated_kernel,
    lambda x, *_: (_fake_like(x), _fake_per_row(x)),
    setup=_gated_setup,
    backward=_gated_derivative,
)
_layer_backward = define(
    "layer_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor bias, Tensor mean, Tensor rstd, "
    "bool need_weight, bool need_bias) -> (Tensor, Tensor, Tensor)",
    _layer_backward_kernel,
    lambda dy, x, weight, bias, mean, rstd, need_weight, need_bias: (
        _fake_like(x),
        _fake_optional(weight, need_weight),
        _fake_optional(bias, need_bias),
    ),
)
_layer = define(
    "layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)",
    _layer_kernel,
    lambda x, *_: (_fake_like(x), _fake_per_row(x), _fake_per_row(x)),
    setup=_layer_setup,
    backward=_layer_derivative,
)
