"""Where documents begin and end in a batch as transformers takes it, and what the layers need to know of them."""

import numpy as np
import torch

from automodel_c import ops, parallel
from automodel_c.partition import Pack

PLAN = "amcore_plan"  # the keyword that carries a TextPlan through transformers' code


class TextPlan:
    """A batch's documents, made once a forward and handed to the layers, which keep it for their recomputation, and
    what mixes tokens inside them.

    Attributes:
        pack: Pack over the flattened tokens [B * L].
        positions: int64 [3, T], those of the T rows that this rank holds: B * L, or its shard.
        rope: keyword arguments of `ops.mrope`, or None where transformers' cosines are used.
        packed: whether a row of the batch holds more than one document.
        padding: bool [T], true for padding, None when there is none.
        row_mask: bool [B, L] of real tokens where rows hold one document each and some padding, otherwise None.
        router_logits: whether transformers records the routers' logits.
        cp, over: the ContextParallel whose ranks share the batch and its ContextPlan, or None and None.
    """

    def __init__(self, pack, shape, positions, rope, router_logits=False, cp=None):
        self.pack, self.shape, self.rope, self.cp = pack, shape, rope, cp
        self.router_logits = router_logits
        tokens, length = shape[0] * shape[1], shape[1]
        docs = pack.docs[pack.lengths > 0]
        rows = docs[:, 0] // max(length, 1)
        self.packed = len(np.unique(rows)) < len(rows)
        ids = self._ids()
        self.over = None if cp is None else cp.plan(doc_ids=ids, tokens=tokens)
        if cp is not None:
            self.over.use()
        self.positions = self.take(positions.t()).t()
        real = self.take(torch.from_numpy(ids > 0))
        self.padding = None if real.all() else ~real.to(positions.device)
        self.row_mask = None if self.packed or self.padding is None or cp is not None else ~self.padding.view(shape)

    def _ids(self):
        ids = np.zeros(self.shape[0] * self.shape[1], dtype=np.int64)
        for index, (start, end) in enumerate(self.pack.docs.tolist(), 1):
            ids[start:end] = index
        return ids

    def take(self, x, fill=0):
        """This rank's rows of x [B * L, ..], `fill` in those that only make the shards equal; all of them on one."""
        return x if self.cp is None else _between_ranks(self.cp.shard, x, self.over, fill)

    def whole(self, x):
        """x [B * L, ..] of every rank's own rows."""
        return x if self.cp is None else _between_ranks(self.cp.gather, x, self.over)

    def attention(self, q, k, v, scale):
        """Causal attention inside every document, [T, Hq, D]."""
        if self.over is None:
            return ops.attention(q, k, v, pack=self.pack, causal=True, scale=scale)
        return _between_ranks(parallel.attention, q, k, v, self.over, causal=True, scale=scale)

    def causal_conv1d(self, x, weight, bias):
        """The short convolution with its SiLU, [T, C]."""
        if self.over is None:
            return ops.causal_conv1d(x, weight, bias=bias, activation="silu", pack=self.pack)[0]
        return _between_ranks(parallel.causal_conv1d, x, weight, self.over, bias=bias, activation="silu")

    def gated_delta_rule(self, q, k, v, g, beta):
        """The recurrence of every document, [T, Hv, Dv]."""
        if self.over is None:
            return ops.gated_delta_rule(q, k, v, g, beta, pack=self.pack)[0]
        return _between_ranks(parallel.gated_delta_rule, q, k, v, g, beta, self.over)


@torch.compiler.disable(recursive=True)  # plans, and ranks that wait for each other
def _between_ranks(function, *args, **options):
    return function(*args, **options)


