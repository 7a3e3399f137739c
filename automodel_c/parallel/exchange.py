"""Rows that travel between the ranks of a group: one differentiable operator for every movement.

A `Route` says which rows of a rank's tensor go where; `exchange` moves them. The C slice packs the rows for each peer
into one buffer and puts the ones that arrived in place, on the CPU or on a GPU; `carry` brings them from every rank to
every other, and none goes on before all are there. The gradient takes the way back: every row's gradients return to
the rank that holds it, and are added there in float32 in the order of ranks.

A message is tagged with what its ranks must agree on: which exchange of the group it is, route, shape of a row, dtype.
"""

import dataclasses
import functools
import zlib

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from automodel_c import _amcore
from automodel_c.ops import _alloc
from automodel_c.ops._library import define
from automodel_c.partition import to_device

from . import alarms
from .carry import carry


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
        sends = [out[:, 2], before(sent), out[:, 4]]
        receipts = [before(arriving), back[:, 3], back[:, 4]]
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
        _check(x, route)
        return _rows(
            _whole_rows(x), route.sends, route.receipts, route.own, route.send_rows, route.receive_rows,
            route.own_after, route.rows_out, route.used, route.runs, group.group_name, route.words,
        )  # fmt: skip


def _check(x, route):
    if x.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"exchange: x is on {x.device}; rows travel between CPUs and between GPUs")
    if x.shape[0] != route.rows_in:
        raise ValueError(f"exchange: x has {x.shape[0]} rows, the route takes {route.rows_in}")


def exchange_now(x, route, group):
    """As `exchange`, but not differentiable, and activation checkpointing neither sees nor keeps it."""
    return _rows_kernel(
        x, route.sends, route.receipts, route.own, route.send_rows, route.receive_rows, route.own_after,
        route.rows_out, route.used, route.runs, group.group_name, route.words,
    )  # fmt: skip


def begin(x, route, group, out=None):
    """Begins what `exchange_now` does; a function that ends it and returns the rows: in ``out``, where that is given,
    whose other rows are left alone."""
    _check(x, route)
    return _begin_rows(
        x, route.sends, route.receipts, route.own, route.send_rows, route.receive_rows, route.own_after,
        route.rows_out, route.used, route.runs, group.group_name, route.words, out=out,
    )  # fmt: skip


