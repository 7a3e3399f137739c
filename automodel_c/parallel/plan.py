"""Who holds which tokens, who computes which attention, and which rows that takes: one step's plan, on the host.

Every rank makes the same plan from the same documents. Nothing here communicates or touches a device.
"""

import contextlib
import functools
import json
import zlib
from importlib import resources

import numpy as np
import torch

from automodel_c import _amcore
from automodel_c.partition import Pack

from . import alarms
from .attention_plan import AttentionPlan
from .exchange import Route
from .straddle import Straddles

LAYOUTS = ("contiguous", "round_robin")
SCHEMES = ("auto", "home", "balanced", "heads")


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
            self.docs.flatten(), self.owners, tokens=self.padded, ranks=self.ranks, heads=1, kv_heads=1, scheme="home",
            causal=True, prices=[0.0] * 4,
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
        """Text: what each rank computes, receives and sends in one attention layer, and why rows migrate, heads are
        split, or everything stays.

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
