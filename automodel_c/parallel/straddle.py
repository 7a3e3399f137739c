"""Documents that go on from one rank to the next, and what must go with them: states and halo rows, on the host.

A span is a run of rows that one rank holds without a gap in the pack. Everything here is about spans, so that a rank
may hold several (``layout="round_robin"``).
"""

import dataclasses
import functools

import numpy as np
import torch

from automodel_c.partition import Pack, to_device


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Consecutive rows of a rank: one document's piece that came into a span or goes on from it, or what is between.

    ``sources``: the spans before this one that hold rows of the piece's document; empty where nothing came in.
    """

    rows: int
    docs: np.ndarray  # int64 [n, 2], inside the part
    came: bool = False
    goes: bool = False
    sources: range = range(0)

    @functools.cached_property
    def pack(self):
        return make_pack(self.docs, self.rows)

    def pack_on(self, device):
        """`pack` for operators on a device; placed there once."""
        return _kept_on(device, self.pack, self._packs)

    @functools.cached_property
    def _packs(self):
        return {}


class Straddles:
    """What crosses the edges of the spans of a `ContextPlan`.

    Attributes:
        owner, begin, end, row: int64 [S], each span's rank, its rows of the padded axis, and its first local row.
        crossing: int64 [S + 1], the document that goes on over the edge before each span (and after the last), or -1.
        any: some document straddles.
    """

    def __init__(self, plan):
        self.plan = plan
        first = np.flatnonzero(np.diff(plan.owners, prepend=-1))
        edges = np.append(first, len(plan.owners)) * plan.chunk
        self.owner, self.begin, self.end, self.row = plan.owners[first], edges[:-1], edges[1:], plan.chunk_at[first]
        starts, stops = np.append(plan.docs[:, 0], plan.padded), plan.docs[:, 1]
        over = np.searchsorted(stops, edges, side="right")
        self.crossing = np.where(starts[over] < edges, over, -1)
        self.any = bool((self.crossing >= 0).any())
        self._states, self._halos, self._packs, self._came = {}, {}, {}, {}

    @functools.cached_property
    def came(self):
        """bool [S]: the span's first row goes on with a document."""
        return self.crossing[:-1] >= 0

    @functools.cached_property
    def goes(self):
        """bool [S]: the document of the span's last row goes on after it."""
        return self.crossing[1:] >= 0

    @functools.cached_property
    def through(self):
        """bool [S]: one document came in and goes on, and is all that the span holds."""
        return self.came & (self.crossing[:-1] == self.crossing[1:])

    @functools.cached_property
    def edge_rows(self):
        """int64 [S], [S]: the rows of each span whose document came in, and those whose document goes on."""
        docs = self.plan.docs
        if not len(docs):
            return np.zeros((2, len(self.owner)), np.int64)
        ends, starts = docs[self.crossing[:-1], 1], docs[self.crossing[1:], 0]
        came = np.where(self.came, np.minimum(self.end, ends) - self.begin, 0)
        return came, np.where(self.goes, self.end - np.maximum(self.begin, starts), 0)

    @functools.cached_property
    def sources(self):
        """[S] ranges of spans: those that hold earlier rows of the document that came into each."""
        found = []
        for span, came in enumerate(self.came):
            first = found[-1].start if came and self.through[span - 1] else span - 1
            found.append(range(first, span) if came else range(0))
        return found

    @functools.cached_property
    def parts(self):
        """This rank's `Part`s in the order of its rows, and its anchor."""
        parts = []
        for span in np.flatnonzero(self.owner == self.plan.rank):
            parts += self._parts_of(int(span))
        return parts + self._anchor(parts)

    def _parts_of(self, span):
        begin, end, docs = int(self.begin[span]), int(self.end[span]), self.plan.docs
        came, goes, sources = bool(self.came[span]), bool(self.goes[span]), self.sources[span]
        head = min(end, int(docs[self.crossing[span], 1])) if came else begin
        tail = max(head, int(docs[self.crossing[span + 1], 0])) if goes else end
        parts = []
        if head > begin:
            whole = np.array([[0, head - begin]])
            parts.append(Part(head - begin, whole, came=True, goes=bool(self.through[span]), sources=sources))
        if tail > head:
            inner = docs[(docs[:, 0] >= head) & (docs[:, 1] <= tail) & (docs[:, 0] < docs[:, 1])]
            parts.append(Part(tail - head, inner - head))
        if end > tail:
            parts.append(Part(end - tail, np.array([[0, end - tail]]), goes=True))
        return parts

    def _anchor(self, parts):
        """A part without rows where nothing is sent or received, so that every rank's graph has the exchange in it."""
        came, goes = any(p.came for p in parts), any(p.goes for p in parts)
        return [] if came and goes else [Part(0, np.zeros((0, 2), np.int64), came=not came, goes=not goes)]

    @functools.cached_property
    def pieces(self):
        """(docs, came): int64 [n, 2] local rows of every document's piece here, and which of them came in, [m]."""
        rank, doc, begin, end, row = self.plan.pieces.T
        mine = rank == self.plan.rank
        came = begin > self.plan.docs[doc, 0]
        return np.stack([row, row + end - begin], axis=1)[mine], np.flatnonzero(came[mine])

    def pack(self, rows, device=None):
        """`Pack` of the local pieces in a tensor of so many rows (`local`; one rank may leave out the padding), for
        operators on a device."""
        if rows not in self._packs:
            self._packs[rows] = make_pack(self.pieces[0], rows), {}
        return _kept_on(device, *self._packs[rows])

    def came_on(self, device):
        """Which of the documents of `pack` came in, int64 [m] on a device; placed there once."""
        if device not in self._came:
            came = self.pieces[1]
            placed = to_device(device, came)
            self._came[device] = torch.from_numpy(came) if placed is None else placed
        return self._came[device]

    def states(self, key_dim, value_dim):
        """The `States` of a gated delta rule; made once."""
        key = key_dim, value_dim
        if key not in self._states:
            self._states[key] = States(self, *key)
        return self._states[key]

    def halo(self, width):
        """The `Halo` of a convolution of that width; made once."""
        if width not in self._halos:
            self._halos[width] = Halo(self, width)
        return self._halos[width]

    def explain(self, value_heads, key_dim, value_dim, channels, width, dtype):
        """Lines of `ContextPlan.explain`."""
        if not self.any:
            yield "no document goes on from one rank to another: gated delta rule and convolution send nothing"
            return
        states, halo = self.states(key_dim, value_dim), self.halo(width)
        documents, edges = len(np.unique(self.crossing)) - 1, int(self.came.sum())
        yield f"documents that go on to another rank: {documents}, over {edges} edges; one forward pass:"
        for name, traffic in (
            (f"gated delta rule, {value_heads} heads of {key_dim} x {value_dim}", states.traffic(value_heads)),
            (f"convolution of {channels} channels, width {width}", halo.traffic(channels, dtype)),
        ):
            sent, received = (traffic[key] / 2**20 for key in ("sent", "received"))
            yield (
                f"  {name}: {int(traffic['messages'].sum())} messages, {sent.sum():.3f} MiB; "
                f"a rank sends at most {sent.max():.3f}, receives at most {received.max():.3f}"
            )