def begin_back(x, route, group):
    """As `begin`, of `exchange_back`."""
    return _begin_back(
        x, route.sends, route.receipts, route.own, route.send_rows, route.receive_rows, route.own_after,
        route.rows_in, route.used, route.runs, group.group_name, route.words,
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


def before(counts):
    """What comes before each of an array's or a tensor's counts, in all."""
    return counts.cumsum(0) - counts


def triples(*columns):
    """int64 [3 n] of three columns [n], or [6 n] of six, as `Route` holds them."""
    return torch.from_numpy(np.stack(columns, axis=1).astype(np.int64).flatten())


class _Moves:
    """A Route's rows packed, put in place and added, on the CPU: `sends`, `receipts` and `own` as they are."""

    def __init__(self, sends, receipts, own, own_after, runs):
        self.sends, self.receipts, self.own, self.own_after, self.runs = sends, receipts, own, own_after, runs

    def pack(self, packed, x):
        _amcore.exchange_copy(packed, x, self.sends, reverse=False, runs=self.runs)

    def keep(self, out, x):
        _amcore.exchange_copy(out, x, self.own, reverse=False, runs=self.runs)

    def unpack(self, out, arrived):
        _amcore.exchange_copy(out, arrived, self.receipts, reverse=False, runs=self.runs)

    def pack_back(self, packed, dout):
        _amcore.exchange_copy(packed, dout, self.receipts, reverse=True, runs=self.runs)

    def add(self, dx, arrived, dout):
        _amcore.exchange_sum(
            dx, arrived, dout, self.sends, self.own, own_after=self.own_after, reverse=True, runs=self.runs
        )  # fmt: skip


_placed = WeakTensorKeyDictionary()  # `sends` of a Route -> {(device, way): what `_Tables` placed there}


class _Tables(_Moves):
    """The same on a device, which reads tables that are placed there when either way is first taken."""

    def __init__(self, *moves, device, rows_in, rows_out, sent, received):
        super().__init__(*moves)
        self.device, self.rows_in, self.rows_out, self.sent, self.received = device, rows_in, rows_out, sent, received
        self.kept = _placed.setdefault(self.sends, {})

    @property
    def there(self):
        """(table, rows) of `sends`, `own` and `receipts`."""
        return self._once(self._there)

    @property
    def back(self):
        """(table, rows) of `receipts` in reverse, and (index, 0) of what is added."""
        return self._once(self._back)

    def _once(self, make):
        key = self.device, make.__name__
        if key not in self.kept:
            self.kept[key] = self._placed(make())
        return self.kept[key]

    def _there(self):
        return [
            self._table(self.sends, self.rows_in, self.sent, False),
            self._table(self.own, self.rows_in, self.rows_out, False),
            self._table(self.receipts, self.received, self.rows_out, False),
        ]

    def _back(self):
        index = _amcore.exchange_index(
            self.sends, self.own, own_after=self.own_after, rows_x=self.sent, rows_own=self.rows_out,
            rows_out=self.rows_in, reverse=True, runs=self.runs,
        )  # fmt: skip
        return [self._table(self.receipts, self.rows_out, self.received, True), index]

    def _table(self, moves, rows_x, rows_out, reverse):
        return _amcore.exchange_table(moves, rows_x=rows_x, rows_out=rows_out, reverse=reverse, runs=self.runs)

    def _placed(self, arrays):
        """Beside the rows, by one copy that the host does not wait for; with how many rows a table has."""
        whole = to_device(self.device, *arrays)
        if whole is None:
            whole = torch.from_numpy(np.concatenate([a.ravel() for a in arrays]))
        parts = whole.split([a.size for a in arrays])
        rows = [int(a[-1, 0]) if a.ndim == 2 else 0 for a in arrays]
        return [(part.view(a.shape), n) for part, a, n in zip(parts, arrays, rows, strict=True)]

    def pack(self, packed, x):
        _copy(packed, x, *self.there[0])

    def keep(self, out, x):
        _copy(out, x, *self.there[1])

    def unpack(self, out, arrived):
        _copy(out, arrived, *self.there[2])

    def pack_back(self, packed, dout):
        _copy(packed, dout, *self.back[0])

    def add(self, dx, arrived, dout):
        _amcore.exchange_sum_by(dx, arrived, dout, self.back[1][0])


def _copy(out, x, table, rows):
    _amcore.exchange_copy_by(out, x, table, rows=rows)


def _mover(x, sends, receipts, own, own_after, runs, **sizes):
    moves = sends, receipts, own, own_after, runs
    return _Moves(*moves) if x.device.type == "cpu" else _Tables(*moves, device=x.device, **sizes)


def place(route, device, there, back):
    """Gives a Route tables that were made on a device, as `_Tables` has them: there, of `sends`, `own` and `receipts`;
    back, of `receipts` in reverse, and what is added."""
    _placed[route.sends] = {(device, "_there"): there, (device, "_back"): back}


class _Carried:
    """Rows on their way: those that `pack` puts into a buffer, ``rows_to`` each rank; ``rows_from`` each arrive."""

    def __init__(self, pack, x, rows_to, rows_from, group_name, words, at_once):
        self.packed = _alloc.empty((sum(rows_to), *x.shape[1:]), x.dtype, x.device)
        self.arriving = _alloc.empty((sum(rows_from), *x.shape[1:]), x.dtype, x.device)
        self.messages = sum(n > 0 for n in rows_to)
        pack(self.packed, x)
        self.end = carry(self.packed, self.arriving, rows_to, rows_from, group_name, words, at_once)

    def arrived(self):
        """The rows, by the rank that sent them."""
        self.end()
        wire.sent += self.packed.nbytes
        wire.received += self.arriving.nbytes
        wire.messages += self.messages
        wire.exchanges += 1
        return self.arriving


def _whole_rows(x):
    """``x``, or a copy when its rows have gaps inside: autograd hands out expanded and transposed gradients."""
    step = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if size != 1 and stride != step:
            return x.contiguous()
        step *= size
    return x


def _rows_kernel(*arguments):
    return _begin_rows(*arguments, at_once=True)()


def _begin_rows(
    x, sends, receipts, own, send_rows, receive_rows, own_after, rows_out, used, runs, group, words, at_once=False,
    out=None,
):  # fmt: skip
    given = out is not None
    if not given:
        full = len(receipts) + len(own) and _count(receipts, runs) + _count(own, runs) == rows_out
        out = _alloc.empty((rows_out, *x.shape[1:]), x.dtype, x.device)
        if not full:
            out.zero_()
    mover = _mover(
        x, sends, receipts, own, own_after, runs, rows_in=x.shape[0], rows_out=rows_out, sent=sum(send_rows),
        received=sum(receive_rows),
    )  # fmt: skip
    carried = _Carried(mover.pack, x, send_rows, receive_rows, group, words, at_once) if used else None
    if not given:
        mover.keep(out, x)  # while the others travel

    def end():
        if given:
            mover.keep(out, x)
        if carried:
            mover.unpack(out, carried.arrived())
        return out

    return end


def _count(moves, runs):
    return int((moves[2::6] * moves[3::6] if runs else moves[2::3]).sum())


def _backward_kernel(*arguments):
    return _begin_back(*arguments, at_once=True)()


def _begin_back(
    dout, sends, receipts, own, send_rows, receive_rows, own_after, rows_in, used, runs, group, words, at_once=False
):  # fmt: skip
    dx = _alloc.empty((rows_in, *dout.shape[1:]), dout.dtype, dout.device)
    mover = _mover(
        dout, sends, receipts, own, own_after, runs, rows_in=rows_in, rows_out=dout.shape[0],
        sent=sum(send_rows), received=sum(receive_rows),
    )  # fmt: skip
    words = f"gradients of {words}"
    carried = _Carried(mover.pack_back, dout, receive_rows, send_rows, group, words, at_once) if used else None

    def end():
        mover.add(dx, carried.arrived() if carried else dout[:0], dout)
        return dx

    return end


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
    f"exchange_rows(Tensor x, {_ARGUMENTS}", _rows_kernel, _fake, setup=_setup, backward=_turned(lambda: _backward)
)
_backward = define(
    f"exchange_rows_backward(Tensor dout, {_ARGUMENTS}", _backward_kernel, _fake, setup=_setup,
    backward=_turned(lambda: _rows),
)  # fmt: skip
