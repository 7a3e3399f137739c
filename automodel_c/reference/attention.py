"""Attention written from its formula, in float64 (or the dtype of its inputs)."""

import torch


def attention(q, k, v, docs, docs_k=None, *, causal=True, scale=None):
    """softmax(scale * q k^T + mask) v per document, by autograd-friendly torch operations.

    q [T, Hq, D], k and v [Tk, Hk, D] in any floating dtype; docs and docs_k: [N, 2] starts and ends (docs_k defaults
    to docs). Returns out [T, Hq, D] and lse [T, Hq]; rows without keys and rows outside documents: 0 and -inf.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf)
    pieces = []
    for (q0, q1), (k0, k1) in zip(docs, docs if docs_k is None else docs_k, strict=True):
        queries, keys = torch.arange(int(q1 - q0)), torch.arange(int(k1 - k0))
        mask = keys[None, :] <= queries[:, None] + len(keys) - len(queries) if causal else None
        rows = len(queries) if mask is None else int(mask.any(1).sum())  # rows without keys come first
        if not len(keys) or not rows:
            continue
        first = int(q1) - rows
        kh, vh = (x[k0:k1].transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
        scores = scale * q[first:q1].transpose(0, 1) @ kh.transpose(1, 2)
        if mask is not None:
            scores = scores.masked_fill(~mask[len(queries) - rows :], -torch.inf)
        pieces.append((first, int(q1), (scores.softmax(-1) @ vh).transpose(0, 1), scores.logsumexp(-1).T))
    for first, last, piece, piece_lse in pieces:
        rows = torch.arange(first, last)
        out = out.index_copy(0, rows, piece)
        lse = lse.index_copy(0, rows, piece_lse)
    return out, lse
