"""The gates of a gated delta net layer: log decay and write strength."""

import torch

from automodel_c import _amcore
from automodel_c.ops import _alloc
from automodel_c.ops._library import define, require_tensors


def gdn_gate(a, b, A_log, dt_bias):
    """`g = -exp(A_log) * softplus(a + dt_bias)` and `beta = sigmoid(b)`.

    Args:
        a, b: [T, H], float32 or bfloat16, last axis contiguous; both may be slices of one tensor.
        A_log, dt_bias: [H] float32.

    Returns:
        (g [T, H] float32, beta [T, H] in b's dtype). Float32 inside. Where the gradient that arrives is 0, so is the
        gradient that leaves, also of padding that holds NaN.

    Raises:
        ValueError: shapes that disagree, a strided last axis. TypeError: another dtype.
        RuntimeError: a second derivative.
    """
    require_tensors("gdn_gate", a=a, b=b, A_log=A_log, dt_bias=dt_bias)
    return _gate(a, b, A_log, dt_bias)


def _like(x, dtype=None):
    return _alloc.empty(x.shape, dtype or x.dtype, x.device)


def _unit(grad):
    """A gradient whose last axis is contiguous: autograd hands out expanded and transposed ones."""
    return grad if grad.shape[-1] <= 1 or grad.stride(-1) == 1 else grad.contiguous()


def _partials(a):
    """Scratch of the sums over rows: a run of at least 16 rows each, at most 64 runs, on CUDA four a multiprocessor.

    Decides the order of the sums.
    """
    most = 4 * torch.cuda.get_device_properties(a.device).multi_processor_count if a.is_cuda else 64
    return _alloc.empty((min(most, max(1, a.shape[0] // 16)), 2, a.shape[1]), torch.float64, a.device)


def _kernel(a, b, A_log, dt_bias):
    g, beta = _like(a, torch.float32), _like(b)
    _amcore.gdn_gate_forward(g, beta, a, b, A_log, dt_bias)
    return g, beta


def _backward_kernel(dg, dbeta, a, b, A_log, dt_bias):
    outputs = [_like(x) for x in (a, b, A_log, dt_bias)]
    _amcore.gdn_gate_backward(*outputs, _partials(a), _unit(dg), _unit(dbeta), a, b, A_log, dt_bias)
    return tuple(outputs)


_backward = define(
    "gdn_gate_backward(Tensor dg, Tensor dbeta, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _backward_kernel,
    lambda dg, dbeta, *inputs: tuple(x.new_empty(x.shape) for x in inputs),
)
_gate = define(
    "gdn_gate(Tensor a, Tensor b, Tensor A_log, Tensor dt_bias) -> (Tensor, Tensor)",
    _kernel,
    lambda a, b, *_: (a.new_empty(a.shape, dtype=torch.float32), b.new_empty(b.shape)),
    setup=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    backward=lambda ctx, dg, dbeta: _backward(dg, dbeta, *ctx.saved_tensors),
)
