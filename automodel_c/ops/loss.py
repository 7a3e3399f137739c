"""Cross-entropy on logits, and fused with the linear layer before it so that the logits are never whole.

Letters: T rows (tokens), V vocabulary, H hidden size, n rows that have a label.
"""

import operator

import torch

from automodel_c import _amcore
from automodel_c.ops import _alloc
from automodel_c.ops._library import define, require_tensors


def linear_cross_entropy(hidden, weight, labels, *, num_label_tokens=None, ignore_index=-100):
    """Mean cross-entropy of `hidden @ weight.T`, in chunks of the vocabulary: logits are never whole beside a gradient.

    Where weight needs a gradient, forward allocates it and keeps logits there: all of them for at most H labelled
    rows n, else a share H / n; backward takes chunk after chunk out and puts the gradient in its place. The rest, and
    all of them in a repeated backward, are made again. Beside the gradients the memory is a chunk of logits and one
    float32 copy of `hidden`; every call awaiting its backward holds its [V, H]. Compiled, nothing is kept.

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
    keep = weight.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return _linear(hidden, weight, labels, count, ignore_index, keep)[0]


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
    """[(first, last)] of each chunk of the vocabulary, and scratch for one chunk of logits.

    As wide as 4 % of whole logits allow beside four rows of hidden states (a gather, a float32 sum, a bfloat16 part),
    and at most a 120th of the vocabulary: the GEMM's own scratch is about as large as the chunk.
    """
    n, size = hidden.shape
    width = max(512, min(vocab // 120, vocab // 25 - 4 * size) // 256 * 256)
    scratch = _alloc.empty((n * min(width, vocab),), hidden.dtype, hidden.device)
    return [(first, min(first + width, vocab)) for first in range(0, vocab, width)], scratch


def _view(memory, start, n, first, last):
    return memory[start : start + n * (last - first)].view(n, last - first)


def _places(chunks, memory, hidden):
    """(first, last, logits [n, last - first]) of the leading chunks whose logits find room in `memory`.

    `memory` is that of weight's gradient from row chunks[0][0] on. The gradient of rows before `last` ends before the
    logits of the next chunk begin, so that gradients can be written in rising order. GEMMs and row kernels take turns
    over all of a group: torch's threads spin for milliseconds after each GEMM, where ours want to run.
    """
    (n, size), begin = hidden.shape, chunks[0][0] if chunks else 0
    step = max(n, size)
    count = sum((last - begin) * step <= memory.numel() for _, last in chunks)
    return [(first, last, _view(memory, (first - begin) * step, n, first, last)) for first, last in chunks[:count]]


def _labelled(hidden, weight, labels, count, ignore_index):
    """Rows that have a label: their indices [n], labels [T] (the first n count) and hidden states [n, H]."""
    rows, targets = (_alloc.empty(hidden.shape[:1], torch.int64, hidden.device) for _ in range(2))
    n = _amcore.linear_cross_entropy_rows(rows, targets, hidden, weight, labels, count, ignore_index=ignore_index)
    return rows[:n], targets, hidden if n == len(hidden) else hidden.index_select(0, rows[:n])


def _linear_cpu(hidden, weight, labels, count, ignore_index, keep):
    rows, targets, x = _labelled(hidden, weight, labels, count, ignore_index)
    stats = _alloc.empty((3, len(hidden)), torch.float32, hidden.device)
    stats[0] = -torch.inf
    stats[1] = 0.0
    kept = _alloc.empty(weight.shape if keep else (0,), weight.dtype, weight.device)
    for group in _forward_groups(len(weight), x, kept.view(-1)):
        for first, last, logits in group:
            torch.mm(x, weight[first:last].t(), out=logits)
        for first, _, logits in group:
            _amcore.linear_cross_entropy_chunk(stats, logits, targets, first=first)
    loss = _alloc.empty((), torch.float32, hidden.device)
    _amcore.linear_cross_entropy_loss(loss, stats, count, n=len(rows))
    return loss, stats, kept


def _forward_groups(vocab, hidden, kept):
    """Groups of (first, last, logits), in one order whether logits are kept or not; those that stay come last."""
    chunks, scratch = _chunks(vocab, hidden)
    staying = sum(last * max(hidden.shape) <= vocab * hidden.shape[1] for _, last in chunks)
    for rest in (chunks[staying:], chunks[:staying]):
        while rest:
            group = _places(rest, kept, hidden) or [(*rest[0], _view(scratch, 0, len(hidden), *rest[0]))]
            yield group
            rest = rest[len(group) :]


def _linear_backward_cpu(dloss, hidden, weight, labels, count, stats, ignore_index, need_hidden, need_weight):
    kept = _alloc.empty((0,), weight.dtype, weight.device)
    dweight = _alloc.empty(weight.shape if need_weight else (0,), weight.dtype, weight.device)
    dhidden = _gradients(dweight, kept, dloss, hidden, weight, labels, count, stats, ignore_index, need_hidden)
    return dhidden, dweight


def _gradients(dweight, kept, dloss, hidden, weight, labels, count, stats, ignore_index, need_hidden):
    """Writes dweight, unless it is empty, and returns dhidden; `kept` may be dweight's own memory."""
    rows, targets, x = _labelled(hidden, weight, labels, count, ignore_index)
    dhidden = _alloc.empty(hidden.shape if need_hidden else (0,), hidden.dtype, hidden.device)
    total = _alloc.empty(x.shape, torch.float32, x.device) if need_hidden else None
    part = _alloc.empty(x.shape, x.dtype, x.device) if need_hidden and x.dtype != torch.float32 else None
    memory = (kept if kept.numel() else dweight).view(-1)
    chunks, scratch = _chunks(len(weight), x)
    made = bool(_places(chunks, kept.view(-1), x))
    while chunks:
        group = _places(chunks, memory[chunks[0][0] * x.shape[1] :], x)
        group = group or [(*chunks[0], _view(scratch, 0, len(x), *chunks[0]))]
        chunks = chunks[len(group) :]
        for first, last, logits in group:
            if not made:
                torch.mm(x, weight[first:last].t(), out=logits)
        made = False
        for first, _, logits in group:
            _amcore.linear_cross_entropy_grad(logits, dloss, stats, targets, count, first=first)
        for first, last, logits in group:
            dlogits = _view(scratch, 0, len(x), first, last)
            if dlogits.data_ptr() != logits.data_ptr():
                dlogits.copy_(logits)
            if dweight.numel():
                torch.mm(dlogits.t(), x, out=dweight[first:last])
            if need_hidden:
                _add_product(total, part, dlogits, weight[first:last], first)
    if need_hidden:
        _amcore.linear_cross_entropy_scatter(dhidden, total, rows)
    return dhidden


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
    hidden, weight, labels, count, ctx.ignore_index, ctx.keeps = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, labels, count, *output[1:])


