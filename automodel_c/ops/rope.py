"""Rotary embeddings of queries and keys: interleaved partial mRoPE of the text model, axial rotary of the tower."""

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
