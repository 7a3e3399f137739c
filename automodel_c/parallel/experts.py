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
from .exchange import Route, exchange, exchange_back, triples


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


def moe_over_ranks(hidden, router_weight, gate_up, down, padding, checked, group):
    """`ops.moe` over the experts of all ranks of `group`; every rank calls it, with tokens or without.

    hidden [T, H] and padding are this rank's, router_weight [E, H] is whole, gate_up [e, 2I, H] and down [e, H, I] are
    the e experts of `expert_range`. checked() returns top_k or raises, then on all ranks. Returns (out [T, H], load
    [E], prob_sum [E], real_rows []) of this rank's tokens. Gradients of gate_up and down are of all ranks' losses.
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
        travel = _travel(chosen, len(router_weight), group)
    rows, their_weights, their_chosen = (exchange(x, travel, group) for x in (hidden, weights, chosen))
    with alarms.everywhere(group):
        here = torch.where((their_chosen >= first) & (their_chosen < end), their_chosen - first, -1)
        sums = _experts.experts(rows, gate_up, down, here, their_weights)
    return exchange_back(sums, travel, group), *stats


def _travel(chosen, experts, group):
    """The Route of each row to the ranks that hold an expert of its choice [T, k]."""
    ranks, rank = group.size(), dist.get_rank(group)
    holder = np.repeat(np.arange(ranks), [np.subtract(*expert_range(experts, ranks, r)[::-1]) for r in range(ranks)])
    picks = chosen.cpu().numpy()  # the host waits here for the device: it counts the rows
    goes = np.zeros((ranks, len(picks)), dtype=bool)
    token, slot = np.nonzero(picks >= 0)
    goes[holder[picks[token, slot]], token] = True
    to, row = np.nonzero(goes)  # by rank, then row
    count = goes.sum(1)
    arriving = exchange(torch.from_numpy(count), _one_to_each(ranks, rank), group).numpy()
    starts = np.cumsum(arriving) - arriving  # of each rank's rows here
    away, others = to != rank, np.arange(ranks) != rank
    ones, own = np.ones_like(row), np.flatnonzero(~away)
    return Route(
        sends=triples(row[away], np.arange(away.sum()), ones[away]),
        receipts=triples(*(x[others] for x in (np.cumsum(arriving * others) - arriving * others, starts, arriving))),
        own=triples(row[own], starts[rank] + np.arange(len(own)), ones[own]),
        send_rows=tuple((count * others).tolist()),
        receive_rows=tuple((arriving * others).tolist()),
        own_after=int((to < rank).sum()),
        rows_in=len(picks),
        rows_out=int(arriving.sum()),
        used=True,
        words="rows of experts",
    )


@functools.cache
def _one_to_each(ranks, rank):
    """The Route of row r of every rank's [ranks, ...] to rank r, where they stand by source."""
    src, dst = (x.flatten() for x in np.meshgrid(np.arange(ranks), np.arange(ranks)))
    moves = np.stack([src, dst, dst, src, np.ones_like(src)], axis=1)
    return Route.of(moves, rank, ranks, ranks, ranks, "counts of experts' rows")
