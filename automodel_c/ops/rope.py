"""Rotary embeddings of queries and keys: interleaved partial mRoPE of the text model, axial rotary of the tower."""

import torch

from automodel_c import _amcore
from automodel_c.ops import _alloc
from automodel_c.ops._library import define, require_tensors


def mrope(q, k, position_ids, *, rotary_dim, theta, section):
    """Turn the first `rotary_dim` elements of every head by its token's (T, H, W) position.

    Pair (i, i + rotary_dim / 2) turns by `position[axis] * theta ** (-2 i / rotary_dim)`: axis H where i % 3 == 1 and
    i < 3 section[1], W where i % 3 == 2 and i < 3 section[2], else T. The other elements are copied.

    Args:
        q: [T, Hq, D], float32 or bfloat16, last axis contiguous.
        k: [T, Hk, D], q's dtype.
        position_ids: [3, T], or [T] for equal axes; int32 or int64.
        rotary_dim: even, in [2, D]. theta: > 0. section: three ints >= 0 (Qwen3.5: 64, 1e7, [11, 11, 10]).

    Returns:
        (q, k) turned, new tensors.

    Raises:
        ValueError: shapes that disagree or values out of range. TypeError: another dtype. NotImplementedError:
        rotary_dim > 512. RuntimeError: a second derivative.
    """
    require_tensors("mrope", q=q, k=k, position_ids=position_ids)
    return _mrope(q, k, position_ids, rotary_dim, theta, list(section), False)


def qk_norm_mrope(q, k, q_weight, k_weight, position_ids, *, rotary_dim, theta, section, eps=1e-6, zero_centered=True):
    """`mrope(rms_norm(q, q_weight), rms_norm(k, k_weight), ..)` of every head, in one pass and rounded once.

    Args:
        q: [T, Hq, D], float32 or bfloat16, last axis contiguous.
        k: [T, Hk, D], q's dtype.
        q_weight, k_weight: [D], float32 or bfloat16 each.
        position_ids, rotary_dim, theta, section: as for `mrope`.
        eps, zero_centered: as for `rms_norm`, of both.

    Returns:
        (q, k) normed and turned, new tensors. Errors as for `mrope`. The weights' gradients are summed in float64 in an
        order that the shapes and the device decide.
    """
    require_tensors("qk_norm_mrope", q=q, k=k, q_weight=q_weight, k_weight=k_weight, position_ids=position_ids)
    return _normed(q, k, q_weight, k_weight, position_ids, rotary_dim, theta, list(section), eps, zero_centered)[:2]


def vision_rope(q, k, position_ids, *, theta=10000.0):
    """Turn whole heads by their patch's (row, column): with D / 4 frequencies an axis, angles [h | w | h | w].

    Args:
        q, k: [T, H, D], float32 or bfloat16, D a multiple of 4, last axis contiguous.
        position_ids: [2, T], or [T] for equal axes; int32 or int64.
        theta: > 0; frequency j of an axis is `theta ** (-4 j / D)`.

    Returns:
        (q, k) turned, new tensors. Errors as for `mrope`.
    """
    require_tensors("vision_rope", q=q, k=k, position_ids=position_ids)
    return _vision_rope(q, k, position_ids, theta, False)


def _outputs(q, k):
    return tuple(_alloc.empty(x.shape, x.dtype, x.device) for x in (q, k))


def _mrope_kernel(q, k, position_ids, rotary_dim, theta, section, inverse):
    out = _outputs(q, k)
    _amcore.mrope(*out, q, k, position_ids, rotary_dim=rotary_dim, theta=theta, section=section, inverse=inverse)
    return out


def _vision_rope_kernel(q, k, position_ids, theta, inverse):
    out = _outputs(q, k)
    _amcore.vision_rope(*out, q, k, position_ids, theta=theta, inverse=inverse)
    return out


def _normed_kernel(q, k, q_weight, k_weight, position_ids, rotary_dim, theta, section, eps, zero_centered):
    out, rstd = _outputs(q, k), _alloc.empty(_per_head(q, k), torch.float32, q.device)
    _amcore.qk_norm_mrope_forward(
        *out, rstd, q, k, q_weight, k_weight, position_ids,
        rotary_dim=rotary_dim, theta=theta, section=section, eps=eps, zero_centered=zero_centered,
    )  # fmt: skip
    return *out, rstd


def _per_head(q, k):
    """Shape of what there is one of for every head; wrong shapes are the kernel's to refuse."""
    return (q.shape[0], q.shape[1] + k.shape[1]) if q.ndim == k.ndim == 3 else (0, 0)


