"""Rows that travel between the ranks of a group: one differentiable operator for every movement.

A `Route` says which rows of a rank's tensor go where; `exchange` moves them. The C slice packs the rows for each peer
into one buffer and puts the ones that arrived in place; gloo carries one message from every rank to every other, empty
ones too, so that none goes on before all are there. The gradient takes the way back: every row's gradients return to
the rank that holds it, and are added there in float32 in the order of ranks.

A message is tagged with what its ranks must agree on: which exchange of the group it is, route, shape of a row, dtype.
"""

import dataclasses
import functools
import zlib

import numpy as np
import torch
from torch.distributed.distributed_c10d import _resolve_process_group

from automodel_c import _amcore
from automodel_c.ops import _alloc
from automodel_c.ops._library import define

from . import alarms


@dataclasses.dataclass
class Wire:
    """What this process sent and received through `exchange` so far."""

    sent: int = 0  # bytes
    received: int = 0  # bytes
    messages: int = 0  # peers that something was sent to
    exchanges: int = 0  # collectives


wire = Wire()


@dataclasses.dataclass(frozen=True, eq=False)
class Route:
    """One rank's part of a movement of rows, from a tensor of ``rows_in`` rows into one of ``rows_out``.

    ``sends``, ``receipts``, ``own``: int64 [3 n] host tensors of (row taken, row put, rows), with ``runs`` [6 n]: and
    how often, steps between the rows taken and between those put. Into the buffer that is sent, by destination; out of
    the buffer that arrives, by source; and from the rank to itself.
    """

    sends: torch.Tensor
    receipts: torch.Tensor
    own: torch.Tensor
    send_rows: tuple[int, ...]  # rows for each rank
    receive_rows: tuple[int, ...]  # rows from each rank
    own_after: int  # how many of `sends` go to lower ranks
    rows_in: int
    rows_out: int
    used: bool  # some rank of the group sends something
    words: str  # what it is, for people, and a digest of the whole group's moves
    runs: bool = False

    @classmethod
    def of(cls, moves, rank, ranks, rows_in, rows_out, words="rows"):
        """``moves``: int64 [M, 5] of the whole group, the same on every rank: (src, dst, row at src, row at dst, rows).

        Rows with src == dst stay on their rank. No two moves put into the same row of a rank. ``words`` say what moves,
        and are the same on every rank too. [M, 8]: and how often, and the steps at src and at dst.
        """
        src, dst = moves[:, 0], moves[:, 1]
        out, back = moves[(src == rank) & (dst != rank)], moves[(dst == rank) & (src != rank)]
        out, back = (part[np.argsort(part[:, peer], kind="stable")] for part, peer in ((out, 1), (back, 0)))
        runs = moves.shape[1] == 8
        sent, arriving = (m[:, 4] * m[:, 5] if runs else m[:, 4] for m in (out, back))
        sends = [out[:, 2], _starts(sent), out[:, 4]]
        receipts = [_starts(arriving), back[:, 3], back[:, 4]]
        if runs:  # side by side on the wire
            sends += [out[:, 5], out[:, 6], out[:, 4]]
            receipts += [back[:, 5], back[:, 4], back[:, 7]]
        count = functools.partial(np.bincount, minlength=ranks)
        return cls(
            sends=triples(*sends),
            receipts=triples(*receipts),
            own=triples(*moves[(src == rank) & (dst == rank)][:, 2:].T),
            send_rows=tuple(count(out[:, 1], sent).astype(np.int64).tolist()),
            receive_rows=tuple(count(back[:, 0], arriving).astype(np.int64).tolist()),
            own_after=int((out[:, 1] < rank).sum()),
            rows_in=rows_in,
            rows_out=rows_out,
            used=bool((src != dst).any()),
            words=f"{words} [route {zlib.crc32(np.ascontiguousarray(moves)):08x}]",
            runs=runs,
        )

    def turned(self, rank, words):
        """The Route of rows back to where they came from, where each went to one place."""
        order = [1, 0, 2, 3, 5, 4] if self.runs else [1, 0, 2]
        sends, receipts, own = (m.view(-1, len(order))[:, order] for m in (self.receipts, self.sends, self.own))
        return dataclasses.replace(
            self,
            sends=sends.flatten(),
            receipts=receipts.flatten(),
            own=own.flatten(),
            send_rows=self.receive_rows,
            receive_rows=self.send_rows,
            own_after=int((sends[:, 1] < sum(self.receive_rows[:rank])).sum()),
            rows_in=self.rows_out,
            rows_out=self.rows_in,
            words=f"{words}, back along {self.words}",
        )


