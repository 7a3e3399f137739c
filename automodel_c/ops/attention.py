"""Packed attention with grouped heads, per document, causal or not."""

import math

import torch

from automodel_c import _amcore
from automodel_c.ops import _alloc
from automodel_c.ops._documents import ends_of, pack_of
from automodel_c.ops._library import define
from automodel_c.partition import to_device


def attention(
    q,
    k,
    v,
    *,
    pack=None,
    cu_seqlens=None,
    cu_seqlens_k=None,
    doc_ids=None,
    causal=True,
    scale=None,
    deterministic=None,
    return_lse=False,
):
    """softmax(scale * q k^T + mask) v inside every document of a pack.

    Args:
        q: [T, Hq, D] float32 or bfloat16, on CUDA also float16. Any strides whose last axis is contiguous; so k, v.
        k, v: [Tk, Hk, D] in q's dtype; Hq is a multiple of Hk, and query head h reads key head h // (Hq // Hk).
        pack, cu_seqlens, doc_ids: the documents, at most one of the three; none is one document. See `Pack`.
        cu_seqlens_k: [N + 1] offsets of the documents in k and v where they differ from those in q. Without
            any offsets, Tk may differ from T.
        causal: query i of nq sees keys j <= i + nk - nq (aligned to the bottom right when nk differs from nq).
        scale: of the scores; 1 / sqrt(D) when None.
        deterministic: False admits faster kernels whose bits change from run to run, where there are any (the CPU has
            none); None and True do not.
        return_lse: return (out, lse).

    Returns:
        out [T, Hq, D] in q's dtype; lse [T, Hq] float32, log(sum(exp(scores))), not differentiable. A row without
        keys has out 0, lse -inf and gradient 0; so has padding, whatever it holds.

    Raises:
        ValueError: shapes or documents that do not fit, two descriptions of the documents, another device, a last axis
            that is not contiguous.
        TypeError: other dtypes.
        NotImplementedError: no kernel for this head dim or device.

    The backward pass keeps q, k, v, out and lse (as two floats: high logits cost no accuracy), recomputes the scores,
    and repeats to the bit. Dao et al., FlashAttention, NeurIPS 2022.
    """
    _check(q, k, v, deterministic)
    docs, docs_k, device_docs = _documents(q, k, pack, cu_seqlens, cu_seqlens_k, doc_ids)
    out, lse = attend(q, k, v, docs, docs_k, device_docs, causal=causal, scale=scale)
    return (out, lse) if return_lse else out


def attend(q, k, v, docs, docs_k=None, device_docs=None, *, causal=True, scale=None):
    """`attention` of documents anywhere in q and in k: (out, lse).

    docs, docs_k: int64 [2 N] on the host, start and end of each document's rows in q, and in k and v (None: the same);
    ascending, gaps allowed. Rows of q in gaps get 0, and gradient 0; so do the keys. On CUDA, device_docs is both and
    the order of work beside q (`_amcore.attention_forward`); without it they are copied there.
    """
    if q.is_cuda and device_docs is None:
        device_docs = documents_beside(q.device, docs, docs_k)
    scale = 1.0 / math.sqrt(max(1, q.shape[-1])) if scale is None else float(scale)
    out, lse, _ = _forward(q, k, v, docs, docs_k, device_docs, scale, bool(causal))
    return out, lse


def documents_beside(device, docs, docs_k=None):
    """What `attend` takes as device_docs: both and the order of work on a CUDA device, None for the CPU."""
    order = torch.argsort(docs[1::2] - docs[::2], descending=True, stable=True)  # long documents first
    return to_device(device, docs, [] if docs_k is None else docs_k, order)


def _check(q, k, v, deterministic):
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"attention: {name} must be a tensor, not {type(x).__name__}")
        if x.ndim != 3:
            raise ValueError(f"attention: {name} has {x.ndim} axes, [tokens, heads, dim] is needed")
        if x.device != q.device:
            raise ValueError(f"attention: {name} is on {x.device}, q on {q.device}")
    if deterministic not in (None, True, False):
        raise TypeError(f"attention: deterministic must be True, False or None, not {deterministic!r}")