def _linear_derivative(ctx, dloss, *_):
    *saved, kept = ctx.saved_tensors
    need_hidden, need_weight = ctx.needs_input_grad[:2]
    if dloss is None:
        return (None,) * 6
    # Writing `kept` is hidden from autograd's version counter and from tracers: they get the functional operator.
    if ctx.keeps and not torch.is_grad_enabled() and type(kept) is torch.Tensor and kept.device.type == "cpu":
        ctx.keeps = False
        kept = kept.data
        dweight = kept if need_weight else kept[:0]
        dhidden = _gradients(dweight, kept, dloss, *saved, ctx.ignore_index, need_hidden)
    else:
        dhidden, dweight = _linear_backward(dloss, *saved, ctx.ignore_index, need_hidden, need_weight)
    return dhidden if need_hidden else None, dweight if need_weight else None, None, None, None, None


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
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor labels, Tensor? count, int ignore_index, bool keep) "
    "-> (Tensor, Tensor, Tensor)",
    _linear_cpu,
    lambda hidden, weight, labels, count, ignore_index, keep: (
        hidden.new_empty((), dtype=torch.float32),
        hidden.new_empty((3, hidden.shape[0]), dtype=torch.float32),
        weight.new_empty(weight.shape if keep else (0,)),
    ),
    setup=_linear_setup,
    backward=_linear_derivative,
)
