"""Depthwise causal convolution inside the documents of a pack, with the SiLU that follows it."""

import torch

from automodel_c import _amcore
from automodel_c.ops import _alloc
from automodel_c.ops._documents import ends_of, pack_of
from automodel_c.ops._library import define, require_tensors
from automodel_c.partition import to_device


def causal_conv1d(
    x,
    weight,
    *,
    bias=None,
    activation="silu",
    pack=None,
    cu_seqlens=None,
    doc_ids=None,
    initial_state=None,
    output_final_state=False,
):
    """`silu(bias + sum_j weight[:, j] * u[t + j])`, u being a document's state and then its rows.

    Args:
        x: [T, C], float32 or bfloat16, last axis contiguous.
        weight: [C, W], float32 or bfloat16, W from 1 to 8.
        bias: [C], float32 or bfloat16, or None.
        activation: "silu" or None.
        pack, cu_seqlens, doc_ids: the documents, at most one of the three; none is one document. See `Pack`: one
            made with device= costs no copy on CUDA, and its buffer is what a captured graph reads.
        initial_state: [N, C, W - 1] in x's dtype: the raw inputs before each document, oldest first; zeros when None.
        output_final_state: also return the last W - 1 raw inputs of each document.

    Returns:
        (y [T, C] in x's dtype, final_state [N, C, W - 1] or None). Float32 inside, rounded once. Padding has y 0 and
        gradient 0, whatever it holds. A document without rows passes its state, and the state's gradient, through.

    Raises:
        ValueError: shapes or documents that do not fit, two descriptions of the documents, another activation, a
            strided last axis. TypeError: another dtype. NotImplementedError: a wider weight, another device.
        RuntimeError: a second derivative.
    """
    optional = {"bias": bias, "initial_state": initial_state}
    given = {name: value for name, value in optional.items() if value is not None}
    require_tensors("causal_conv1d", x=x, weight=weight, **given)
    if activation not in ("silu", None):
        raise ValueError(f"causal_conv1d: activation is {activation!r}, 'silu' or None is needed")
    if x.ndim != 2 or weight.ndim != 2:
        raise ValueError(
            f"causal_conv1d: x has {x.ndim} axes and weight has {weight.ndim}, [tokens, channels] and "
            "[channels, width] are needed"
        )
    pack = pack_of("causal_conv1d", "x", x.shape[0], pack, cu_seqlens, doc_ids)
    docs = ends_of(pack, x.shape[0])
    silu, final = activation is not None, bool(output_final_state)
    y, final_state = _conv(x, weight, bias, initial_state, docs, _device_docs(x, pack), silu, final)
    return y, final_state if output_final_state else None


def _device_docs(x, pack):
    """The documents beside x for CUDA kernels; None on the CPU, and for a single document, which needs no copy."""
    if pack is None or not x.is_cuda:
        return None
    if pack.device_docs is not None and pack.device_docs.device == x.device:
        return pack.device_docs
    return to_device(x.device, pack.docs)


def _like(x):
    return _alloc.empty(x.shape, x.dtype, x.device)


def _optional(x, needed):
    """An output like `x`, or an empty tensor for autograd and None for C."""
    out = _alloc.empty(x.shape if needed else (0,), x.dtype, x.device)
    return out, out if needed else None


def _state_shape(x, weight, docs, wanted):
    return (docs.numel() // 2, x.shape[1], weight.shape[1] - 1) if wanted else (0,)


def _partials(x, weight):
    """Scratch of weight gradients: a run of at least 64 rows each. Decides the order of the sum.

    At most 16 runs; on CUDA three blocks, each 1 KiB of a run's rows, for every one of the four that a multiprocessor
    holds.
    """
    most = 16
    if x.is_cuda:
        processors = torch.cuda.get_device_properties(x.device).multi_processor_count
        blocks = max(1, -(-x.shape[1] * x.element_size() // 1024))
        most = max(most, 12 * processors // blocks)
    runs = min(most, max(1, x.shape[0] // 64))
    return _alloc.empty((runs, weight.shape[1] + 1, x.shape[1]), torch.float64, x.device)


def _kernel(x, weight, bias, state, docs, device_docs, silu, final):
    y, last = _like(x), _alloc.empty(_state_shape(x, weight, docs, final), x.dtype, x.device)
    _amcore.causal_conv1d_forward(
        y, last if final else None, x, weight, bias, state, docs, device_docs, silu=silu
    )  # fmt: skip
    return y, last


def _backward_kernel(dy, dlast, x, weight, bias, state, docs, device_docs, silu, *needs):
    dx = _like(x)
    dweight, wanted_weight = _optional(weight, needs[0])
    dbias, wanted_bias = _optional(weight if bias is None else bias, needs[1])
    dstate, wanted_state = _optional(x if state is None else state, needs[2])
    dy = dy if dy.shape[1] <= 1 or dy.stride(1) == 1 else dy.contiguous()
    _amcore.causal_conv1d_backward(
        dx, wanted_weight, wanted_bias, wanted_state, _partials(x, weight), dy, dlast, x, weight, bias, state, docs,
        device_docs, silu=silu,
    )  # fmt: skip
    return dx, dweight, dbias, dstate


def _setup(ctx, inputs, output):
    *tensors, ctx.silu, ctx.final = inputs
    ctx.save_for_backward(*tensors)


def _derivative(ctx, dy, dlast):
    needs = ctx.needs_input_grad[1:4]
    dx, *rest = _backward(dy, dlast if ctx.final else None, *ctx.saved_tensors, ctx.silu, *needs)
    return dx, *(grad if need else None for grad, need in zip(rest, needs, strict=True)), None, None, None, None


def _fake(x, weight, bias, state, docs, device_docs, silu, final):
    return x.new_empty(x.shape), x.new_empty(_state_shape(x, weight, docs, final))


def _fake_backward(dy, dlast, x, weight, bias, state, docs, device_docs, silu, *needs):
    return (
        x.new_empty(x.shape),
        weight.new_empty(weight.shape if needs[0] else (0,)),
        (weight if bias is None else bias).new_empty(bias.shape if needs[1] else (0,)),
        x.new_empty(state.shape if needs[2] else (0,)),
    )


_backward = define(
    "causal_conv1d_backward(Tensor dy, Tensor? dlast, Tensor x, Tensor weight, Tensor? bias, Tensor? state, "
    "Tensor docs, Tensor? device_docs, bool silu, bool need_weight, bool need_bias, bool need_state) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _backward_kernel,
    _fake_backward,
)
_conv = define(
    "causal_conv1d(Tensor x, Tensor weight, Tensor? bias, Tensor? state, Tensor docs, Tensor? device_docs, bool silu, "
    "bool final) -> (Tensor, Tensor)",
    _kernel,
    _fake,
    setup=_setup,
    backward=_derivative,
)