def find_documents(shape, *, position_ids=None, attention_mask=None, cu_seqlens=None):
    """The Pack of a batch of `shape` (B, L), over its flattened tokens.

    The first of these that says something decides: cu_seqlens, int32 or int64 [N + 1]; an indexed attention_mask,
    [B, L] of integers with a value above 1 (equal neighbours are one document, 0 is padding); a 0/1 mask and
    position_ids, where a document begins when the positions do not go on.

    position_ids: int [T], [B, L], [4, B, L] (row 0 counts) or [3, B, L]. Positions of one axis go on by one; of three
    axes, time does not fall and not all three are 0.

    ValueError: another shape, two descriptions, offsets across rows, or padding inside a document.
    """
    batch, length = shape
    if attention_mask is not None:
        if tuple(attention_mask.shape) != (batch, length):
            raise ValueError(
                f"attention_mask has shape {list(attention_mask.shape)}, the patched model takes [{batch}, {length}]: "
                "0/1, or 1..n for the documents of a pack"
            )
        attention_mask = None if attention_mask.is_meta else attention_mask.detach().cpu().numpy()
    if cu_seqlens is not None:
        return _from_offsets(cu_seqlens, shape, attention_mask)
    real = np.ones(shape, dtype=bool) if attention_mask is None else attention_mask != 0
    begins = np.zeros(shape, dtype=bool)
    begins[:, :1] = True
    indexed = attention_mask is not None and bool((attention_mask.astype(np.int64) > 1).any())
    if indexed:
        begins[:, 1:] = attention_mask[:, 1:] != attention_mask[:, :-1]
    else:
        _mark_restarts(begins, real, position_ids)
    return _from_begins(begins, real)


def _from_offsets(cu_seqlens, shape, attention_mask):
    batch, length = shape
    if attention_mask is not None and not (attention_mask == 1).all():
        raise ValueError("cu_seqlens and an attention_mask with padding or indices both describe the documents")
    pack = Pack(cu_seqlens=cu_seqlens)
    pack.check_tokens(batch * length, "input_ids")
    docs = pack.docs[pack.lengths > 0]
    if batch > 1 and (docs[:, 0] // length != (docs[:, 1] - 1) // length).any():
        raise ValueError(f"cu_seqlens lays a document across two of the {batch} rows of the batch")
    return pack


def _mark_restarts(begins, real, position_ids):
    """Marks the real tokens of every row whose positions do not go on from the real token before them."""
    if position_ids is not None and position_ids.is_meta:
        position_ids = None
    positions = None if position_ids is None else position_ids.detach().cpu().numpy()
    for row in range(len(begins)):
        tokens = np.flatnonzero(real[row])
        if tokens.size == 0:
            continue
        begins[row, tokens[0]] = True
        if positions is not None:
            p = positions[:, row, tokens]
            step = p[:, 1:] - p[:, :-1]
            goes_on = (step[0] >= 0) & p[:, 1:].any(0) if len(p) == 3 else step[0] == 1
            begins[row, tokens[1:]] |= ~goes_on


def _from_begins(begins, real):
    gap = real.copy()
    gap[:, 1:] &= ~real[:, :-1]
    gap[:, :1] = False
    hole = gap & ~begins
    if hole.any():
        row, token = np.argwhere(hole)[0].tolist()
        raise ValueError(f"attention_mask has padding inside the document that goes on at token {token} of row {row}")
    ids = np.cumsum((begins & real).ravel())
    return Pack(doc_ids=np.where(real.ravel(), ids, 0))


def three_axes(position_ids, shape, device):
    """(positions that decide documents, positions [3, B, L] that turn heads) from what a caller gave, or None.

    ValueError when the shape is none of those of `find_documents`.
    """
    batch, length = shape
    if position_ids is None:
        axes = torch.arange(length, device=device).expand(3, batch, length)
        return None, axes
    if position_ids.ndim == 1:
        position_ids = position_ids[None]
    if position_ids.ndim == 2:
        position_ids = position_ids[None]
    axes = position_ids.shape[0]
    if position_ids.ndim != 3 or axes not in (1, 3, 4) or position_ids.shape[2] != length:
        raise ValueError(
            f"position_ids has shape {list(position_ids.shape)}, [{length}], [{batch}, {length}], "
            f"[3, {batch}, {length}] or [4, {batch}, {length}] is needed"
        )
    position_ids = position_ids.expand(axes, batch, length)
    if axes == 1:
        return position_ids, position_ids.expand(3, batch, length)
    return (position_ids, position_ids) if axes == 3 else (position_ids[:1], position_ids[1:])
