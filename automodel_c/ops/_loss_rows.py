"""linear_cross_entropy where the host does not know which rows have a label, which is on CUDA: all T rows go through.

Chunk after chunk of the vocabulary, as on the CPU: three products, and no more than a chunk of logits is scratch. The
logits that forward makes are kept for backward as far as there is memory for them, in two parts by row:

    rows [0, in_grad)   of every chunk, in the memory of weight's gradient, which forward allocates: the chunk's rows
    the rest            of the first `beside` chunks, in memory of their own, within the caller's bound

What is not kept backward makes again. Where weight's gradient is float32 and hidden bfloat16 the first part alone is
2 H rows. Backward puts a chunk's gradient into scratch, adds its product to hidden's sum, and then writes weight's
gradient over the kept logits. The parts are products of their own, made again the same way: kept or not changes no bit.
"""

from typing import NamedTuple

import torch

from automodel_c import _amcore
from automodel_c.ops import _alloc

WIDEST = 8192  # columns of a chunk, more where rows are few
LEAST_SCRATCH = 1 << 26  # elements
NARROWEST = 1024
WORKSPACE = (32 << 20) + 256  # bytes that products ask for on CUDA
LINE = 8  # a row of logits starts on so many elements


class Layout(NamedTuple):
    """`width` columns a chunk; the first part's rows; the chunks whose other rows are kept too."""

    width: int
    in_grad: int
    beside: int