class States:
    """Which states go where. A row is one column of a state or of a transition, [Hv, Dk] float32.

    A span that a document starts in sends its state, value_dim rows; one that it goes through sends the state it adds
    and its transition, value_dim + key_dim rows; each to every later rank of the document, once.

    Attributes:
        moves: int64 [m, 5] of the whole group: src, dst, row at src, row at dst, rows.
        route: this rank's part. sizes: rows of each block that arrives. blocks: {span: (state, transition or None)},
            indices into `sizes`.
    """

    def __init__(self, straddles, key_dim, value_dim):
        plan, owner = straddles.plan, straddles.owner
        self.ranks, self.key_dim = plan.ranks, key_dim
        rows = straddles.goes * value_dim + straddles.through * key_dim
        sent = np.zeros(plan.ranks, np.int64)
        at = []
        for span, rank in enumerate(owner):
            at.append(int(sent[rank]))
            sent[rank] += rows[span]
        moves, received = [], [0] * plan.ranks
        self.sizes, self.blocks = [], {}
        for rank in range(plan.ranks):
            needed = {s for span in np.flatnonzero(owner == rank) for s in straddles.sources[span]}
            for span in sorted(needed):
                moves.append((owner[span], rank, at[span], received[rank], rows[span]))
                received[rank] += int(rows[span])
                if rank == plan.rank:
                    self._add_block(span, bool(straddles.through[span]), value_dim)
        self.moves = np.array(moves, np.int64).reshape(-1, 5)
        what = f"states of a gated delta rule ({key_dim} x {value_dim})"
        self.route = plan.route(self.moves, int(sent[plan.rank]), received[plan.rank], what)

    def _add_block(self, span, through, value_dim):
        n = len(self.sizes)
        self.sizes += [value_dim, self.key_dim] if through else [value_dim]
        self.blocks[span] = (n, n + 1 if through else None)

    def traffic(self, value_heads):
        """{"sent", "received", "messages"}: int64 [ranks], bytes and messages of one forward pass."""
        return traffic(self.moves, 4 * value_heads * self.key_dim, self.ranks)


