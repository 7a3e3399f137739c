"""Who holds which tokens, who computes which attention, and which rows that takes: one step's plan, on the host.

Every rank makes the same plan from the same documents. Nothing here communicates or touches a device.
"""

import contextlib
import functools
import json
import math
import zlib
from importlib import resources

import numpy as np
import torch

from automodel_c import _amcore
from automodel_c.partition import Pack

from . import alarms
from .exchange import Route
from .straddle import Straddles

LAYOUTS = ("contiguous", "round_robin")
SCHEMES = ("auto", "home", "balanced")


class ContextPlan:
    """One step's tokens over the ranks of a group. Made by `ContextParallel.plan`.

    Attributes:
        docs: int64 [N, 2], start and end of each document in the whole pack. Read-only.
        tokens, padded: length of the token axis, and the same with the padding that makes it divisible.
        ranks, rank, group: the group (None: one rank), and this rank's place in it.
        local: rows that a rank holds, padded // ranks.
        owners: int64 [C], the rank of each of the C equal chunks of the padded axis; a rank's rows are its chunks in
            order.
    """

    def __init__(self, pack, tokens, *, ranks=1, rank=0, group=None, layout="contiguous", scheme="auto", prices=None):
        self.docs, self.tokens, self.ranks, self.rank, self.group = pack.docs, tokens, ranks, rank, group
        self.layout, self.scheme = layout, scheme
        self.prices = prices or measured_prices()
        self.padded = -(-tokens // (2 * ranks)) * 2 * ranks
        self.local = self.padded // ranks
        forward = np.arange(ranks)
        self.owners = forward if layout == "contiguous" else np.concatenate([forward, forward[::-1]])
        self.chunk = self.padded // len(self.owners)
        self._attention, self._in_use = {}, False

    def __repr__(self):
        return (
            f"ContextPlan({len(self.docs)} documents, {self.tokens} tokens and {self.padded - self.tokens} of padding, "
            f"{self.layout} over {self.ranks} ranks, this is rank {self.rank})"
        )

    @functools.cached_property
    def words(self):
        """What the plans of all ranks must agree on."""
        words = f"{len(self.docs)} documents in {self.tokens} tokens, {self.layout}, {self.scheme}"
        prices = repr(vars(self.prices)).encode()
        return f"{words} [{zlib.crc32(prices, zlib.crc32(self.docs)):08x}]"

    def route(self, moves, rows_in, rows_out, what):
        """The `Route` of moves of the whole group. what: words for people."""
        return Route.of(moves, self.rank, self.ranks, rows_in, rows_out, f"{what}, plan of {self.words}")

    def use(self):
        """Lets peers that wait for other rows than this plan's find that out. Told once."""
        if self.group is not None and not self._in_use:
            self._in_use = True
            alarms.pass_by(self.group, f"a plan of {self.words}")

    @functools.cached_property
    def chunk_at(self):
        """int64 [C]: the first local row, at its owner, of each chunk."""
        place = np.empty_like(self.owners)
        for rank in range(self.ranks):
            mine = self.owners == rank
            place[mine] = np.arange(mine.sum()) * self.chunk
        return place

    def chunks_of(self, rank):
        """[(begin, end), ...]: the rows of the padded axis that a rank holds, in its local order."""
        return [(int(c) * self.chunk, (int(c) + 1) * self.chunk) for c in np.flatnonzero(self.owners == rank)]

    def local_row(self, row):
        """Row (array) of the padded axis -> local row at its owner."""
        chunk = row // max(1, self.chunk)
        return self.chunk_at[chunk] + row - chunk * self.chunk

    @functools.cached_property
    def pieces(self):
        """int64 [n, 5]: rank, doc, begin, end, local row: the rows of a document that lie together on a rank.

        By rank and place; documents of length 0 have none. A document goes on at the rank that holds row ``end``.
        """
        home = _amcore.exchange_plan(
            self.docs.flatten(), self.owners, tokens=self.padded, ranks=self.ranks, scheme="home", causal=True,
            prices=[0.0] * 4,
        )[0]  # fmt: skip
        return np.concatenate([home[:, :4], self.local_row(home[:, 2])[:, None]], axis=1)

    @functools.cached_property
    def gather_route(self):
        """Every rank's real rows to every rank, in the order of the pack."""
        begins = np.arange(len(self.owners)) * self.chunk
        rows = np.clip(self.tokens - begins, 0, self.chunk)
        some = rows > 0
        one = np.stack([self.owners, self.owners, self.chunk_at, begins, rows], axis=1)[some]
        moves = np.tile(one, (self.ranks, 1))
        moves[:, 1] = np.repeat(np.arange(self.ranks), len(one))
        return self.route(moves, self.local, self.tokens, "gathered rows")

    @functools.cached_property
    def straddles(self):
        """The `Straddles`: documents that go on from one rank to another."""
        return Straddles(self)

    def attention(self, heads, kv_heads, dim, dtype, *, causal=True):
        """The `AttentionPlan` for q [T, heads, dim] and k, v [T, kv_heads, dim] of a torch dtype; made once."""
        key = heads, kv_heads, dim, dtype, causal
        if key not in self._attention:
            self._attention[key] = AttentionPlan(self, *key)
        return self._attention[key]

    def explain(
        self, heads=32, kv_heads=2, dim=256, dtype=torch.bfloat16, *, causal=True, states=(64, 128, 128),
        channels=12288, width=4,
    ):  # fmt: skip
        """Text: what each rank computes, receives and sends in one attention layer, and why rows migrate or stay.

        Then what one gated delta rule with ``states`` (value heads, key dim, value dim) and the convolution before it,
        ``channels`` and ``width``, send.
        """
        attention = self.attention(heads, kv_heads, dim, dtype, causal=causal).explain()
        return "\n".join([attention, *self.straddles.explain(*states, channels, width, dtype)])


@contextlib.contextmanager
def in_use(plan, name):
    """Around an operator on a plan: what a rank raises there, every rank of the plan's group raises. Where it is no
    plan, nobody knows for which group that was: all that this process exchanges rows in are told."""
    with alarms.everywhere(*([plan.group] if isinstance(plan, ContextPlan) else alarms.groups())):
        if not isinstance(plan, ContextPlan):
            raise TypeError(f"{name}: plan must come from ContextParallel.plan, not {type(plan).__name__}")
        plan.use()
        yield


class AttentionPlan:
    """Tasks of equal cost and the rows that they need. See csrc/exchange/exchange.h for the arrays.

    Attributes:
        tasks: int64 [n, 8]: rank, doc, begin, end, round, query_at, key_at, keys.
        key_moves, query_moves: int64 [m, 5]: src, dst, row at src, row at dst, rows; src == dst moves nothing.
        tried: ((limit, predicted seconds), ...); chosen: index of the one that was taken.
        key_bytes, query_bytes: of one row of keys and values, and of one row of queries (outputs, gradients).
    """

    def __init__(self, plan, heads, kv_heads, dim, dtype, causal):
        self.plan, self.causal, self.shape = plan, causal, (heads, kv_heads, dim, dtype)
        self.key_bytes, self.query_bytes = 2 * kv_heads * dim * dtype.itemsize, heads * dim * dtype.itemsize
        self.tasks, self.key_moves, self.query_moves, self.tried, self.chosen = _amcore.exchange_plan(
            plan.docs.flatten(), plan.owners, tokens=plan.padded, ranks=plan.ranks, scheme=plan.scheme, causal=causal,
            prices=plan.prices.of_attention(heads * dim, dtype, self.query_bytes, self.key_bytes),
        )  # fmt: skip
        moving = self.query_moves[self.query_moves[:, 0] != self.query_moves[:, 1]]
        self.migrated = int(moving[:, 4].sum())
        self.stays = not self.migrated and not self.tasks[:, 4].any()  # queries are read where they are
        self.apart = self.stays and not (self.key_moves[:, 0] != self.key_moves[:, 1]).any()  # and so are keys

    @functools.cached_property
    def mine(self):
        """This rank's tasks, in the order of its query buffer."""
        own = self.tasks[self.tasks[:, 0] == self.plan.rank]
        return own[np.argsort(own[:, 5], kind="stable")]

    @functools.cached_property
    def rounds(self):
        """[(rows, docs, docs_k), ...]: parts of the query buffer, and their documents in it and in the key buffer.

        One at least. With `stays` the query buffer is the local shard itself, with `apart` the key buffer too.
        """
        rounds = []
        for number in range(1 + int(self.mine[:, 4].max(initial=0))):
            tasks = self.mine[self.mine[:, 4] == number]
            begin, length, key_at, keys = tasks[:, 5], tasks[:, 3] - tasks[:, 2], tasks[:, 6], tasks[:, 7]
            rows = int(length.sum())
            if self.stays:
                begin, rows = self.plan.local_row(tasks[:, 2]), self.plan.local
            else:
                begin = begin - begin[:1]
            docs = _pairs(begin, length)
            rounds.append((rows, docs, docs if self.apart else _pairs(key_at, keys)))
        return rounds

    @functools.cached_property
    def keys(self):
        """Route of keys and values from the shards into this rank's key buffer."""
        rows = int((self.mine[:, 6] + self.mine[:, 7]).max(initial=0))
        return self._route(self.key_moves, self.plan.local, rows, "keys and values")

    @functools.cached_property
    def queries(self):
        """Route of queries from the shards into this rank's query buffer."""
        rows = int((self.mine[:, 3] - self.mine[:, 2]).sum())
        return self._route(self.query_moves, self.plan.local, rows, "queries")

    @functools.cached_property
    def outputs(self):
        """Route of outputs from the query buffers home into the shards."""
        home = self.query_moves[:, [1, 0, 3, 2, 4]]
        return self._route(home, self.queries.rows_out, self.plan.local, "outputs")

    def _route(self, moves, rows_in, rows_out, what):
        heads, kv_heads, dim, _ = self.shape
        of = f"{heads} heads over {kv_heads} of dim {dim}{', causal' if self.causal else ''}"
        return self.plan.route(moves, rows_in, rows_out, f"{what} of attention ({of})")

    @functools.cached_property
    def costs(self):
        """float64 [ranks]: scores that each rank computes, of one head."""
        start, stop = self.plan.docs[self.tasks[:, 1]].T.astype(np.float64)
        begin, end = self.tasks[:, 2].astype(np.float64), self.tasks[:, 3].astype(np.float64)
        scores = (end - begin) * ((begin + end + 1) / 2 - start if self.causal else stop - start)
        return np.bincount(self.tasks[:, 0], scores, minlength=self.plan.ranks)

    def traffic(self):
        """{"sent", "received", "messages"}: int64 [ranks], bytes and messages of one forward pass, all exchanges."""
        sent, received, messages = (np.zeros(self.plan.ranks, np.int64) for _ in range(3))
        queries = self.query_moves[:, [0, 1, 4]]
        for moves, row in (
            (self.key_moves[:, [0, 1, 4]], self.key_bytes),
            (queries, self.query_bytes),
            (queries[:, [1, 0, 2]], self.query_bytes),  # outputs come home
        ):
            src, dst, rows = moves[moves[:, 0] != moves[:, 1]].T
            np.add.at(sent, src, rows * row)
            np.add.at(received, dst, rows * row)
            np.add.at(messages, np.unique(src * self.plan.ranks + dst) // self.plan.ranks, 1)
        return {"sent": sent, "received": received, "messages": messages}

    def explain(self):
        """See `ContextPlan.explain`."""
        return explain(self)


def explain(work):
    """The text of `ContextPlan.explain` for an `AttentionPlan`."""
    plan, (heads, kv_heads, dim, dtype) = work.plan, work.shape
    mean = work.costs.mean() or 1.0
    lengths = plan.docs[:, 1] - plan.docs[:, 0]
    lines = [
        f"{len(lengths)} documents, {plan.tokens} tokens (+{plan.padded - plan.tokens} padding), longest "
        f"{lengths.max(initial=0)}; {plan.ranks} ranks hold {plan.local} rows each, {plan.layout}",
        f"attention: {heads} query heads over {kv_heads}, dim {dim}, {str(dtype).removeprefix('torch.')}, "
        f"{'causal' if work.causal else 'not causal'}; scheme {plan.scheme}",
        "rank   cost/mean  tasks  rows away  rows taken     sent MiB  received MiB  messages",
    ]
    moving = work.query_moves[work.query_moves[:, 0] != work.query_moves[:, 1]]
    away, taken = (np.bincount(moving[:, end], moving[:, 4], minlength=plan.ranks) for end in (0, 1))
    tasks, wire = np.bincount(work.tasks[:, 0], minlength=plan.ranks), work.traffic()
    for r in range(plan.ranks):
        lines.append(
            f"{r:4d}   {work.costs[r] / mean:9.3f}  {tasks[r]:5d}  {int(away[r]):9d}  {int(taken[r]):10d}  "
            f"{wire['sent'][r] / 2**20:11.2f}  {wire['received'][r] / 2**20:12.2f}  {wire['messages'][r]:8d}"
        )
    return "\n".join([*lines, *_reasons(work)])


def _reasons(work):
    home = work.plan.scheme != "balanced" and math.isinf(work.tried[0][0])
    words = [
        f"{'home' if math.isinf(limit) else f'{limit:.2f} x mean'} {seconds * 1e3:.3g} ms{' *' * (i == work.chosen)}"
        for i, (limit, seconds) in enumerate(work.tried)
    ]
    yield f"predicted forward and backward: {', '.join(words)}  (prices: {work.plan.prices.source})"
    if work.plan.scheme != "auto":
        yield f"the scheme was forced: {work.migrated} rows migrate"
    elif home and len(work.tried) == 1:
        yield "rows stay home: every rank is within 5 % of the mean as it is"
    elif work.migrated:
        saved = (work.tried[0][1] - work.tried[work.chosen][1]) * 1e3
        yield f"{work.migrated} rows migrate: the time saved exceeds their traffic by {saved:.3g} ms a layer"
    else:
        yield "rows stay home: their traffic would cost more than the time saved"


class Prices:
    """Seconds of a score (one head, one dim, forward and backward), of a byte on the wire, and of a message."""

    def __init__(self, score, byte, message, source="given"):
        self.score, self.byte, self.message, self.source = score, byte, message, source

    def of_attention(self, width, dtype, query_bytes, key_bytes):
        """Of a score, a query row (to and fro, both passes), a key row (both passes), a message, for exchange_plan."""
        name = str(dtype).removeprefix("torch.")
        if name not in self.score:
            raise ValueError(
                f"plan: the prices ({self.source}) have no score of {name}, only of {', '.join(self.score)}"
            )
        score = self.score[name]
        return [score * width, 4 * query_bytes * self.byte, 2 * key_bytes * self.byte, 2 * self.message]


@functools.cache
def measured_prices(name="cpu_gloo"):
    """The `Prices` kept in the package, as `python -m benchmarks.prices` measured them."""
    kept = json.loads((resources.files(__package__) / "prices" / f"{name}.json").read_text())
    return Prices(kept["score"], kept["byte"], kept["message"], f"{name}, {kept['machine']}")


def make_pack(cu_seqlens, doc_ids, tokens):
    """(Pack, tokens) from what a caller gave; ValueError naming what disagrees."""
    if cu_seqlens is not None and doc_ids is not None:
        raise ValueError("plan: give cu_seqlens or doc_ids, not both")
    if cu_seqlens is None and doc_ids is None and tokens is None:
        raise ValueError("plan: give cu_seqlens, doc_ids or tokens")
    if tokens is not None and (isinstance(tokens, bool) or not hasattr(tokens, "__index__")):
        raise TypeError(f"plan: tokens is {tokens!r}, an int is needed")
    if tokens is not None and tokens < 0:
        raise ValueError(f"plan: tokens is {tokens}, it must not be negative")
    if cu_seqlens is None and doc_ids is None:
        cu_seqlens = [0, int(tokens)]
    pack = Pack(cu_seqlens=cu_seqlens, doc_ids=doc_ids)
    if tokens is None:
        tokens = pack.end if pack.tokens is None else pack.tokens
    if pack.tokens is not None and pack.tokens != tokens:
        raise ValueError(f"plan: doc_ids has {pack.tokens} elements, tokens is {tokens}")
    if pack.end > tokens:
        raise ValueError(f"plan: cu_seqlens ends at {pack.end}, tokens is {tokens}")
    return pack, int(tokens)


def _pairs(begin, length):
    return torch.from_numpy(np.stack([begin, begin + length], axis=1).astype(np.int64).flatten())
