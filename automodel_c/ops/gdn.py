"""The gated delta rule per document, with states in and out."""

import torch

from automodel_c import _amcore
from automodel_c.ops import _alloc
from automodel_c.ops._documents import ends_of, pack_of, plan_beside
from automodel_c.ops._library import define, require_tensors

_STEP = 1024  # tokens from one kept state to the next
_WHOLE, _EARLY, _REST = 0, 1, 2  # parts of a pass, see gdn.h


def gated_delta_rule(
    q,
    k,
    v,
    g,
    beta,
    *,
    pack=None,
    cu_seqlens=None,
    doc_ids=None,
    scale=None,
    qk_l2norm=True,
    initial_state=None,
    output_final_state=False,
):
    """S <- exp(g) S; S <- S + k (beta (v - S^T k))^T; o = S^T (scale q), token by token inside every document.

    Args:
        q, k: [T, Hk, Dk] float32 or bfloat16. Any strides whose last axis is contiguous, for v too. Dk and Dv are
            multiples of 8 up to 256.
        v: [T, Hv, Dv] in q's dtype; Hv is a multiple of Hk, and value head h reads key head h // (Hv // Hk).
        g: [T, Hv] float32, the log of the decay, <= 0.
        beta: [T, Hv] in q's dtype or float32.
        pack, cu_seqlens, doc_ids: the documents, at most one of the three; none is one document. See `Pack`: one
            made with device= costs no copy on CUDA, and its buffer is what a captured graph reads.
        scale: of q; 1 / sqrt(Dk) when None.
        qk_l2norm: q and k are divided by sqrt(sum x^2 + 1e-6) first.
        initial_state: [N, Hv, Dk, Dv] float32, the documents' states before their first token; 0 when None.
        output_final_state: return the states after the last tokens. An empty document passes its state through.

    Returns:
        (o [T, Hv, Dv] in q's dtype, final state [N, Hv, Dk, Dv] float32 or None). Padding gets o 0 and gradients 0,
        whatever it holds. Gradients flow from both results to every tensor.

    Raises:
        ValueError: shapes or documents that do not fit, two descriptions of the documents, another device, a last axis
            that is not contiguous.
        TypeError: other dtypes.
        NotImplementedError: no kernel for these dims, or built without CUDA.

    Chunks of 64 tokens, states and sums in float32. The backward pass keeps the inputs and every 1,024th state,
    computes the rest again, and repeats to the bit. Yang, Kautz, Hatamizadeh, Gated Delta Networks, ICLR 2025.
    """
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    if initial_state is not None:
        tensors["initial_state"] = initial_state
    _check(tensors)
    pack = pack_of("gated_delta_rule", "q", q.shape[0], pack, cu_seqlens, doc_ids)
    docs = ends_of(pack, q.shape[0])
    scale = max(1, q.shape[2]) ** -0.5 if scale is None else float(scale)
    plan = plan_beside(q, pack)
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in tensors.values())
    final = bool(output_final_state)
    o, final_state, _ = _forward(q, k, v, g, beta, docs, plan, initial_state, scale, bool(qk_l2norm), final, keep)
    return o, final_state if final else None


def _check(tensors):
    require_tensors("gated_delta_rule", **tensors)
    for name, x in tensors.items():
        ndim = {"g": 2, "beta": 2, "initial_state": 4}.get(name, 3)
        if x.ndim != ndim:
            raise ValueError(f"gated_delta_rule: {name} has {x.ndim} axes, {ndim} are needed")


