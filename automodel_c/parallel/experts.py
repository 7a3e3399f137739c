"""Expert parallelism: each rank of a group holds some of the experts, tokens travel to them and back.

A token travels once to every other rank that holds one of its experts, whatever their number, with its choice and
weights; that rank returns the weighted sum of its experts' outputs, and home adds the ranks' sums in their order.
Gradients take the way back. Counts travel ahead of the rows.
"""

import functools

import numpy as np
import torch
import torch.distributed as dist

from automodel_c.ops import _experts

from . import alarms
from .exchange import Route, before, exchange, exchange_back, exchange_now, place, triples
from .recompute import note, noted


class ExpertParallel:
    """The ranks that share the experts of every layer of a model. `group`: their process group, None for one."""

    def __init__(self, group=None):
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"ep_group must be a process group or None, not {type(group).__name__}")
        self.ranks, self.rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
        if self.rank < 0:
            raise ValueError(f"ep_group: global rank {dist.get_rank()} is not in the group")
        self.group = group if self.ranks > 1 else None

    def __deepcopy__(self, memo):
        return self  # a copy of a model is over the same ranks

    def range(self, experts):
        """(first, end) of the experts that this rank holds."""
        return expert_range(experts, self.ranks, self.rank)


def expert_range(experts, ranks, rank):
    """(first, end) of the experts that `rank` holds: contiguous, what is over goes to the first ranks."""
    each, over = divmod(experts, ranks)
    first = rank * each + min(rank, over)
    return first, first + each + (rank < over)


def moe_over_ranks(
    hidden,
    router_weight,
    gate_up,
    down,
    padding,
    checked,
    group,
    meanwhile=lambda: None,
    need_output=True,
    weight_grads=None,
):
    """`ops.moe` over the experts of all ranks of `group`; every rank calls it, with tokens or without.

    hidden [T, H] and padding are this rank's, router_weight [E, H] is whole, gate_up [e, 2I, H] and down [e, H, I] are
    the e experts of `expert_range`. checked() returns top_k or raises, then on all ranks. Returns ((out [T, H], load
    [E], prob_sum [E], real_rows []) of this rank's tokens, what meanwhile() returned). Gradients of gate_up and down
    are of all ranks' losses. need_output: False as in `ops.moe`, where what comes back is kept and not sent again;
    weight_grads: as there.

    On a GPU everything about the rows but their number is made there; the host waits for that number alone, and gives
    the device `meanwhile` to do before it does. Where activations are made again it does not wait a second time.
    """
    ranks, rank = group.size(), dist.get_rank(group)
    with alarms.everywhere(group):
        top_k = checked()
        first, end = expert_range(len(router_weight), ranks, rank)
        for name, weight in (("gate_up", gate_up), ("down", down)):
            if len(weight) != end - first:
                raise ValueError(
                    f"moe: {name} has {len(weight)} experts; rank {rank} of {ranks} holds {end - first} of"
                    f" {len(router_weight)}"
                )
        weights, chosen, *stats = _experts.route(hidden, router_weight, padding, top_k)
        travel = noted()
        counting = _Counting(chosen, len(router_weight), group) if travel is None else None
        other = meanwhile()
        travel = note(counting.route()) if travel is None else travel
    rows, their_weights, their_chosen = (exchange(x, travel, group) for x in (hidden, weights, chosen))
    with alarms.everywhere(group):
        here = torch.where((their_chosen >= first) & (their_chosen < end), their_chosen - first, -1)
        sums = _experts.experts(rows, gate_up, down, here, their_weights, need_output, weight_grads)
    return (exchange_back(sums, travel, group), *stats), other


class _Counting:
    """Which rows go to the ranks that hold an expert of their choice [T, k], on its way to the host."""

    def __init__(self, chosen, experts, group):
        self.group, self.ranks, self.rank, self.rows = group, group.size(), dist.get_rank(group), len(chosen)
        self.device = chosen.device
        self.goes = _goes(chosen, _holders(experts, self.ranks, self.device), self.ranks)
        sent = self.goes.sum(1)
        arriving = exchange_now(sent, _one_to_each(self.ranks, self.rank), group)
        self.tables = _Places(self.goes, sent, arriving, self.rank) if chosen.is_cuda else None
        self.counts, self.there = _to_host(torch.stack([sent, arriving]))

    def route(self):
        """The Route of the rows; the host waits here for the device to have counted them."""
        if self.there is not None:
            self.there.synchronize()
        count, arriving = self.counts.numpy()
        others = np.arange(self.ranks) != self.rank
        starts = before(arriving)  # of each rank's rows here
        if self.tables is None:
            to, row = np.nonzero(self.goes.numpy())  # by rank, then row
        else:  # a Route reads the tables; these say how many
            to, row = np.repeat(np.arange(self.ranks), count), np.zeros(int(count.sum()), np.int64)
        away = to != self.rank
        sent, own = row[away], row[~away]
        route = Route(
            sends=triples(sent, np.arange(len(sent)), np.ones_like(sent)),
            receipts=triples(*(x[others] for x in (before(arriving * others), starts, arriving))),
            own=triples(own, starts[self.rank] + np.arange(len(own)), np.ones_like(own)),
            send_rows=tuple((count * others).tolist()),
            receive_rows=tuple((arriving * others).tolist()),
            own_after=int((to < self.rank).sum()),
            rows_in=self.rows,
            rows_out=int(arriving.sum()),
            used=True,
            words="rows of experts",
        )
        if self.tables is not None:
            place(route, self.device, *self.tables.of(route))
        return route