def layout_of(hidden, weight, grad_dtype, keep, needs, extra_bytes):
    """How much of the logits is kept in `extra_bytes` beside the gradients; `needs`: hidden's gradient, weight's."""
    (tokens, size), vocab, item = hidden.shape, len(weight), hidden.dtype.itemsize
    room = extra_bytes - WORKSPACE
    if needs[0]:
        room -= 4 * tokens * size
    elif needs[1]:
        room -= item * tokens * size
    width = max(WIDEST, LEAST_SCRATCH // max(tokens, 1))
    width = min(width, max(NARROWEST, room // (max(tokens, 1) * item))) // 256 * 256
    width = min(width, max(vocab, 1))
    in_grad = beside = 0
    if keep and needs[1]:
        lines = [grad_dtype.itemsize * size * n // (item * _line(n)) for n in {width, vocab % width or width}]
        in_grad = min(tokens, *lines)
    if keep and in_grad < tokens:
        left = max(0, room - tokens * _line(width) * item)
        beside = min(-(-vocab // width), left // ((tokens - in_grad) * _line(width) * item))
    return Layout(width, in_grad, beside)


def _line(n):
    return -(-n // LINE) * LINE


def sizes_of(layout, hidden, weight, keep):
    """Shape of the memory of weight's gradient, and elements beside it."""
    width, in_grad, beside = layout
    columns = min(beside, len(weight) // width) * _line(width)
    columns += _line(len(weight) % width) if beside > len(weight) // width else 0
    return weight.shape if keep and in_grad else (0,), (len(hidden) - in_grad) * columns * keep


class Memory:
    """Where the logits of a chunk are."""

    def __init__(self, layout, hidden, weight, kept, beside):
        self.layout, self.tokens, self.dtype = layout, len(hidden), hidden.dtype
        self.kept, self.beside = kept, beside
        self.device, self.vocab = hidden.device, len(weight)
        self.scratch = None

    def chunks(self):
        width = self.layout.width
        return [(first, min(first + width, self.vocab)) for first in range(0, self.vocab, width)]

    def take_scratch(self, rows):
        self.scratch = _alloc.empty((rows * _line(self.layout.width),), self.dtype, self.device)

    def in_scratch(self, rows, first, last):
        return _rows_of(self.scratch, rows, last - first)

    def parts(self, first, last):
        """[(start, stop, logits)] of the two parts; logits are None where they are not kept."""
        width, in_grad, beside = self.layout
        index, rest = first // width, self.tokens - in_grad
        kept = self.kept[first:last].view(-1).view(self.dtype) if self.kept.numel() else None
        other = self.beside[index * rest * _line(width) :] if self.beside.numel() and index < beside else None
        return [
            (start, stop, None if place is None else _rows_of(place, stop - start, last - first))
            for start, stop, place in ((0, in_grad, kept), (in_grad, self.tokens, other))
            if stop > start
        ]


def _rows_of(memory, rows, width):
    return memory[: rows * _line(width)].view(rows, _line(width))[:, :width]


def _operand(x):
    """A layout that products take: one axis without gaps, and no line over another."""
    lines = (x.stride(0) >= x.shape[1] or len(x) <= 1) and x.stride(1) == 1
    columns = (x.stride(1) >= len(x) or x.shape[1] <= 1) and x.stride(0) == 1
    return x if lines or columns else x.contiguous()


def _targets(hidden, weight, labels, count, ignore_index, words):
    targets = _alloc.empty(hidden.shape[:1], torch.int64, hidden.device)
    divisor = _alloc.empty((), torch.int64, hidden.device)
    _amcore.linear_cross_entropy_targets(
        targets, divisor, hidden, weight, labels, count, vocab=words.vocab, ignore_index=ignore_index
    )
    return targets, divisor


def _workspace(hidden):
    return _alloc.workspace(_amcore.linear_cross_entropy_product_workspace(hidden), hidden.device)


def forward(hidden, weight, labels, count, ignore_index, layout, grad_dtype, keep, words):
    """loss, stats [3, T], and the memory of kept logits: weight's gradient and what is beside it."""
    targets, count = _targets(hidden, weight, labels, count, ignore_index, words)
    tokens, device = len(hidden), hidden.device
    stats = words.statistics(tokens, device)
    shape, n_beside = sizes_of(layout, hidden, weight, keep)
    kept, beside = _alloc.empty(shape, grad_dtype, device), _alloc.empty((n_beside,), hidden.dtype, device)
    memory = Memory(Layout(*layout), hidden, weight, kept, beside)
    if any(logits is None for chunk in memory.chunks() for _, _, logits in memory.parts(*chunk)):
        memory.take_scratch(tokens)
    x, w, workspace = _operand(hidden), _operand(weight), _workspace(hidden)
    for first, last in memory.chunks():
        for start, stop, logits in memory.parts(first, last):
            if logits is None:
                logits = memory.in_scratch(tokens, first, last)[start:stop]
            _amcore.linear_cross_entropy_product(logits, workspace, x[start:stop], w[first:last].t(), add=False)
            _amcore.linear_cross_entropy_chunk(
                stats[:, start:stop], logits, targets[start:stop], first=words.first + first
            )
    loss = _alloc.empty((), torch.float32, device)
    own = words.join(stats)
    _amcore.linear_cross_entropy_loss(loss, stats[:, own], targets[own], count, n=own.stop - own.start)
    return loss, stats, kept, beside


def backward(
    dweight, kept, beside, dloss, hidden, weight, labels, count, stats, ignore_index, layout, need_hidden, words
):
    """Writes dweight, unless it is empty, and returns dhidden; `kept` may be dweight's own memory."""
    targets, count = _targets(hidden, weight, labels, count, ignore_index, words)
    tokens, need_weight = len(hidden), dweight.numel() > 0
    memory = Memory(Layout(*layout), hidden, weight, kept, beside)
    memory.take_scratch(tokens)
    dhidden = _alloc.empty(hidden.shape if need_hidden else (0,), hidden.dtype, hidden.device)
    total = _alloc.empty(hidden.shape, torch.float32, hidden.device) if need_hidden else None
    x, w, workspace = _operand(hidden), _operand(weight), _workspace(hidden)
    if need_weight:  # ignored rows may hold NaN; hidden's gradient is written last, so they can be masked in its place
        masked = dhidden if need_hidden else _alloc.empty(hidden.shape, hidden.dtype, hidden.device)
        _amcore.linear_cross_entropy_mask(masked, _rows_contiguous(hidden), targets)
    for first, last in memory.chunks():
        dlogits = memory.in_scratch(tokens, first, last)
        for start, stop, logits in memory.parts(first, last):
            part = dlogits[start:stop]
            if logits is None:
                logits = part
                _amcore.linear_cross_entropy_product(logits, workspace, x[start:stop], w[first:last].t(), add=False)
            _amcore.linear_cross_entropy_grad(
                part, dloss, logits, stats[:, start:stop], targets[start:stop], count, first=words.first + first
            )
        if need_hidden:
            _amcore.linear_cross_entropy_product(total, workspace, dlogits, w[first:last], add=first > 0)
        if need_weight:
            _amcore.linear_cross_entropy_product(dweight[first:last], workspace, dlogits.t(), masked, add=False)
    if not need_hidden:
        return dhidden
    if not len(weight):
        total.zero_()
    total, own = words.add_up(total)
    if total.shape != dhidden.shape:
        dhidden = _alloc.empty(total.shape, hidden.dtype, hidden.device)
    _amcore.linear_cross_entropy_mask(dhidden, total, targets[own])
    return dhidden


def _rows_contiguous(x):
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