def _shapes(q, v, docs, final, keep):
    state = (v.shape[1], q.shape[2], v.shape[2])
    return (docs.shape[0] // 2 if final else 0, *state), (q.shape[0] // _STEP if keep else 0, *state)


def prepare(q, k, v, g, beta, docs, plan, scale, l2norm):
    """What a forward pass makes without the states before its documents, for `prepared` of the operator."""
    scratch = _alloc.workspace(_amcore.gated_delta_rule_workspace(q, v, docs, backward=False), q.device)
    _amcore.gated_delta_rule_forward(
        _alloc.empty(v.shape, v.dtype, v.device), scratch, q, k, v, g, beta, docs, device_docs=plan, scale=scale,
        l2norm=l2norm, part=_EARLY,
    )  # fmt: skip
    return scratch


def _run(q, k, v, g, beta, docs, plan, initial, scale, l2norm, final, keep, prepared=None):
    o = _alloc.empty(v.shape, v.dtype, v.device)
    final_state, states = (_alloc.empty(s, torch.float32, q.device) for s in _shapes(q, v, docs, final, keep))
    scratch = prepared
    if scratch is None:
        scratch = _alloc.workspace(_amcore.gated_delta_rule_workspace(q, v, docs, backward=False), q.device)
    _amcore.gated_delta_rule_forward(
        o, scratch, q, k, v, g, beta, docs, initial, final_state if final else None, states if keep else None,
        plan, scale=scale, l2norm=l2norm, part=_WHOLE if prepared is None else _REST,
    )  # fmt: skip
    return o, final_state, states


def _fake(q, k, v, g, beta, docs, plan, initial, scale, l2norm, final, keep, prepared=None):
    made = (q.new_empty(shape, dtype=torch.float32) for shape in _shapes(q, v, docs, final, keep))
    return v.new_empty(v.shape), *made


def initial_gradient(*arguments):
    """The last result of `_backward` alone, of the same arguments: sooner, where a kernel can."""
    return _run_backward(*arguments, True, part=_EARLY)[5]


def _run_backward(
    dout, dfinal, q, k, v, g, beta, docs, plan, initial, states, scale, l2norm, dinitial, part=_WHOLE
):  # fmt: skip
    grads = [_alloc.empty(x.shape, x.dtype, x.device) for x in (q, k, v, g, beta)]
    shape = _shapes(q, v, docs, dinitial, False)[0]
    grad_initial = _alloc.empty(shape, torch.float32, q.device)
    scratch = _alloc.workspace(_amcore.gated_delta_rule_workspace(q, v, docs, backward=True), q.device)
    _amcore.gated_delta_rule_backward(
        *grads, scratch, dout, q, k, v, g, beta, docs, initial, states, dfinal, grad_initial if dinitial else None,
        plan, scale=scale, l2norm=l2norm, part=part,
    )  # fmt: skip
    return *grads, grad_initial


def _fake_backward(dout, dfinal, q, k, v, g, beta, docs, plan, initial, states, scale, l2norm, dinitial):
    grads = (x.new_empty(x.shape) for x in (q, k, v, g, beta))
    return *grads, q.new_empty(_shapes(q, v, docs, dinitial, False)[0], dtype=torch.float32)


def _save(ctx, inputs, output):
    tensors, (ctx.scale, ctx.l2norm, ctx.final), ctx.more = inputs[:8], inputs[8:11], len(inputs) - 8
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(*tensors, output[2])


def _differentiate(ctx, dout, dfinal, _):
    *tensors, states = ctx.saved_tensors
    dinitial = ctx.needs_input_grad[7]
    dout, dfinal = (x if x.stride(-1) == 1 else x.contiguous() for x in (dout, dfinal))
    *grads, grad_initial = _backward(
        dout, dfinal if ctx.final else None, *tensors, states, ctx.scale, ctx.l2norm, dinitial
    )  # fmt: skip
    return *grads, None, None, grad_initial if dinitial else None, *(None,) * ctx.more


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor docs, Tensor? plan, Tensor? initial"
_forward = define(
    f"gated_delta_rule_forward({_INPUTS}, float scale, bool l2norm, bool final, bool keep, Tensor? prepared=None) "
    "-> (Tensor, Tensor, Tensor)",
    _run, _fake, setup=_save, backward=_differentiate,
)  # fmt: skip
_backward = define(
    f"gated_delta_rule_backward(Tensor dout, Tensor? dfinal, {_INPUTS}, Tensor states, float scale, bool l2norm, "
    "bool dinitial) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run_backward, _fake_backward,
)  # fmt: skip