class Halo:
    """The rows before each piece that came into a span, inside its document: width - 1 or as many as there are.

    ``route`` puts them into this rank's [pieces that came * (width - 1), C], newest last; the rest is 0.
    """

    def __init__(self, straddles, width):
        plan, reach = straddles.plan, width - 1
        self.ranks = plan.ranks
        moves, received = [], [0] * plan.ranks
        for span in np.flatnonzero(straddles.came):
            rank, begin = int(straddles.owner[span]), int(straddles.begin[span])
            received[rank] += reach
            oldest = max(begin - reach, int(plan.docs[straddles.crossing[span], 0]))
            for source in straddles.sources[span]:
                low, high = max(oldest, int(straddles.begin[source])), int(straddles.end[source])
                if low < high:
                    row = int(straddles.row[source]) + low - int(straddles.begin[source])
                    moves.append((straddles.owner[source], rank, row, received[rank] - (begin - low), high - low))
        self.moves = np.array(moves, np.int64).reshape(-1, 5)
        self.moves = self.moves[np.argsort(self.moves[:, 1], kind="stable")]
        what = f"rows before a convolution of width {width}"
        self.route = plan.route(self.moves, plan.local, received[plan.rank], what)

    def traffic(self, channels, dtype):
        """{"sent", "received", "messages"}: int64 [ranks], bytes and messages of one forward pass."""
        return traffic(self.moves, channels * dtype.itemsize, self.ranks)


def _kept_on(device, pack, kept):
    """The Pack for operators on a device, from those that there are."""
    if device is None or torch.device(device).type == "cpu":
        return pack
    if device not in kept:
        kept[device] = pack.to(device)
    return kept[device]


def make_pack(docs, rows):
    """`Pack` of non-empty documents [n, 2] in a token axis of so many rows."""
    step = np.zeros(rows + 1, np.int64)
    numbers = np.arange(1, len(docs) + 1)
    np.add.at(step, docs[:, 0], numbers)
    np.add.at(step, docs[:, 1], -numbers)
    return Pack(doc_ids=np.cumsum(step)[:rows])


def traffic(moves, row_bytes, ranks):
    """{"sent", "received", "messages"}: int64 [ranks] of one exchange of moves [m, 5] between ranks."""
    src, dst, _, _, rows = moves[moves[:, 0] != moves[:, 1]].T
    sent, received = (np.bincount(end, rows, minlength=ranks).astype(np.int64) * row_bytes for end in (src, dst))
    pairs = np.unique(src * ranks + dst)
    return {"sent": sent, "received": received, "messages": np.bincount(pairs // ranks, minlength=ranks)}
