"""Cross-entropy on logits, and fused with the linear layer before it so that the logits are never whole.

Letters: T rows (tokens), V vocabulary, H hidden size, n rows that have a label.
"""

import operator

import torch

from automodel_c import _amcore
from automodel_c.ops import _alloc, _loss_rows
from automodel_c.ops._library import define, require_tensors


def linear_cross_entropy(
    hidden,
    weight,
    labels,
    *,
    num_label_tokens=None,
    ignore_index=-100,
    extra_bytes=1 << 30,
    tp_group=None,
    vocab_size=None,
):
    """Mean cross-entropy of `hidden @ weight.T`, in chunks of the vocabulary: logits are never whole beside a gradient.

    Where weight needs a gradient, forward allocates it and keeps logits there: all of them for at most H labelled
    rows n, else a share H / n; backward takes chunk after chunk out and puts the gradient in its place. The rest, and
    all of them in a repeated backward, are made again: 2 n V H flops of 6 n V H. Beside the gradients the memory is a
    chunk of logits, scratch for the products, a float32 copy of `hidden` and, where some rows have no label, its
    labelled rows: below 5 % of whole logits at V = 248,320 and 256 rows. Every call awaiting its backward holds its
    [V, H]. Compiled, nothing is kept.

    On CUDA (products by cuBLASLt) all T rows go through, as nobody waits to learn which have a label, and logits are
    kept beside weight's gradient too: of as many chunks as `extra_bytes` hold. `weight.grad_dtype = torch.float32`
    gives a float32 gradient of a bfloat16 weight, not rounded on the way; its memory keeps 2 H rows. A repeated
    backward repeats the bits.

    Args:
        hidden: [T, H], float32 or bfloat16.
        weight: [V, H], hidden's dtype.
        labels: [T], int64 or int32, in [0, V) or `ignore_index`. Rows labelled `ignore_index` cost nothing, may hold
            NaN, and get gradient 0.
        num_label_tokens: what the sum is divided by: an int or an integer tensor of one element (the label count of
            the global batch); None is this call's own count.
        extra_bytes: on CUDA, what the call may hold beyond the gradients; where that is too little, it holds the least
            that works: 32 MiB, a float32 copy of hidden and chunks of 1,024 words. More than all logits is not used.

        tp_group: None, or the process group whose ranks share the words and the rows: rank r passes its own of R equal
            parts of the rows, with their labels, and its own rows of weight, a contiguous range of the words (what is
            over goes to the first ranks). The loss is that of its rows, over the label count of all ranks' where none
            is given, and must be given the same gradient on every rank; hidden's gradient is that of all words,
            weight's that of all rows. Hidden states and labels are gathered, statistics of rows exchanged once, and
            hidden's float32 gradient summed once, in the order of ranks. Memory is as of all T rows on one rank with
            this rank's words.
        vocab_size: with `tp_group`, how many words its ranks have together.

    Returns:
        A scalar float32. 0, with gradients 0, when nothing is labelled or `num_label_tokens` is 0.

    Raises:
        ValueError: shapes that disagree, a label out of range, a negative count, over ranks another number of words
            than this one's, or no `vocab_size`; of one rank it is raised on all. On CUDA, where nobody waits to look at
            them, such a label makes the loss, its row's gradient and weight's NaN, and such a device count all of them.
        TypeError: another dtype. RuntimeError: a second derivative. NotImplementedError: on CUDA, cuBLASLt is nowhere.
    """
    if _shared(tp_group):
        from automodel_c.parallel.vocab import loss_over_ranks  # it is built on the operators

        return loss_over_ranks(
            hidden, weight, labels, num_label_tokens, ignore_index, extra_bytes, tp_group, vocab_size
        )
    require_tensors("linear_cross_entropy", hidden=hidden, weight=weight, labels=labels)
    if vocab_size is not None and vocab_size != len(weight):
        raise ValueError(f"linear_cross_entropy: weight has {len(weight)} words, vocab_size is {vocab_size}")
    count = _count(num_label_tokens, "linear_cross_entropy", hidden.device)
    return _linear(hidden, weight, labels, count, ignore_index, *_kept(hidden, weight, extra_bytes))[0]


def _kept(hidden, weight, extra_bytes):
    """(keep, layout, wide): whether logits are kept for backward, where by row, and a float32 gradient of weight."""
    keep = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    layout, wide = [], False
    if _by_rows(hidden) and hidden.dim() == weight.dim() == 2:
        wide = keep and weight.is_leaf and getattr(weight, "grad_dtype", None) == torch.float32
        grad_dtype, needs = _grad_dtype(weight, wide), (hidden.requires_grad, weight.requires_grad)
        keep = keep and any(needs)
        layout = list(_loss_rows.layout_of(hidden, weight, grad_dtype, keep, needs, extra_bytes))
    else:
        keep = keep and weight.requires_grad
    return keep, layout, wide


