"""Cross-entropy on logits, and fused with the linear layer before it so that the logits are never whole.

Letters: T rows (tokens), V vocabulary, H hidden size, n rows that have a label.
"""

import operator

import torch

from automodel_c import _amcore
from automodel_c.ops import _alloc
from automodel_c.ops._library import define, require_tensors


def linear_cross_entropy(hidden, weight, labels, *, num_label_tokens=None, ignore_index=-100):
    """Mean cross-entropy of `hidden @ weight.T`, in chunks of the vocabulary: logits are never whole.

    Forward makes each chunk of logits once and keeps two numbers a row; backward makes it again. Extra memory is a
    chunk of logits and one float32 copy of `hidden`.

    Args:
        hidden: [T, H], float32 or bfloat16.
        weight: [V, H], hidden's dtype.
        labels: [T], int64 or int32, in [0, V) or `ignore_index`. Rows labelled `ignore_index` cost nothing, may hold
            NaN, and get gradient 0.
        num_label_tokens: what the sum is divided by: an int or an integer tensor of one element (the label count of
            the global batch); None is this call's own count.

    Returns:
        A scalar float32. 0, with gradients 0, when nothing is labelled or `num_label_tokens` is 0.

    Raises:
        ValueError: shapes that disagree, a label out of range, a negative count.
        TypeError: another dtype. RuntimeError: a second derivative.
    """
    require_tensors("linear_cross_entropy", hidden=hidden, weight=weight, labels=labels)
    count = _count(num_label_tokens, "linear_cross_entropy", hidden.device)
    return _linear(hidden, weight, labels, count, ignore_index)[0]


def cross_entropy(logits, labels, *, chunk_len=32, num_label_tokens=None, ignore_index=-100):
    """Mean cross-entropy of rows of logits, which are saved as they are and never written.

    Args:
        logits: [T, V], float32 or bfloat16, last axis contiguous.
        labels: [T], int64 or int32, in [0, V) or `ignore_index`.
        chunk_len: rows of a parallel chunk, > 0; changes no bit.
        num_label_tokens: as for `linear_cross_entropy`.

    Returns:
        A scalar float32; the gradient has logits' dtype and fresh storage. Errors as for `linear_cross_entropy`, and
        ValueError for `chunk_len` <= 0.
    """
    require_tensors("cross_entropy", logits=logits, labels=labels)
    count = _count(num_label_tokens, "cross_entropy", logits.device)
    return _plain(logits, labels, count, chunk_len, ignore_index)


def _count(num_label_tokens, name, device):
    if num_label_tokens is None or isinstance(num_label_tokens, torch.Tensor):
        return num_label_tokens
    if isinstance(num_label_tokens, bool) or not hasattr(num_label_tokens, "__index__"):
        raise TypeError(f"{name}: num_label_tokens is {type(num_label_tokens).__name__}, an int or a tensor is needed")
    number = operator.index(num_label_tokens)
    if number < 0:
        raise ValueError(f"{name}: num_label_tokens is {number}, it must not be negative")
    return torch.full((), number, dtype=torch.int64, device=device)


def _plain_cpu(logits, labels, count, chunk_len, ignore_index):
    loss = _alloc.empty((), torch.float32, logits.device)
    row_loss = _alloc.empty(logits.shape[:1], torch.float64, logits.device)
    _amcore.cross_entropy_forward(loss, row_loss, logits, labels, count, chunk_len=chunk_len, ignore_index=ignore_index)
    return loss


def _plain_backward_cpu(dloss, logits, labels, count, chunk_len, ignore_index):
    dlogits = _alloc.empty(logits.shape, logits.dtype, logits.device)
    _amcore.cross_entropy_backward(
        dlogits, dloss, logits, labels, count, chunk_len=chunk_len, ignore_index=ignore_index
    )
    return dlogits


def _plain_setup(ctx, inputs, output):
    logits, labels, count, *ctx.settings = inputs
    ctx.save_for_backward(logits, labels, count)


def _plain_derivative(ctx, dloss):
    logits, labels, count = ctx.saved_tensors
    return _plain_backward(dloss, logits, labels, count, *ctx.settings), None, None, None, None


_plain_backward = define(
    "cross_entropy_backward(Tensor dloss, Tensor logits, Tensor labels, Tensor? count, int chunk_len, "
    "int ignore_index) -> Tensor",
    _plain_backward_cpu,
    lambda dloss, logits, *_: logits.new_empty(logits.shape),
)
_plain = define(
    "cross_entropy(Tensor logits, Tensor labels, Tensor? count, int chunk_len, int ignore_index) -> Tensor",
    _plain_cpu,
    lambda logits, *_: logits.new_empty((), dtype=torch.float32),
    setup=_plain_setup,
    backward=_plain_derivative,
)