def exchange(x, route, group):
    """The rows of every rank's ``x`` [rows_in, ...], moved along ``route`` -> [rows_out, ...].

    Every rank of ``group`` calls it, with rows or without. Rows that nothing is put into are 0. Differentiable for
    float32, bfloat16 and float64; any dtype moves.

    Where ranks disagree about the route, the shape of a row or the dtype, every rank raises `RankFailure` within
    seconds. What one rank raises here, every rank raises.
    """
    with alarms.everywhere(group):
        if x.device.type != "cpu":
            raise NotImplementedError(f"exchange: x is on {x.device}; so far rows travel between CPUs alone, by gloo")
        if x.shape[0] != route.rows_in:
            raise ValueError(f"exchange: x has {x.shape[0]} rows, the route takes {route.rows_in}")
        return _rows(
            _whole_rows(x), route.sends, route.receipts, route.own, route.send_rows, route.receive_rows,
            route.own_after, route.rows_out, route.used, route.runs, group.group_name, route.words,
        )  # fmt: skip


def exchange_back(x, route, group):
    """The way back of `exchange`: x [rows_out, ...] -> [rows_in, ...], each row the sum over the places it went to.

    Sums are float32, in the order of ranks; rows that went nowhere are 0. Its gradient travels as `exchange` does.
    """
    with alarms.everywhere(group):
        if x.shape[0] != route.rows_out:
            raise ValueError(f"exchange_back: x has {x.shape[0]} rows, the route brought {route.rows_out}")
        return _backward(
            _whole_rows(x), route.sends, route.receipts, route.own, route.send_rows, route.receive_rows,
            route.own_after, route.rows_in, route.used, route.runs, group.group_name, route.words,
        )  # fmt: skip


def _starts(rows):
    return np.cumsum(rows) - rows


def triples(*columns):
    """int64 [3 n] of three columns [n], or [6 n] of six, as `Route` holds them."""
    return torch.from_numpy(np.stack(columns, axis=1).astype(np.int64).flatten())


class _Carried:
    """Rows on their way: those of ``x`` that ``moves`` pack, ``rows_to`` each rank; ``rows_from`` each arrive."""

    def __init__(self, x, moves, reverse, rows_to, rows_from, runs, group_name, words):
        self.packed = _alloc.empty((sum(rows_to), *x.shape[1:]), x.dtype, x.device)
        self.arriving = _alloc.empty((sum(rows_from), *x.shape[1:]), x.dtype, x.device)
        self.messages = sum(n > 0 for n in rows_to)
        _amcore.exchange_copy(self.packed, x, moves, reverse=reverse, runs=runs)
        row = x.dtype.itemsize * x.shape[1:].numel()
        incoming, outgoing = (
            _bytes(buffer).split([n * row for n in rows])
            for buffer, rows in ((self.arriving, rows_from), (self.packed, rows_to))
        )
        group = _resolve_process_group(group_name)
        self.exchange = alarms.enter(group, f"{words}, rows {list(x.shape[1:])} of {x.dtype}")
        self.done = alarms.start(functools.partial(_post, group, incoming, outgoing, self.exchange.tag))

    def arrived(self):
        """Waits; the rows, by the rank that sent them."""
        alarms.wait(self.done, self.exchange)
        wire.sent += self.packed.nbytes
        wire.received += self.arriving.nbytes
        wire.messages += self.messages
        wire.exchanges += 1
        return self.arriving


