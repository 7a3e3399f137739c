"""Packed attention with grouped heads, per document, causal or not."""

import math

import torch

from automodel_c import _amcore
from automodel_c.ops import _alloc
from automodel_c.partition import Pack, require_pack


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
        q: [T, Hq, D] float32 or bfloat16. Any strides whose last axis is contiguous, for k and v too.
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
    docs, docs_k = _documents(q, k, pack, cu_seqlens, cu_seqlens_k, doc_ids)
    out, lse = attend(q, k, v, docs, docs_k, causal=causal, scale=scale)
    return (out, lse) if return_lse else out


def attend(q, k, v, docs, docs_k=None, *, causal=True, scale=None):
    """`attention` of documents anywhere in q and in k: (out, lse).

    docs, docs_k: int64 [2 N] on the host, start and end of each document's rows in q, and in k and v (None: the same);
    ascending, gaps allowed. Rows of q in gaps get 0, and gradient 0; so do the keys.
    """
    scale = 1.0 / math.sqrt(max(1, q.shape[-1])) if scale is None else float(scale)
    out, lse, _ = _forward(q, k, v, docs, docs_k, scale, bool(causal))
    return out, lse


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
    """Starts and ends of the documents as int64 [2 N] host tensors: of q, and of k where those differ (else None)."""
    if sum(x is not None for x in (pack, cu_seqlens, doc_ids)) > 1:
        raise ValueError("attention: give at most one of pack, cu_seqlens and doc_ids")
    if cu_seqlens is not None or doc_ids is not None:
        pack = Pack(cu_seqlens=cu_seqlens, doc_ids=doc_ids)
    if pack is None:
        docs = torch.tensor([0, q.shape[0]])
    else:
        require_pack("attention", pack)
        pack.check_tokens(q.shape[0], "attention: q")
        docs = torch.from_numpy(pack.docs.flatten())
    if cu_seqlens_k is not None:
        pack_k = Pack(cu_seqlens=cu_seqlens_k)
        pack_k.check_tokens(k.shape[0], "attention: k")
        return docs, torch.from_numpy(pack_k.docs.flatten())
    if pack is None and k.shape[0] != q.shape[0]:
        return docs, torch.tensor([0, k.shape[0]])
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"attention: k has {k.shape[0]} tokens, q {q.shape[0]}: give cu_seqlens_k")
    return docs, None


@torch.library.custom_op("automodel_c::attention_forward", mutates_args=())
def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    docs: torch.Tensor,
    docs_k: torch.Tensor | None,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out = _alloc.empty(q.shape, q.dtype, q.device)
    lse, lse_low = (_alloc.empty(q.shape[:2], torch.float32, q.device) for _ in range(2))
    nbytes = _amcore.attention_workspace(q, k, v, docs, docs_k, causal=causal, backward=False)
    scratch = _alloc.workspace(nbytes, q.device)
    _amcore.attention_forward(out, lse, scratch, q, k, v, docs, docs_k, lse_low, scale=scale, causal=causal)
    return out, lse, lse_low


@_forward.register_fake
def _(q, k, v, docs, docs_k, scale, causal):
    lse, lse_low = (q.new_empty(q.shape[:2], dtype=torch.float32) for _ in range(2))
    return q.new_empty(q.shape), lse, lse_low


@torch.library.custom_op("automodel_c::attention_backward", mutates_args=())
def _backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    lse_low: torch.Tensor,
    docs: torch.Tensor,
    docs_k: torch.Tensor | None,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = (_alloc.empty(x.shape, x.dtype, x.device) for x in (q, k, v))
    nbytes = _amcore.attention_workspace(q, k, v, docs, docs_k, causal=causal, backward=True)
    scratch = _alloc.workspace(nbytes, q.device)
    _amcore.attention_backward(
        dq, dk, dv, scratch, dout, q, k, v, out, lse, docs, docs_k, lse_low, scale=scale, causal=causal
    )  # fmt: skip
    return dq, dk, dv


@_backward.register_fake
def _(dout, q, k, v, out, lse, lse_low, docs, docs_k, scale, causal):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs, output):
    q, k, v, docs, docs_k, ctx.scale, ctx.causal = inputs
    out, lse, lse_low = output
    ctx.mark_non_differentiable(lse, lse_low)
    ctx.save_for_backward(q, k, v, out, lse, lse_low, docs, docs_k)


def _differentiate(ctx, dout, *_):
    q, k, v, out, lse, lse_low, docs, docs_k = ctx.saved_tensors
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    dq, dk, dv = _backward(dout, q, k, v, out, lse, lse_low, docs, docs_k, ctx.scale, ctx.causal)
    return dq, dk, dv, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