def _chunks(vocab, hidden):
    """(first, last, buffer [n, last - first]) of each chunk of the vocabulary, for n rows of `hidden`.

    As wide as 4 % of whole logits allow beside four rows of hidden states (a gather, a float32 sum, a bfloat16 part),
    and at most an 80th of the vocabulary: the GEMM's own scratch is about as large as the chunk.
    """
    n, size = hidden.shape
    width = max(512, min(vocab // 80, vocab // 25 - 4 * size) // 256 * 256)
    buffer = _alloc.empty((n * min(width, vocab),), hidden.dtype, hidden.device)
    for first in range(0, vocab, width):
        last = min(first + width, vocab)
        yield first, last, buffer[: n * (last - first)].view(n, last - first)


def _labelled(hidden, weight, labels, count, ignore_index):
    """Rows that have a label: their indices [n], labels [T] (the first n count) and hidden states [n, H]."""
    rows, targets = (_alloc.empty(hidden.shape[:1], torch.int64, hidden.device) for _ in range(2))
    n = _amcore.linear_cross_entropy_rows(rows, targets, hidden, weight, labels, count, ignore_index=ignore_index)
    return rows[:n], targets, hidden if n == len(hidden) else hidden.index_select(0, rows[:n])


def _linear_cpu(hidden, weight, labels, count, ignore_index):
    rows, targets, x = _labelled(hidden, weight, labels, count, ignore_index)
    stats = _alloc.empty((3, len(hidden)), torch.float32, hidden.device)
    for first, last, logits in _chunks(len(weight), x):
        torch.mm(x, weight[first:last].t(), out=logits)
        _amcore.linear_cross_entropy_chunk(stats, logits, targets, first=first)
    loss = _alloc.empty((), torch.float32, hidden.device)
    _amcore.linear_cross_entropy_loss(loss, stats, count, n=len(rows))
    return loss, stats


def _linear_backward_cpu(dloss, hidden, weight, labels, count, stats, ignore_index, need_hidden, need_weight):
    rows, targets, x = _labelled(hidden, weight, labels, count, ignore_index)
    dhidden = _alloc.empty(hidden.shape if need_hidden else (0,), hidden.dtype, hidden.device)
    dweight = _alloc.empty(weight.shape if need_weight else (0,), weight.dtype, weight.device)
    total = _alloc.empty(x.shape, torch.float32, x.device) if need_hidden else None
    part = _alloc.empty(x.shape, x.dtype, x.device) if need_hidden and x.dtype != torch.float32 else None
    for first, last, logits in _chunks(len(weight), x):
        torch.mm(x, weight[first:last].t(), out=logits)
        _amcore.linear_cross_entropy_grad(logits, dloss, stats, targets, count, first=first)
        if need_weight:
            torch.mm(logits.t(), x, out=dweight[first:last])
        if need_hidden:
            _add_product(total, part, logits, weight[first:last], first)
    if need_hidden:
        _amcore.linear_cross_entropy_scatter(dhidden, total, rows)
    return dhidden, dweight


def _add_product(total, part, left, right, first):
    """total += left @ right, or = for the first chunk; a bfloat16 product joins the float32 sum through `part`."""
    if part is None:
        torch.addmm(total, left, right, beta=float(first > 0), out=total)
        return
    torch.mm(left, right, out=part)
    if first == 0:
        total.copy_(part)
    else:
        _amcore.linear_cross_entropy_add(total, part)


def _linear_setup(ctx, inputs, output):
    hidden, weight, labels, count, ctx.ignore_index = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, labels, count, output[1])


def _linear_derivative(ctx, dloss, _):
    hidden, weight, labels, count, stats = ctx.saved_tensors
    need_hidden, need_weight = ctx.needs_input_grad[:2]
    if dloss is None:
        return None, None, None, None, None
    dhidden, dweight = _linear_backward(
        dloss, hidden, weight, labels, count, stats, ctx.ignore_index, need_hidden, need_weight
    )
    return dhidden if need_hidden else None, dweight if need_weight else None, None, None, None


def _linear_backward_fake(dloss, hidden, weight, labels, count, stats, ignore_index, need_hidden, need_weight):
    return hidden.new_empty(hidden.shape if need_hidden else (0,)), weight.new_empty(
        weight.shape if need_weight else (0,)
    )


_linear_backward = define(
    "linear_cross_entropy_backward(Tensor dloss, Tensor hidden, Tensor weight, Tensor labels, Tensor? count, "
    "Tensor stats, int ignore_index, bool need_hidden, bool need_weight) -> (Tensor, Tensor)",
    _linear_backward_cpu,
    _linear_backward_fake,
)
_linear = define(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor labels, Tensor? count, int ignore_index) "
    "-> (Tensor, Tensor)",
    _linear_cpu,
    lambda hidden, *_: (
        hidden.new_empty((), dtype=torch.float32),
        hidden.new_empty((3, hidden.shape[0]), dtype=torch.float32),
    ),
    setup=_linear_setup,
    backward=_linear_derivative,
)