def _shared(tp_group):
    """Whether ranks share the words."""
    if tp_group is None:
        return False
    if not (torch.distributed.is_available() and isinstance(tp_group, torch.distributed.ProcessGroup)):
        raise TypeError(
            f"linear_cross_entropy: tp_group must be a process group or None, not {type(tp_group).__name__}"
        )
    return tp_group.size() > 1


class Words:
    """Which words weight's rows are: `held` of the `vocab`, from `first` on; on one rank all. `parallel.vocab` has
    those of ranks that share them."""

    shared = False

    def __init__(self, vocab):
        self.first, self.held, self.vocab = 0, vocab, vocab

    def statistics(self, tokens, device):
        """float32 [3, tokens] that chunks of logits are joined to."""
        stats = _alloc.empty((3, tokens), torch.float32, device)
        stats[0] = -torch.inf
        stats[1] = 0.0
        return stats

    def join(self, stats, rows=None):
        """Makes statistics of all words' in place; the slice of the columns whose loss is this rank's. rows: int64 [n],
        which of the T rows the first n columns are, None where they are all."""
        return slice(0, stats.shape[1] if rows is None else len(rows))

    def add_up(self, total):
        """hidden's gradient [T, H] of these words -> (of all words, of this rank's rows, the slice of these)."""
        return total, slice(0, len(total))


def _by_rows(hidden):
    return hidden.device.type == "cuda"


def _grad_dtype(weight, wide):
    return torch.float32 if wide else weight.dtype


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
    return _plain(logits, labels, count, chunk_len, ignore_index)[0]


def _count(num_label_tokens, name, device):
    if num_label_tokens is None or isinstance(num_label_tokens, torch.Tensor):
        return num_label_tokens
    if isinstance(num_label_tokens, bool) or not hasattr(num_label_tokens, "__index__"):
        raise TypeError(f"{name}: num_label_tokens is {type(num_label_tokens).__name__}, an int or a tensor is needed")
    number = operator.index(num_label_tokens)
    if number < 0:
        raise ValueError(f"{name}: num_label_tokens is {number}, it must not be negative")
    return torch.full((), number, dtype=torch.int64, device=device)


def _plain_forward(logits, labels, count, chunk_len, ignore_index):
    """The loss, and on CUDA what backward needs beside the logits, to read them once: row statistics and the count."""
    device, tokens = logits.device, len(logits) if logits.dim() else 0
    loss, row_loss = _alloc.empty((), torch.float32, device), _alloc.empty(logits.shape[:1], torch.float64, device)
    stats = divisor = None
    if device.type != "cpu":
        stats, divisor = _alloc.empty((2, tokens), torch.float32, device), _alloc.empty((), torch.int64, device)
    _amcore.cross_entropy_forward(
        loss, row_loss, logits, labels, count, stats, divisor, chunk_len=chunk_len, ignore_index=ignore_index
    )
    if stats is None:
        stats, divisor = loss.new_empty(0), labels.new_empty(0, dtype=torch.int64)
    return loss, stats, divisor


def _plain_gradient(dloss, logits, labels, count, stats, chunk_len, ignore_index):
    dlogits = _alloc.empty(logits.shape, logits.dtype, logits.device)
    _amcore.cross_entropy_backward(
        dlogits, dloss, logits, labels, count, stats, chunk_len=chunk_len, ignore_index=ignore_index
    )
    return dlogits


def _plain_setup(ctx, inputs, output):
    logits, labels, count, *ctx.settings = inputs
    _, stats, divisor = output
    ctx.set_materialize_grads(False)
    kept = (count, None) if logits.device.type == "cpu" else (divisor, stats)
    ctx.save_for_backward(logits, labels, *kept)


def _plain_derivative(ctx, dloss, *_):
    if dloss is None:
        return (None,) * 5
    return _plain_backward(dloss, *ctx.saved_tensors, *ctx.settings), None, None, None, None


def _plain_fake(logits, labels, count, *_):
    on_host = logits.device.type == "cpu"
    stats = logits.new_empty((0,) if on_host else (2, len(logits)), dtype=torch.float32)
    return stats.new_empty(()), stats, labels.new_empty((0,) if on_host else (), dtype=torch.int64)