def _post(group, incoming, outgoing, tag):
    """Receives and sends the buffers of all peers, nearest ranks first."""
    rank, ranks = group.rank(), group.size()
    before, after = ([(rank + step * n) % ranks for n in range(1, ranks)] for step in (-1, 1))
    works = [group.recv([incoming[peer]], peer, tag) for peer in before]
    return [group.send([outgoing[peer]], peer, tag) for peer in after] + works


def _bytes(x):
    return x.flatten().view(torch.uint8)


def _whole_rows(x):
    """``x``, or a copy when its rows have gaps inside: autograd hands out expanded and transposed gradients."""
    step = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if size != 1 and stride != step:
            return x.contiguous()
        step *= size
    return x


def _rows_cpu(x, sends, receipts, own, send_rows, receive_rows, own_after, rows_out, used, runs, group, words):
    full = len(receipts) + len(own) and _count(receipts, runs) + _count(own, runs) == rows_out
    out = _alloc.empty((rows_out, *x.shape[1:]), x.dtype, x.device)
    if not full:
        out.zero_()
    carried = _Carried(x, sends, False, send_rows, receive_rows, runs, group, words) if used else None
    _amcore.exchange_copy(out, x, own, reverse=False, runs=runs)  # while the others travel
    if carried:
        _amcore.exchange_copy(out, carried.arrived(), receipts, reverse=False, runs=runs)
    return out


def _count(moves, runs):
    return int((moves[2::6] * moves[3::6] if runs else moves[2::3]).sum())


def _backward_cpu(dout, sends, receipts, own, send_rows, receive_rows, own_after, rows_in, used, runs, group, words):
    dx = _alloc.empty((rows_in, *dout.shape[1:]), dout.dtype, dout.device)
    words = f"gradients of {words}"
    carried = _Carried(dout, receipts, True, receive_rows, send_rows, runs, group, words) if used else None
    arrived = carried.arrived() if carried else dout[:0]
    _amcore.exchange_sum(dx, arrived, dout, sends, own, own_after=own_after, reverse=True, runs=runs)
    return dx


def _setup(ctx, inputs, output):
    x, sends, receipts, own, ctx.send_rows, ctx.receive_rows, ctx.own_after, _, ctx.used, *rest = inputs
    ctx.runs, ctx.group, ctx.words = rest
    ctx.rows_in = x.shape[0]
    ctx.save_for_backward(sends, receipts, own)


def _turned(other):
    """The derivative of one direction is the other."""

    def derivative(ctx, dout):
        dx = other()(
            _whole_rows(dout), *ctx.saved_tensors, ctx.send_rows, ctx.receive_rows, ctx.own_after, ctx.rows_in,
            ctx.used, ctx.runs, ctx.group, ctx.words,
        )  # fmt: skip
        return dx, *(None,) * 11

    return derivative


def _fake(x, sends, receipts, own, send_rows, receive_rows, own_after, rows, used, runs, group, words):
    return x.new_empty((rows, *x.shape[1:]))


_ARGUMENTS = (
    "Tensor sends, Tensor receipts, Tensor own, int[] send_rows, int[] receive_rows, int own_after, "
    "int rows, bool used, bool runs, str group, str words) -> Tensor"
)
_rows = define(
    f"exchange_rows(Tensor x, {_ARGUMENTS}", _rows_cpu, _fake, setup=_setup, backward=_turned(lambda: _backward)
)
_backward = define(
    f"exchange_rows_backward(Tensor dout, {_ARGUMENTS}", _backward_cpu, _fake, setup=_setup,
    backward=_turned(lambda: _rows),
)  # fmt: skip