def _goes(chosen, holders, ranks):
    """bool [R, T]: whether a row has an expert of each rank among its choice; -1 is none."""
    holder = holders[chosen.long()].t()
    goes = torch.zeros(ranks + 1, len(chosen), dtype=torch.bool, device=chosen.device)
    return goes.scatter_(0, holder, True)[:ranks]


@functools.cache
def _holders(experts, ranks, device):
    """int64 [E + 1]: which rank has each expert, and `ranks`, nobody, for -1."""
    each = [np.subtract(*expert_range(experts, ranks, r)[::-1]) for r in range(ranks)]
    return torch.from_numpy(np.append(np.repeat(np.arange(ranks), each), ranks)).to(device)


def _to_host(counts):
    """(counts on the host, an event after which they are there, or None)."""
    if not counts.is_cuda:
        return counts, None
    host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
    host.copy_(counts, non_blocking=True)
    there = torch.cuda.Event()
    there.record()
    return host, there


class _Places:
    """The tables of a Route (see exchange.h), made where the rows are, from what only the device knows yet. Each has
    room for every row that there may be."""

    def __init__(self, goes, sent, arriving, rank):
        ranks, rows = goes.shape
        numbers = functools.partial(torch.arange, device=goes.device)
        row, others = numbers(rows), numbers(ranks) != rank
        at = goes.cumsum(1) - 1  # of a rank's rows, which one
        first = before(sent * others)
        start = before(arriving)
        nobody = ranks * rows
        slot = torch.where(goes & others[:, None], at + first[:, None], nobody)
        away = row.new_zeros(nobody + 1).scatter_(0, slot.flatten(), row.expand(ranks, rows).flatten())
        own = row.new_zeros(rows + 1).scatter_(0, torch.where(goes[rank], at[rank], rows), row)
        self.sends = _entries(numbers(nobody + 1), away, numbers(nobody + 1))
        self.own = _entries(numbers(rows + 1), own, numbers(rows + 1) + start[rank])
        landed, kept = before(arriving * others), arriving * others
        pad = functools.partial(torch.nn.functional.pad, pad=(0, 1))
        self.receipts = _entries(pad(landed), pad(landed), pad(start), pad(kept))
        self.returns = _entries(pad(landed), pad(start), pad(landed), pad(kept))
        source = torch.where(others[:, None], at + first[:, None], -1 - start[rank] - at)
        begin = torch.nn.functional.pad(goes.sum(0).cumsum(0), (1, 0)) + rows + 1
        order = torch.where(goes, begin[:-1] + goes.cumsum(0) - 1, rows + 1 + nobody)
        self.index = row.new_zeros(rows + 2 + nobody).scatter_(0, order.flatten(), source.flatten())
        self.index[: rows + 1] = begin

    def of(self, route):
        """(there, back) as `exchange.place` takes them: of the rows that there are, since they stay until backward."""
        sent, arriving, own = sum(route.send_rows), sum(route.receive_rows), route.rows_out - sum(route.receive_rows)
        sends, kept = self.sends[: sent + 1].clone(), self.own[: own + 1].clone()
        index = self.index[: route.rows_in + 1 + sent + own].clone()
        return [(sends, sent), (kept, own), (self.receipts, arriving)], [(self.returns, arriving), (index, 0)]


def _entries(first, taken, put, rows=1):
    """int64 [n, 7]: the move of `rows` rows behind `first` others, once."""
    table = first.new_zeros(len(first), 7)
    table[:, 0], table[:, 1], table[:, 2], table[:, 3], table[:, 4] = first, taken, put, rows, 1
    return table


@functools.cache
def _one_to_each(ranks, rank):
    """The Route of row r of every rank's [ranks, ...] to rank r, where they stand by source."""
    src, dst = (x.flatten() for x in np.meshgrid(np.arange(ranks), np.arange(ranks)))
    moves = np.stack([src, dst, dst, src, np.ones_like(src)], axis=1)
    return Route.of(moves, rank, ranks, ranks, ranks, "counts of experts' rows")