_plain_backward = define(
    "cross_entropy_backward(Tensor dloss, Tensor logits, Tensor labels, Tensor? count, Tensor? stats, int chunk_len, "
    "int ignore_index) -> Tensor",
    _plain_gradient,
    lambda dloss, logits, *_: logits.new_empty(logits.shape),
)
_plain = define(
    "cross_entropy(Tensor logits, Tensor labels, Tensor? count, int chunk_len, int ignore_index) "
    "-> (Tensor, Tensor, Tensor)",
    _plain_forward,
    _plain_fake,
    setup=_plain_setup,
    backward=_plain_derivative,
)


def _chunks(vocab, hidden):
    """[(first, last)] of each chunk of the vocabulary, and scratch for one chunk of logits and for the products.

    As wide as 4.5 % of whole logits allow beside the rows' gather and float32 sum and the products' scratch.
    """
    n, size = hidden.shape
    workspace = _alloc.workspace(_amcore.linear_cross_entropy_product_workspace(hidden), hidden.device)
    beside = size + (4 * size + len(workspace) // max(n, 1)) // hidden.dtype.itemsize
    width = max(512, (vocab * 45 // 1000 - beside) // 256 * 256)
    scratch = _alloc.empty((n * min(width, vocab),), hidden.dtype, hidden.device)
    return [(first, min(first + width, vocab)) for first in range(0, vocab, width)], scratch, workspace


def _place(memory, hidden, first, last):
    """Where the chunk's logits [n, last - first] stay in the memory of weight's gradient, or None.

    The gradient of rows before `last` ends before the logits of the next chunk begin, so that gradients can be written
    in rising order.
    """
    step = max(hidden.shape)
    if last * step > memory.numel():
        return None
    return _view(memory.view(-1)[first * step :], len(hidden), first, last)


def _view(memory, n, first, last):
    return memory[: n * (last - first)].view(n, last - first)


def _labelled(hidden, weight, labels, count, ignore_index, words):
    """Rows that have a label: their indices [n], labels [T] (the first n count) and hidden states [n, H]."""
    rows, targets = (_alloc.empty(hidden.shape[:1], torch.int64, hidden.device) for _ in range(2))
    n = _amcore.linear_cross_entropy_rows(
        rows, targets, hidden, weight, labels, count, vocab=words.vocab, ignore_index=ignore_index
    )
    return rows[:n], targets, hidden if n == len(hidden) else hidden.index_select(0, rows[:n])


def _product(out, workspace, left, right, add=False):
    left, right = (x if 1 in x.stride() else x.contiguous() for x in (left, right))
    _amcore.linear_cross_entropy_product(out, workspace, left, right, add=add)


def _linear_forward(hidden, weight, labels, count, ignore_index, keep, layout, wide, words=None):
    words = words or Words(len(weight))
    if layout:
        dtype = _grad_dtype(weight, wide)
        return _loss_rows.forward(hidden, weight, labels, count, ignore_index, layout, dtype, keep, words)
    rows, targets, x = _labelled(hidden, weight, labels, count, ignore_index, words)
    stats = words.statistics(len(hidden), hidden.device)
    kept = _alloc.empty(weight.shape if keep else (0,), weight.dtype, weight.device)
    chunks, scratch, workspace = _chunks(len(weight), x)
    for first, last in chunks:
        logits = _place(kept, x, first, last)
        if logits is None:
            logits = _view(scratch, len(x), first, last)
        _product(logits, workspace, x, weight[first:last].t())
        _amcore.linear_cross_entropy_chunk(stats, logits, targets, first=words.first + first)
    loss = _alloc.empty((), torch.float32, hidden.device)
    own = words.join(stats, rows)
    _amcore.linear_cross_entropy_loss(loss, stats[:, own], targets[own], count, n=own.stop - own.start)
    return loss, stats, kept, _alloc.empty((0,), hidden.dtype, hidden.device)


def _linear_gradients(
    dloss, hidden, weight, labels, count, stats, ignore_index, need_hidden, need_weight, layout, wide
):
    dtype = _grad_dtype(weight, wide)
    dweight = _alloc.empty(weight.shape if need_weight else (0,), dtype, weight.device)
    none = _alloc.empty((0,), dtype, weight.device)
    tensors = (dloss, hidden, weight, labels, count, stats)
    return _gradients(dweight, none, none, *tensors, ignore_index, need_hidden, layout), dweight


def _gradients(
    dweight, kept, beside, dloss, hidden, weight, labels, count, stats, ignore_index, need_hidden, layout, words=None
):
    """Writes dweight, unless it is empty, and returns dhidden; `kept` may be dweight's own memory."""
    words = words or Words(len(weight))
    if layout:
        tensors = (dloss, hidden, weight, labels, count, stats)
        return _loss_rows.backward(dweight, kept, beside, *tensors, ignore_index, layout, need_hidden, words)
    rows, targets, x = _labelled(hidden, weight, labels, count, ignore_index, words)
    total = _alloc.empty(x.shape, torch.float32, x.device) if need_hidden else None
    chunks, scratch, workspace = _chunks(len(weight), x)
    for first, last in chunks:
        dlogits = _view(scratch, len(x), first, last)
        logits = _place(kept, x, first, last)
        if logits is None:
            logits = dlogits
            _product(logits, workspace, x, weight[first:last].t())
        _amcore.linear_cross_entropy_grad(dlogits, dloss, logits, stats, targets, count, first=words.first + first)
        if dweight.numel():
            _product(dweight[first:last], workspace, dlogits.t(), x)
        if need_hidden:
            _product(total, workspace, dlogits, weight[first:last], add=first > 0)
    return _home(total, rows, hidden, words) if need_hidden else _alloc.empty((0,), hidden.dtype, hidden.device)


def _home(total, rows, hidden, words):
    """hidden's gradient, of that of labelled rows, `total` [n, H]."""
    if not words.held:
        total.zero_()
    dhidden = _alloc.empty(hidden.shape, torch.float32 if words.shared else hidden.dtype, hidden.device)
    _amcore.linear_cross_entropy_scatter(dhidden, total, rows)
    if not words.shared:
        return dhidden
    total, _ = words.add_up(dhidden)
    return _alloc.empty(total.shape, hidden.dtype, hidden.device).copy_(total)


def _linear_setup(ctx, inputs, output):
    hidden, weight, labels, count, ctx.ignore_index, ctx.keeps, ctx.layout, ctx.wide = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, labels, count, *output[1:])


def _linear_derivative(ctx, dloss, *_):
    *saved, kept, beside = ctx.saved_tensors
    need_hidden, need_weight = ctx.needs_input_grad[:2]
    if dloss is None:
        return (None,) * 8
    # Writing `kept` is hidden from autograd's version counter and from tracers: they get the functional operator.
    if ctx.keeps and not torch.is_grad_enabled() and type(kept) is torch.Tensor and kept.device.type != "meta":
        ctx.keeps = False
        kept, weight = kept.data, saved[1]
        dweight = kept if need_weight else kept[:0]
        if need_weight and kept.shape != weight.shape:
            dweight = _alloc.empty(weight.shape, kept.dtype, kept.device)
        dhidden = _gradients(dweight, kept, beside, dloss, *saved, ctx.ignore_index, need_hidden, ctx.layout)
    else:
        dhidden, dweight = _linear_backward(
            dloss, *saved, ctx.ignore_index, need_hidden, need_weight, ctx.layout, ctx.wide
        )
    return dhidden if need_hidden else None, dweight if need_weight else None, *(None,) * 6


def _linear_backward_fake(
    dloss, hidden, weight, labels, count, stats, ignore_index, need_hidden, need_weight, layout, wide
):
    dweight = weight.new_empty(weight.shape if need_weight else (0,), dtype=_grad_dtype(weight, wide))
    return hidden.new_empty(hidden.shape if need_hidden else (0,)), dweight


def _linear_fake(hidden, weight, labels, count, ignore_index, keep, layout, wide):
    shape, beside = _loss_rows.sizes_of(layout, hidden, weight, keep) if layout else (weight.shape if keep else (0,), 0)
    return (
        hidden.new_empty((), dtype=torch.float32),
        hidden.new_empty((3, hidden.shape[0]), dtype=torch.float32),
        weight.new_empty(shape, dtype=_grad_dtype(weight, wide)),
        hidden.new_empty(beside),
    )


_linear_backward = define(
    "linear_cross_entropy_backward(Tensor dloss, Tensor hidden, Tensor weight, Tensor labels, Tensor? count, "
    "Tensor stats, int ignore_index, bool need_hidden, bool need_weight, int[] layout, bool wide) -> (Tensor, Tensor)",
    _linear_gradients,
    _linear_backward_fake,
)
_linear = define(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor labels, Tensor? count, int ignore_index, bool keep, "
    "int[] layout, bool wide) -> (Tensor, Tensor, Tensor, Tensor)",
    _linear_forward,
    _linear_fake,
    setup=_linear_setup,
    backward=_linear_derivative,
)
