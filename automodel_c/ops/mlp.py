"""Elementwise gates: SwiGLU, the gate of attention's output, GELU. Float32 inside, rounded once."""

from automodel_c import _amcore
from automodel_c.ops import _alloc
from automodel_c.ops._library import define, require_tensors


def swiglu(gate_up, up=None):
    """`silu(gate) * up`.

    Args:
        gate_up: [.., 2I], the gate in the first half, float32 or bfloat16, last axis contiguous; or the gate alone,
            [.., I], when `up` is given.
        up: like the gate, or None.

    Returns:
        [.., I].

    Raises:
        ValueError: an odd last axis, shapes that disagree, a strided last axis. TypeError: another dtype.
        RuntimeError: a second derivative.
    """
    require_tensors("swiglu", gate_up=gate_up)
    if up is not None:
        require_tensors("swiglu", gate_up=gate_up, up=up)
        return _swiglu(gate_up, up)
    if gate_up.ndim == 0 or gate_up.shape[-1] % 2:
        last = gate_up.shape[-1] if gate_up.ndim else 0
        raise ValueError(f"swiglu: gate_up has {last} elements on its last axis ({gate_up.ndim} axes), 2 I are needed")
    return _swiglu_joined(gate_up)


def sigmoid_gate(x, gate):
    """`x * sigmoid(gate)`, both [.., N], float32 or bfloat16, last axis contiguous. Errors as for `swiglu`."""
    require_tensors("sigmoid_gate", x=x, gate=gate)
    return _sigmoid_gate(x, gate)


def gelu(x, approximate="none"):
    """GELU of x [.., N], float32 or bfloat16, last axis contiguous; approximate is "none" (erf) or "tanh".

    Errors as for `swiglu`, and ValueError for another `approximate`.
    """
    require_tensors("gelu", x=x)
    if approximate not in ("none", "tanh"):
        raise ValueError(f"gelu: approximate is {approximate!r}, 'none' or 'tanh' is needed")
    return _gelu(x, approximate == "tanh")


def _like(x):
    return _alloc.empty(x.shape, x.dtype, x.device)


def _unit(grad):
    """A gradient whose last axis is contiguous: autograd hands out expanded and transposed ones."""
    return grad if grad.ndim == 0 or grad.shape[-1] <= 1 or grad.stride(-1) == 1 else grad.contiguous()


def _swiglu_kernel(gate, up):
    y = _like(gate)
    _amcore.swiglu_forward(y, gate, up)
    return y


def _swiglu_backward_kernel(dy, gate, up):
    dgate, dup = _like(gate), _like(gate)
    _amcore.swiglu_backward(dgate, dup, _unit(dy), gate, up)
    return dgate, dup


def _swiglu_joined_kernel(gate_up):
    return _swiglu_kernel(*gate_up.chunk(2, dim=-1))


def _swiglu_joined_backward_kernel(dy, gate_up):
    out = _like(gate_up)
    _amcore.swiglu_backward(*out.chunk(2, dim=-1), _unit(dy), *gate_up.chunk(2, dim=-1))
    return out


def _sigmoid_gate_kernel(x, gate):
    y = _like(x)
    _amcore.sigmoid_gate_forward(y, x, gate)
    return y


def _sigmoid_gate_backward_kernel(dy, x, gate):
    dx, dgate = _like(x), _like(x)
    _amcore.sigmoid_gate_backward(dx, dgate, _unit(dy), x, gate)
    return dx, dgate


def _gelu_kernel(x, tanh):
    y = _like(x)
    _amcore.gelu_forward(y, x, tanh=tanh)
    return y


def _gelu_backward_kernel(dy, x, tanh):
    dx = _like(x)
    _amcore.gelu_backward(dx, _unit(dy), x, tanh=tanh)
    return dx


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _gelu_setup(ctx, inputs, output):
    x, ctx.tanh = inputs
    ctx.save_for_backward(x)


def _fake_like(x, *_):
    return x.new_empty(x.shape)


def _fake_two(dy, x, *_):
    return x.new_empty(x.shape), x.new_empty(x.shape)


_swiglu_backward = define(
    "swiglu_backward(Tensor dy, Tensor gate, Tensor up) -> (Tensor, Tensor)", _swiglu_backward_kernel, _fake_two
)
_swiglu = define(
    "swiglu(Tensor gate, Tensor up) -> Tensor",
    _swiglu_kernel,
    _fake_like,
    setup=_save,
    backward=lambda ctx, dy: _swiglu_backward(dy, *ctx.saved_tensors),
)
_swiglu_joined_backward = define(
    "swiglu_joined_backward(Tensor dy, Tensor gate_up) -> Tensor",
    _swiglu_joined_backward_kernel,
    lambda dy, gate_up: gate_up.new_empty(gate_up.shape),
)
_swiglu_joined = define(
    "swiglu_joined(Tensor gate_up) -> Tensor",
    _swiglu_joined_kernel,
    lambda gate_up: gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2)),
    setup=_save,
    backward=lambda ctx, dy: _swiglu_joined_backward(dy, *ctx.saved_tensors),
)
_sigmoid_gate_backward = define(
    "sigmoid_gate_backward(Tensor dy, Tensor x, Tensor gate) -> (Tensor, Tensor)",
    _sigmoid_gate_backward_kernel,
    _fake_two,
)
_sigmoid_gate = define(
    "sigmoid_gate(Tensor x, Tensor gate) -> Tensor",
    _sigmoid_gate_kernel,
    _fake_like,
    setup=_save,
    backward=lambda ctx, dy: _sigmoid_gate_backward(dy, *ctx.saved_tensors),
)
_gelu_backward = define(
    "gelu_backward(Tensor dy, Tensor x, bool tanh) -> Tensor",
    _gelu_backward_kernel,
    lambda dy, x, tanh: x.new_empty(x.shape),
)
_gelu = define(
    "gelu(Tensor x, bool tanh) -> Tensor",
    _gelu_kernel,
    _fake_like,
    setup=_gelu_setup,
    backward=lambda ctx, dy: (_gelu_backward(dy, *ctx.saved_tensors, ctx.tanh), None),
)
