"""Cross-entropy fused with a linear layer whose words the ranks of a group share, as tensor parallelism has its head.

Every rank has its own part of the rows, and its own words for all of them: rows are gathered, each rank runs over the
chunks of its words, and one exchange of what the softmax is made of (largest logit, sum of exponentials, logit of the
label: 12 bytes a row and rank) gives each the statistics of all words. A rank closes the loss of its own rows. Backward
makes the gradient of its words' logits, of that the whole gradient of its part of the weight, and its part of hidden's,
which the ranks add in float32, in their order, while rows go home.
"""

import functools
import operator

import numpy as np
import torch
import torch.distributed as dist

from automodel_c import _amcore
from automodel_c.ops import _alloc, loss
from automodel_c.ops._library import require_tensors

from . import alarms
from .exchange import Route, exchange_back, exchange_now
from .experts import expert_range as part_of

_NAME = "linear_cross_entropy"


class Words(loss.Words):
    """This rank's of `vocab` words; `rows`: how many rows each rank has of its own."""

    shared = True

    def __init__(self, vocab, rows, group, told):
        self.ranks, self.rank, self.group, self.vocab = group.size(), dist.get_rank(group), group, vocab
        self.first, end = part_of(vocab, self.ranks, self.rank)
        self.held = end - self.first
        self.own = slice(self.rank * rows, (self.rank + 1) * rows)
        self.rows = _to_all(rows, self.rank, self.ranks, f"rows for the loss {told}")

    def gather(self, x):
        """x [n, ..] of every rank -> [R n, ..]."""
        return exchange_now(x.detach().contiguous(), self.rows, self.group)

    def statistics(self, tokens, device):
        stats = super().statistics(tokens, device)
        stats[2] = 0.0
        return stats

    def join(self, stats, rows=None):
        n = stats.shape[1] if rows is None else len(rows)
        whole, three = stats[:, :n], _to_all(3, self.rank, self.ranks, "statistics of logits")
        parts = exchange_now(whole.contiguous(), three, self.group)
        _amcore.linear_cross_entropy_join(whole, parts.view(self.ranks, 3, n))
        if rows is None:
            return self.own
        edges = torch.tensor([self.own.start, self.own.stop])
        return slice(*torch.searchsorted(rows, edges).tolist())

    def add_up(self, total):
        return exchange_back(total, self.rows, self.group), self.own


@functools.lru_cache(maxsize=32)
def _to_all(rows, rank, ranks, words):
    """The Route of every rank's rows to all, in the order of ranks."""
    src, dst = np.divmod(np.arange(ranks * ranks), ranks)
    moves = np.stack([src, dst, np.zeros_like(src), src * rows, np.full_like(src, rows)], 1)
    return Route.of(moves, rank, ranks, rows, ranks * rows, words)


def loss_over_ranks(hidden, weight, labels, num_label_tokens, ignore_index, extra_bytes, group, vocab_size):
    """`ops.linear_cross_entropy` over the ranks of `group`; all of them call it alike."""
    with alarms.everywhere(group):
        vocab = _checked(hidden, weight, labels, vocab_size, group)
        needs = torch.is_grad_enabled() and hidden.requires_grad
        told = f"[{vocab} words, ignored {ignore_index}, {'a' if needs else 'no'} gradient]"
        words = Words(vocab, len(hidden), group, told)
        rows, labels = words.gather(hidden), words.gather(labels)
        count = loss._count(num_label_tokens, _NAME, hidden.device)
        count = (labels != ignore_index).sum() if count is None else count
        kept = loss._kept(rows.requires_grad_(needs), weight, extra_bytes)
        return _Loss.apply(hidden, weight, rows.detach(), labels, count, ignore_index, kept, words)


def _checked(hidden, weight, labels, vocab_size, group):
    require_tensors(_NAME, hidden=hidden, weight=weight, labels=labels)
    if vocab_size is None:
        raise ValueError(f"{_NAME}: vocab_size is missing; the ranks of tp_group share so many words")
    vocab, ranks, rank = operator.index(vocab_size), group.size(), dist.get_rank(group)
    first, end = part_of(vocab, ranks, rank)
    for name, x, axes in (("hidden", hidden, 2), ("weight", weight, 2), ("labels", labels, 1)):
        if x.dim() != axes:
            raise ValueError(f"{_NAME}: {name} has {x.dim()} axes, {axes} are needed")
    if len(weight) != end - first:
        raise ValueError(
            f"{_NAME}: weight has {len(weight)} words; rank {rank} of {ranks} holds {end - first} of {vocab}"
        )
    if len(labels) != len(hidden):
        raise ValueError(f"{_NAME}: labels has {len(labels)} elements for {len(hidden)} rows")
    return vocab


class _Loss(torch.autograd.Function):
    """hidden is this rank's rows, `rows` and `labels` are all ranks'."""

    @staticmethod
    def forward(ctx, hidden, weight, rows, labels, count, ignore_index, kept, words):
        ctx.set_materialize_grads(False)
        ctx.ignore_index, (ctx.keeps, ctx.layout, ctx.wide), ctx.words = ignore_index, kept, words
        value, stats, *ctx.memory = loss._linear_forward(rows, weight, labels, count, ignore_index, *kept, words)
        ctx.save_for_backward(hidden, rows, weight, labels, count, stats)
        return value

    @staticmethod
    def backward(ctx, dloss):
        if dloss is None:
            return (None,) * 8
        hidden, *saved = ctx.saved_tensors
        weight, (need_hidden, need_weight) = saved[1], ctx.needs_input_grad[:2]
        with alarms.everywhere(ctx.words.group):
            dtype = loss._grad_dtype(weight, ctx.wide)
            nothing = _alloc.empty((0,), dtype, weight.device)
            kept, beside = ctx.memory if ctx.keeps else (nothing, nothing)
            ctx.keeps, ctx.memory = False, None  # the gradient takes the place of logits
            dweight = kept if need_weight else kept[:0]
            if need_weight and kept.shape != weight.shape:
                dweight = _alloc.empty(weight.shape, dtype, weight.device)
            dhidden = loss._gradients(
                dweight, kept, beside, dloss, *saved, ctx.ignore_index, need_hidden, ctx.layout, ctx.words
            )
        if torch.is_grad_enabled():
            dhidden, dweight = _Last.apply(dhidden, dweight, dloss, hidden, weight)
        return dhidden if need_hidden else None, dweight if need_weight else None, *(None,) * 6


class _Last(torch.autograd.Function):
    """Gradients that have none."""

    @staticmethod
    def forward(ctx, dhidden, dweight, *_):
        return dhidden.view_as(dhidden), dweight.view_as(dweight)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(f"{_NAME}_backward: a second derivative is not implemented")
