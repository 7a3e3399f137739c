"""Attention over ranks where query rows migrate: what a rank can compute from its own shard it computes while rows
travel, in two halves; one while keys and queries come, the other while outputs go home. Backward likewise.
"""

import dataclasses

import numpy as np
import torch

from automodel_c.ops import _alloc
from automodel_c.ops.attention import _run, _run_backward, documents_beside

from .exchange import begin, begin_back
from .recompute import note, noted

SHARE = 0.25  # of the mean cost; with less at home on some rank nothing hides what travels


class Halves:
    """This rank's tasks of an `AttentionPlan`: those at home, whose rows and keys lie together in its shard, in two
    halves of about the same cost, and those of buffers, as `Part`s by round.

    Attributes:
        cut: local row between the halves. home: (docs, docs_k) of each half, from its first row on.
        pays: every rank has enough at home; the same on all ranks.
        keys, queries, outputs, output_gradients, query_gradients: the Routes of the other tasks' rows.
        away: (rows, docs, docs_k) of each round.
    """

    def __init__(self, work):
        self.work, plan = work, work.plan
        at_home, last = self._at_home(work.tasks)
        of_home = np.bincount(work.tasks[at_home, 0], work.task_costs[at_home], minlength=plan.ranks)
        self.pays = bool(of_home.min() >= SHARE * work.costs.mean())
        mine = at_home & (work.tasks[:, 0] == plan.rank)
        self._cut_home(work.tasks[mine], last[mine])
        away = np.flatnonzero(~at_home)
        order = away[np.lexsort(work.tasks[away][:, [1, 4, 0]].T)]  # by rank, round, document
        self._lay_out(work.tasks[order], last[order])
        self._placed = {}

    def _at_home(self, tasks):
        """bool [n], which tasks; int64 [n], one past the last key of each. A document is at home once on a rank."""
        plan, chunk = self.work.plan, max(1, self.work.plan.chunk)
        rank, doc, begin, end = tasks[:, :4].T
        start, stop = plan.docs[doc].T
        last = end if self.work.causal else stop
        piece = begin // chunk
        together = (start // chunk == piece) & ((np.maximum(last, end) - 1) // chunk == piece)
        found = np.flatnonzero(
            together & (begin < end) & (plan.owners[np.minimum(piece, len(plan.owners) - 1)] == rank)
        )
        _, first = np.unique(tasks[found][:, :2], axis=0, return_index=True)
        home = np.zeros(len(tasks), bool)
        home[found[first]] = True
        return home, last

    def _cut_home(self, tasks, last):
        plan, start = self.work.plan, self.work.plan.docs[tasks[:, 1], 0]
        begin, key = plan.local_row(tasks[:, 2]), plan.local_row(start)
        order = np.argsort(begin)
        rows, keys = (tasks[:, 3] - tasks[:, 2])[order], (last - start)[order]
        begin, key = begin[order], key[order]
        costs = np.cumsum(rows * (keys - rows / 2)) if len(order) else np.zeros(0)
        first = 1 + int(np.abs(costs[:-1] - costs[-1] / 2).argmin()) if len(order) > 1 else len(order)
        self.cut = int(key[first - 1] + keys[first - 1]) if first else 0
        self.home = [
            (_pairs(begin[part] - row, rows[part]), _pairs(key[part] - row, keys[part]))
            for part, row in ((slice(first), 0), (slice(first, None), self.cut))
        ]

    def _lay_out(self, tasks, last):
        """Buffers of the tasks of all ranks, which are sorted, and this rank's rounds."""
        plan, work = self.work.plan, self.work
        rank, doc, begin, end, rounds = tasks[:, :5].T
        start = plan.docs[doc, 0]
        query_at, query_rows = _within(rank, end - begin, plan.ranks)
        pairs, of = np.unique(tasks[:, :2], axis=0, return_inverse=True)  # a document's keys lie in a buffer once
        of = of.reshape(-1)
        keys = np.zeros(len(pairs), np.int64)
        np.maximum.at(keys, of, last - start)
        key_at, key_rows = _within(pairs[:, 0], keys, plan.ranks)
        first = plan.docs[pairs[:, 1], 0]
        key_moves, moves = (
            self._moves(pairs[:, 0], first, first + keys, key_at),
            self._moves(rank, begin, end, query_at),
        )
        self.keys = work._route(key_moves, plan.local, int(key_rows[plan.rank]), "keys and values ahead")
        self.queries = work._route(moves, plan.local, int(query_rows[plan.rank]), "queries ahead")
        self.outputs = self.queries.turned(plan.rank, "outputs")
        self.output_gradients, self.query_gradients = (
            dataclasses.replace(route, words=f"gradients of {of.words}")
            for route, of in ((self.queries, self.outputs), (self.outputs, self.queries))
        )
        self.away = []
        for n in np.unique(rounds[rank == plan.rank]):
            some = (rank == plan.rank) & (rounds == n)
            at = query_at[some] - query_at[some][0]
            docs_k = _pairs(key_at[of[some]], (last - start)[some])
            self.away.append((int((end - begin)[some].sum()), _pairs(at, (end - begin)[some]), docs_k))

    def _moves(self, ranks, first, last, at):
        """[m, 5] of ranges of the padded axis into buffers of ranks, cut where the owner may change."""
        plan, moves = self.work.plan, []
        for rank, low, high, to in zip(ranks.tolist(), first.tolist(), last.tolist(), at.tolist(), strict=True):
            for chunk in range(low // plan.chunk, -(-high // plan.chunk)):
                begin, end = max(low, chunk * plan.chunk), min(high, (chunk + 1) * plan.chunk)
                row = int(plan.chunk_at[chunk]) + begin - chunk * plan.chunk
                moves.append((int(plan.owners[chunk]), rank, row, to + begin - low, end - begin))
        return np.array(moves, np.int64).reshape(-1, 5)

    def on_device(self, device):
        """(docs, docs_k, device_docs) of both halves, and of each round; placed there once."""
        if device not in self._placed:
            pairs = [*self.home, *((docs, docs_k) for _, docs, docs_k in self.away)]
            self._placed[device] = [(*pair, documents_beside(device, *pair)) for pair in pairs]
        return self._placed[device]


class _Call:
    """Attention of one set of documents, into a given output; what backward needs is kept."""

    def __init__(self, documents, scale, causal):
        self.options = *documents, scale, causal

    def forward(self, q, k, v, out):
        return _run(q, k, v, *self.options, out)[1:] if len(q) else (q.new_zeros(0), q.new_zeros(0))

    def backward(self, dout, q, k, v, out, lse, lse_low, grads):
        if len(q):
            _run_backward(dout, q, k, v, out, lse, lse_low, *self.options, grads)


class _Ahead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, work, causal, scale):
        kept = noted()
        if kept is None:
            kept = note(_forward(q, k, v, work, causal, scale))
        ctx.work, ctx.options = work, (causal, scale)
        ctx.save_for_backward(q, k, v, *kept)
        return kept[0].view_as(kept[0])

    @staticmethod
    def backward(ctx, dout):
        grads = _backward(dout, ctx.saved_tensors, ctx.work, *ctx.options)
        return *(g if n else None for g, n in zip(grads, ctx.needs_input_grad, strict=False)), None, None, None


def attention_ahead(q, k, v, work, causal, scale):
    """`parallel.attention` of a plan in which query rows migrate and no heads are split; every rank comes here."""
    scale = max(1, q.shape[-1]) ** -0.5 if scale is None else float(scale)
    return _Ahead.apply(q, k, v, work, causal, scale)


def _calls(work, device, scale, causal):
    first, second, *others = (_Call(docs, scale, causal) for docs in work.halves.on_device(device))
    return first, second, others


def _forward(q, k, v, work, causal, scale):
    """out, lse and lse_low of each call, the buffers of queries, of keys and values, and of outputs."""
    halves, group, cut = work.halves, work.plan.group, work.halves.cut
    first, second, others = _calls(work, q.device, scale, causal)
    out = _alloc.empty(q.shape, q.dtype, q.device)
    keys_end = begin(torch.stack((k, v), dim=2), halves.keys, group)
    queries_end = begin(_whole(q), halves.queries, group)
    kept = [*first.forward(q[:cut], k[:cut], v[:cut], out[:cut])]
    there, queries = keys_end(), queries_end()
    made = _alloc.empty(queries.shape, q.dtype, q.device)
    more = []
    for call, rows, result in zip(others, _by_round(halves, queries), _by_round(halves, made), strict=True):
        more += call.forward(rows, there[:, :, 0], there[:, :, 1], result)
    end = begin(made, halves.outputs, group, out)
    kept += second.forward(q[cut:], k[cut:], v[cut:], out[cut:])
    end()
    return out, queries, there, made, *kept, *more


def _backward(dout, saved, work, causal, scale):
    halves, group, cut = work.halves, work.plan.group, work.halves.cut
    q, k, v, out, queries, there, made, *kept = saved
    first, second, others = _calls(work, q.device, scale, causal)
    dout = _whole(dout)
    end = begin(dout, halves.output_gradients, group)
    dq, dk, dv = (_alloc.empty(x.shape, x.dtype, x.device) for x in (q, k, v))
    first.backward(dout[:cut], q[:cut], k[:cut], v[:cut], out[:cut], *kept[:2], (dq[:cut], dk[:cut], dv[:cut]))
    douts, dqueries = end(), _alloc.empty(queries.shape, q.dtype, q.device)
    sums = None
    parts = (_by_round(halves, x) for x in (douts, queries, made, dqueries))
    for n, (call, rows_dout, rows, result, rows_dq) in enumerate(zip(others, *parts, strict=True)):
        dkeys = [_alloc.empty(x.shape, x.dtype, x.device) for x in (there[:, :, 0], there[:, :, 1])]
        lses = kept[4 + 2 * n : 6 + 2 * n]
        call.backward(rows_dout, rows, there[:, :, 0], there[:, :, 1], result, *lses, (rows_dq, *dkeys))
        dkeys = torch.stack(dkeys, dim=2).float()  # summed in float32, rounded once for each way
        sums = dkeys if sums is None else sums.add_(dkeys)
    queries_end = begin(dqueries, halves.query_gradients, group, dq)
    keys_end = begin_back(torch.zeros_like(there) if sums is None else sums.to(there.dtype), halves.keys, group)
    second.backward(dout[cut:], q[cut:], k[cut:], v[cut:], out[cut:], *kept[2:4], (dq[cut:], dk[cut:], dv[cut:]))
    queries_end()
    dkeys = keys_end()
    return dq, *(x.copy_(x.float() + dkeys[:, :, n].float()) for n, x in enumerate((dk, dv)))


def _by_round(halves, x):
    return x.split([rows for rows, _, _ in halves.away])


def _whole(x):
    """``x``, or a copy where its rows have gaps or no copy engine takes it."""
    return x if x.is_contiguous() else x.contiguous()


def _within(rank, rows, ranks):
    """Where each of consecutive ranges begins in its rank's buffer, [n], and how long the buffers are, [ranks]."""
    sizes = np.bincount(rank, rows, minlength=ranks).astype(np.int64)
    before = np.cumsum(sizes) - sizes
    return np.cumsum(rows) - rows - before[rank], sizes


def _pairs(begin, length):
    return torch.from_numpy(np.stack([begin, begin + length], axis=1).astype(np.int64).flatten())