def _normed_backward_kernel(
    dq_out, dk_out, q, k, q_weight, k_weight, rstd, position_ids, rotary_dim, theta, section, zero_centered,
    need_q_weight, need_k_weight,
):  # fmt: skip
    dq, dk = _outputs(q, k)
    weights = [
        _alloc.empty(w.shape if needed else (0,), w.dtype, w.device)
        for w, needed in ((q_weight, need_q_weight), (k_weight, need_k_weight))
    ]
    wanted = [w if needed else None for w, needed in zip(weights, (need_q_weight, need_k_weight), strict=True)]
    _amcore.qk_norm_mrope_backward(
        dq, dk, *wanted, _partials(q), _unit(dq_out), _unit(dk_out), q, k, q_weight, k_weight, rstd, position_ids,
        rotary_dim=rotary_dim, theta=theta, section=section, zero_centered=zero_centered,
    )  # fmt: skip
    return dq, dk, *weights


def _partials(q):
    """Scratch of the weights' gradients: runs of at least 8 tokens, at most 64, on CUDA one a multiprocessor.

    Decides the order of the sum.
    """
    most = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 64
    runs = most if q.is_cuda else min(most, max(1, q.shape[0] // 8))
    return _alloc.empty((runs, 2, q.shape[2]), torch.float64, q.device)


def _normed_setup(ctx, inputs, output):
    *tensors, rotary_dim, theta, section, _, zero_centered = inputs
    ctx.settings = rotary_dim, theta, section, zero_centered
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[2])


def _normed_derivative(ctx, dq_out, dk_out, _):
    q, k, q_weight, k_weight, position_ids, rstd = ctx.saved_tensors
    if dq_out is None and dk_out is None:
        return (None,) * 10
    dq_out, dk_out = (torch.zeros_like(x) if d is None else d for d, x in ((dq_out, q), (dk_out, k)))
    need = ctx.needs_input_grad[2:4]
    dq, dk, *weights = _normed_backward(
        dq_out, dk_out, q, k, q_weight, k_weight, rstd, position_ids, *ctx.settings, *need
    )
    weights = (w if needed else None for w, needed in zip(weights, need, strict=True))
    return dq, dk, *weights, None, None, None, None, None, None


def _setup(ctx, inputs, output):
    _, _, position_ids, *ctx.settings = inputs
    ctx.save_for_backward(position_ids)


def _unit(grad):
    """A gradient whose last axis is contiguous: autograd hands out expanded and transposed ones."""
    return grad if grad.stride(-1) == 1 else grad.contiguous()


def _derivative_of(turn):
    def derivative(ctx, dq, dk):
        *settings, inverse = ctx.settings
        dq, dk = turn()(_unit(dq), _unit(dk), *ctx.saved_tensors, *settings, not inverse)
        return dq, dk, None, *(None for _ in ctx.settings)

    return derivative


def _fake(q, k, *_):
    return q.new_empty(q.shape), k.new_empty(k.shape)


_mrope = define(
    "mrope(Tensor q, Tensor k, Tensor position_ids, int rotary_dim, float theta, int[] section, bool inverse) "
    "-> (Tensor, Tensor)",
    _mrope_kernel,
    _fake,
    setup=_setup,
    backward=_derivative_of(lambda: _mrope),
)
_vision_rope = define(
    "vision_rope(Tensor q, Tensor k, Tensor position_ids, float theta, bool inverse) -> (Tensor, Tensor)",
    _vision_rope_kernel,
    _fake,
    setup=_setup,
    backward=_derivative_of(lambda: _vision_rope),
)
_normed_backward = define(
    "qk_norm_mrope_backward(Tensor dq_out, Tensor dk_out, Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, "
    "Tensor rstd, Tensor position_ids, int rotary_dim, float theta, int[] section, bool zero_centered, "
    "bool need_q_weight, bool need_k_weight) -> (Tensor, Tensor, Tensor, Tensor)",
    _normed_backward_kernel,
    lambda dq_out, dk_out, q, k, q_weight, k_weight, *rest: (
        *_fake(q, k),
        q_weight.new_empty(q_weight.shape if rest[-2] else (0,)),
        k_weight.new_empty(k_weight.shape if rest[-1] else (0,)),
    ),
)
_normed = define(
    "qk_norm_mrope(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor position_ids, int rotary_dim, "
    "float theta, int[] section, float eps, bool zero_centered) -> (Tensor, Tensor, Tensor)",
    _normed_kernel,
    lambda q, k, *_: (*_fake(q, k), q.new_empty(_per_head(q, k), dtype=torch.float32)),
    setup=_normed_setup,
    backward=_normed_derivative,
)