def _documents(q, k, pack, cu_seqlens, cu_seqlens_k, doc_ids):
    """Starts and ends of the documents as int64 [2 N] host tensors: of q, and of k where those differ (else None).

    The third result is both of them and the order of work beside q, for CUDA kernels; None where that is a copy.
    """
    pack = pack_of("attention", "q", q.shape[0], pack, cu_seqlens, doc_ids)
    docs = ends_of(pack, q.shape[0])
    docs_k = None
    if cu_seqlens_k is not None:
        docs_k = ends_of(pack_of("attention", "k", k.shape[0], None, cu_seqlens_k, None), k.shape[0])
    elif k.shape[0] != q.shape[0]:
        if pack is not None:
            raise ValueError(f"attention: k has {k.shape[0]} tokens, q {q.shape[0]}: give cu_seqlens_k")
        docs_k = torch.tensor([0, k.shape[0]])
    if not q.is_cuda:
        return docs, docs_k, None
    if pack is None and cu_seqlens_k is None:
        return docs, docs_k, _one_document(q, k, docs_k)
    if docs_k is None and pack.device_plan is not None and pack.device_plan.device == q.device:
        return docs, docs_k, pack.device_plan
    return docs, docs_k, None


def _one_document(q, k, docs_k):
    """What `to_device` would give, without a copy: legal under graph capture."""
    ends = [q.shape[0]] if docs_k is None else [q.shape[0], k.shape[0]]
    made = torch.zeros(2 * len(ends) + 1, dtype=torch.int64, device=q.device)
    for i, end in enumerate(ends):
        made[2 * i + 1].fill_(end)
    return made


def _run(q, k, v, docs, docs_k, device_docs, scale, causal, out=None):
    out = _alloc.empty(q.shape, q.dtype, q.device) if out is None else out
    lse, lse_low = (_alloc.empty(q.shape[:2], torch.float32, q.device) for _ in range(2))
    nbytes = _amcore.attention_workspace(q, k, v, docs, docs_k, causal=causal, backward=False)
    scratch = _alloc.workspace(nbytes, q.device)
    _amcore.attention_forward(
        out, lse, scratch, q, k, v, docs, docs_k, lse_low, device_docs, scale=scale, causal=causal
    )  # fmt: skip
    return out, lse, lse_low


def _fake(q, k, v, docs, docs_k, device_docs, scale, causal):
    lse, lse_low = (q.new_empty(q.shape[:2], dtype=torch.float32) for _ in range(2))
    return q.new_empty(q.shape), lse, lse_low


def _run_backward(dout, q, k, v, out, lse, lse_low, docs, docs_k, device_docs, scale, causal, grads=None):
    dq, dk, dv = grads or (_alloc.empty(x.shape, x.dtype, x.device) for x in (q, k, v))
    nbytes = _amcore.attention_workspace(q, k, v, docs, docs_k, causal=causal, backward=True)
    scratch = _alloc.workspace(nbytes, q.device)
    _amcore.attention_backward(
        dq, dk, dv, scratch, dout, q, k, v, out, lse, docs, docs_k, lse_low, device_docs, scale=scale, causal=causal
    )  # fmt: skip
    return dq, dk, dv


def _save(ctx, inputs, output):
    q, k, v, docs, docs_k, device_docs, ctx.scale, ctx.causal = inputs
    out, lse, lse_low = output
    ctx.mark_non_differentiable(lse, lse_low)
    ctx.save_for_backward(q, k, v, out, lse, lse_low, docs, docs_k, device_docs)


def _copyable(x):
    """Whether the copy engine takes x: an expanded gradient, say, would have the plain kernels run."""
    return x.data_ptr() % 16 == 0 and all(n > 0 and n * x.element_size() % 16 == 0 for n in x.stride()[:-1])


def _differentiate(ctx, dout, *_):
    *saved, docs, docs_k, device_docs = ctx.saved_tensors
    if dout.stride(-1) != 1 or (dout.is_cuda and not _copyable(dout)):
        dout = dout.contiguous()
    dq, dk, dv = _backward(dout, *saved, docs, docs_k, device_docs, ctx.scale, ctx.causal)
    return dq, dk, dv, None, None, None, None, None


_PLAN = "Tensor docs, Tensor? docs_k, Tensor? device_docs, float scale, bool causal"
_backward = define(
    f"attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor lse_low, {_PLAN}) "
    "-> (Tensor, Tensor, Tensor)",
    _run_backward,
    lambda dout, q, k, v, *_: (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)),
)
_forward = define(
    f"attention_forward(Tensor q, Tensor k, Tensor v, {_PLAN}) -> (Tensor, Tensor, Tensor)",
    _run,
    _fake,
    setup=_save,
    backward=_differentiate,
)
