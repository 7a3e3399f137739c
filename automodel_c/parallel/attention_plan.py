"""Attention of one step's plan over ranks: tasks, the rows that they need, and what is called cheapest."""

import functools
import math
from typing import NamedTuple

import numpy as np
import torch

from automodel_c import _amcore
from automodel_c.ops.attention import documents_beside

from .attention_ahead import Halves


class Part(NamedTuple):
    """Tasks of one call: ``rows`` of ``heads`` in the query buffer, their documents there and in a key section."""

    rows: int
    heads: int
    docs: torch.Tensor  # int64 [2 n]
    section: int
    docs_k: torch.Tensor


class AttentionPlan:
    """Tasks of equal cost and the rows that they need. See csrc/exchange/exchange.h for the arrays.

    Attributes:
        tasks: int64 [n, 10]: rank, doc, begin, end, round, query_at, key_at, keys, head, heads.
        key_moves, query_moves: int64 [m, 7]: src, dst, row at src, place at dst, rows, head, heads; src == dst moves
            nothing. Places, query_at and key_at are counted in heads of rows.
        tried: ((limit, predicted seconds, documents whose heads are split), ...); chosen: index of what was taken.
        key_bytes, query_bytes: of one row of keys and values, and of one row of queries (outputs, gradients).
        migrated: query rows that are computed elsewhere; a row of some heads counts as that share of one.
        split: some rank computes some heads alone. Rows of buffers and routes are single heads then.
    """

    def __init__(self, plan, heads, kv_heads, dim, dtype, causal):
        self.plan, self.causal, self.shape, self._placed = plan, causal, (heads, kv_heads, dim, dtype), {}
        self.key_bytes, self.query_bytes = 2 * kv_heads * dim * dtype.itemsize, heads * dim * dtype.itemsize
        self.tasks, self.key_moves, self.query_moves, self.tried, self.chosen = _amcore.exchange_plan(
            plan.docs.flatten(), plan.owners, tokens=plan.padded, ranks=plan.ranks, heads=heads, kv_heads=kv_heads,
            scheme=plan.scheme, causal=causal,
            prices=plan.prices.of_attention(heads * dim, dtype, self.query_bytes, self.key_bytes),
        )  # fmt: skip
        self.migrated = -(-int(_away(self.query_moves).prod(axis=1).sum()) // heads)
        self.split = bool((self.tasks[:, 9] < heads).any())
        self.stays = not self.migrated and not self.tasks[:, 4].any()  # queries are read where they are
        self.apart = self.stays and not len(_away(self.key_moves))  # and so are keys

    @functools.cached_property
    def halves(self):
        """This rank's `Halves`."""
        return Halves(self)

    @functools.cached_property
    def mine(self):
        """This rank's tasks, in the order of its query buffer."""
        own = self.tasks[self.tasks[:, 0] == self.plan.rank]
        return own[np.argsort(own[:, 5], kind="stable")]

    @functools.cached_property
    def sections(self):
        """[(rows, key heads), ...]: what the key buffer holds one after another; one at least.

        With `apart` the key buffer is the local shard itself.
        """
        heads, kv_heads, *_ = self.shape
        if self.apart:
            return [(self.plan.local, kv_heads)]
        sections = []
        for tasks in self._calls:
            if not sections or tasks[0, 9] < heads:
                sections.append((0, kv_heads if tasks[0, 9] == heads else self._key_heads(tasks[0, 9])))
            if tasks[0, 9] == heads:
                rows = max(sections[0][0], int((tasks[:, 6] // kv_heads + tasks[:, 7]).max()))
                sections[0] = rows, kv_heads
            else:
                sections[-1] = int(tasks[:, 7].sum()), sections[-1][1]
        return sections or [(0, kv_heads)]

    @functools.cached_property
    def parts(self):
        """`Part`s in the order of the query buffer, one at least. With `stays` that is the local shard itself."""
        heads, kv_heads, *_ = self.shape
        parts, section = [], -1
        for tasks in self._calls or [self.mine]:
            some = len(tasks) and tasks[0, 9] < heads
            section += bool(some or section < 0)
            length, wide = tasks[:, 3] - tasks[:, 2], int(tasks[0, 9]) if some else heads
            begin, rows = (tasks[:, 5] - tasks[:1, 5]) // wide, int(length.sum())
            if self.stays:
                begin, rows = self.plan.local_row(tasks[:, 2]), self.plan.local
            key_at = (tasks[:, 6] - tasks[:1, 6]) // self._key_heads(wide) if some else tasks[:, 6] // kv_heads
            docs = _pairs(begin, length)
            parts.append(Part(rows, wide, docs, section, docs if self.apart else _pairs(key_at, tasks[:, 7])))
        return parts

    def on_device(self, device):
        """What `attend` takes as device_docs, of each of `parts`; None on the CPU. Placed there once."""
        if device not in self._placed:
            self._placed[device] = [documents_beside(device, part.docs, part.docs_k) for part in self.parts]
        return self._placed[device]

    @functools.cached_property
    def _calls(self):
        """`mine`, cut where the round or the group of heads is another."""
        kind = self.mine[:, [4, 8, 9]]
        return np.split(self.mine, np.flatnonzero((kind[1:] != kind[:-1]).any(axis=1)) + 1) if len(kind) else []

    def _key_heads(self, heads):
        """How many key heads a group of query heads reads."""
        return -(-int(heads) * self.shape[1] // self.shape[0])

    @functools.cached_property
    def keys(self):
        """Route of keys and values from the shards into this rank's key buffer."""
        rows = sum(rows * (heads if self.split else 1) for rows, heads in self.sections)
        return self._route(self._moves(self.key_moves, self.shape[1]), self._held(1), rows, "keys and values")

    @functools.cached_property
    def queries(self):
        """Route of queries from the shards into this rank's query buffer."""
        rows = (self.mine[:, 3] - self.mine[:, 2]) * (self.mine[:, 9] if self.split else 1)
        moves = self._moves(self.query_moves, self.shape[0])
        return self._route(moves, self._held(0), int(rows.sum()), "queries")

    @functools.cached_property
    def outputs(self):
        """Route of outputs from the query buffers home into the shards."""
        return self.queries.turned(self.plan.rank, "outputs")

    def _held(self, of_keys):
        return self.plan.local * (self.shape[of_keys] if self.split else 1)

    def _moves(self, moves, heads):
        """As `Route.of` takes them: of rows, or with `split` of heads of rows, in runs."""
        src, dst, begin, to, rows, head, some = moves.T
        if not self.split:
            return np.stack([src, dst, begin, to // heads, rows], axis=1)
        return np.stack([src, dst, begin * heads + head, to, some, rows, np.full_like(src, heads), some], axis=1)

    def _route(self, moves, rows_in, rows_out, what):
        heads, kv_heads, dim, _ = self.shape
        of = f"{heads} heads over {kv_heads} of dim {dim}{', causal' if self.causal else ''}"
        return self.plan.route(moves, rows_in, rows_out, f"{what} of attention ({of})")

    @functools.cached_property
    def task_costs(self):
        """float64 [n]: scores of each task, of one head; of some heads their share."""
        start, stop = self.plan.docs[self.tasks[:, 1]].T.astype(np.float64)
        begin, end = self.tasks[:, 2].astype(np.float64), self.tasks[:, 3].astype(np.float64)
        scores = (end - begin) * ((begin + end + 1) / 2 - start if self.causal else stop - start)
        return scores * self.tasks[:, 9] / self.shape[0]

    @functools.cached_property
    def costs(self):
        """float64 [ranks]: `task_costs` of each rank."""
        return np.bincount(self.tasks[:, 0], self.task_costs, minlength=self.plan.ranks)

    def traffic(self):
        """{"sent", "received", "messages"}: int64 [ranks], bytes and messages of one forward pass, all exchanges."""
        sent, received, messages = (np.zeros(self.plan.ranks, np.int64) for _ in range(3))
        heads, kv_heads, *_ = self.shape
        for moves, head_bytes, back in (
            (self.key_moves, self.key_bytes // kv_heads, False),
            (self.query_moves, self.query_bytes // heads, False),
            (self.query_moves, self.query_bytes // heads, True),  # outputs come home
        ):
            moves = moves[moves[:, 0] != moves[:, 1]]
            src, dst = moves[:, [1, 0] if back else [0, 1]].T
            size = moves[:, 4] * moves[:, 6] * head_bytes
            np.add.at(sent, src, size)
            np.add.at(received, dst, size)
            np.add.at(messages, np.unique(src * self.plan.ranks + dst) // self.plan.ranks, 1)
        return {"sent": sent, "received": received, "messages": messages}

    def explain(self):
        """See `ContextPlan.explain`."""
        plan, (heads, kv_heads, dim, dtype) = self.plan, self.shape
        mean = self.costs.mean() or 1.0
        lengths = plan.docs[:, 1] - plan.docs[:, 0]
        lines = [
            f"{len(lengths)} documents, {plan.tokens} tokens (+{plan.padded - plan.tokens} padding), longest "
            f"{lengths.max(initial=0)}; {plan.ranks} ranks hold {plan.local} rows each, {plan.layout}",
            f"attention: {heads} query heads over {kv_heads}, dim {dim}, {str(dtype).removeprefix('torch.')}, "
            f"{'causal' if self.causal else 'not causal'}; scheme {plan.scheme}",
            "rank   cost/mean  tasks  rows away  rows taken     sent MiB  received MiB  messages",
        ]
        moving, rows = self.query_moves[self.query_moves[:, 0] != self.query_moves[:, 1]], _away(self.query_moves)
        away, taken = (np.bincount(moving[:, end], rows.prod(axis=1) / heads, plan.ranks).round() for end in (0, 1))
        tasks, wire = np.bincount(self.tasks[:, 0], minlength=plan.ranks), self.traffic()
        for r in range(plan.ranks):
            lines.append(
                f"{r:4d}   {self.costs[r] / mean:9.3f}  {tasks[r]:5d}  {int(away[r]):9d}  {int(taken[r]):10d}  "
                f"{wire['sent'][r] / 2**20:11.2f}  {wire['received'][r] / 2**20:12.2f}  {wire['messages'][r]:8d}"
            )
        return "\n".join([*lines, *self._reasons()])

    def _reasons(self):
        yield f"predicted forward and backward  (prices: {self.plan.prices.source}):"
        for split in dict.fromkeys(n for *_, n in self.tried):
            words = [
                f"{'home' if math.isinf(limit) else f'{limit:.2f} x mean'} {seconds * 1e3:.3g} ms"
                f"{' *' * (i == self.chosen)}"
                for i, (limit, seconds, n) in enumerate(self.tried)
                if n == split
            ]
            name = f"heads of {split} document{'s' * (split > 1)} split, other rows" if split else "rows"
            yield f"  {name}: {', '.join(words)}"
        yield self._reason()

    def _reason(self):
        _, seconds, split = self.tried[self.chosen]
        of = f"heads of {split} document{'s' * (split > 1)} are split, {self.migrated} rows' worth of queries travel"
        what = of if split else f"{self.migrated} rows migrate"
        if self.plan.scheme != "auto":
            return f"the scheme was forced: {what}"
        if len(self.tried) == 1:
            return "rows stay home: every rank is within 5 % of the mean as it is"
        if self.migrated:
            saved = (self.tried[0][1] - seconds) * 1e3
            return f"{what}: the time saved exceeds their traffic by {saved:.3g} ms a layer"
        return "rows stay home: their traffic would cost more than the time saved"


def _away(moves):
    """[m, 2]: rows and heads of the moves from one rank to another."""
    return moves[moves[:, 0] != moves[:, 1]][:, [4, 6]]


def _pairs(begin, length):
    return torch.from_numpy(np.stack([begin, begin + length], axis=1).astype(np.int64).flatten())
