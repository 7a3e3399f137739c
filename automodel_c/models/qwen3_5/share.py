"""What one rank of a context-parallel group holds of a pack, and which rows' embeddings it makes. On the host.

Letters: T tokens, L rows of the padded pack that a rank holds, X more that its head of multi-token prediction reads.
"""

import numpy as np
import torch


class Share:
    """One rank's rows of a pack, from `ends` int64 [T], one past the document of each token, 0 in padding.

    Attributes:
        plan: ContextPlan, or None on one rank, which holds everything.
        tokens: T, with the plan's padding. depths: how far multi-token prediction looks ahead.
        own: int64 [L], the rows that this rank holds.
        rows: int64 [L + X], those and then the rows that its own look ahead to: what it embeds.
    """

    def __init__(self, ends, plan=None, depths=0):
        self.plan, self.depths = plan, depths
        self.tokens = len(ends) if plan is None else plan.padded
        self._ends = self.pad(ends, 0)
        self.own = np.arange(self.tokens) if plan is None else self._own(plan.rank)
        self.rows = self.own if plan is None else self._rows(plan.rank)

    def pad(self, x, fill):
        """x [.., T] of the whole pack -> [.., tokens]."""
        missing = self.tokens - x.shape[-1]
        if not missing:
            return x
        if isinstance(x, torch.Tensor):
            return torch.nn.functional.pad(x, (0, missing), value=fill)
        return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)], constant_values=fill)

    def take(self, x, fill, rows=None):
        """This rank's rows of x [.., T] of the whole pack; `rows` instead of its own. A rank alone takes x itself."""
        if self.plan is None and rows is None:
            return x
        index = torch.from_numpy(self.own if rows is None else rows)
        return self.pad(x, fill).index_select(-1, index.to(x.device))

    def ahead(self, k):
        """(int64 [L], bool [L]): for each own row, the row of the token k further, the document's last where it ends
        before; and whether it does not."""
        return self._ahead(self.own, k)

    def embedded(self, rows):
        """Where each of `rows` stands in `rows` of this share."""
        if self.plan is None:
            return rows
        at = np.zeros(self.tokens, dtype=np.int64)
        at[self.rows] = np.arange(len(self.rows))
        return at[rows]

    def token_moves(self, places, made):
        """How vision tokens travel: int64 [m, 5] of the whole group, as `Route.of` takes them.

        places: int64 [n], the row of each token. made: how many each rank makes, of the n in order.
        """
        stops, moves, token_at = np.cumsum(made), [], self._token_at(places)
        for rank in range(self.plan.ranks):
            tokens = token_at[self._rows(rank)]
            tokens = tokens[tokens >= 0]
            src = np.searchsorted(stops, tokens, side="right")
            first = np.flatnonzero((np.diff(tokens, prepend=-2) != 1) | (np.diff(src, prepend=-1) != 0))
            source, begin = src[first], tokens[first]
            rows = np.diff(np.append(first, len(tokens)))
            moves.append(np.stack([source, np.full_like(source, rank), begin - (stops - made)[source], first, rows], 1))
        return np.concatenate(moves)

    def spliced(self, places):
        """(tokens, rows): which vision tokens, whose rows are `places` [n], this rank's embeddings take, and where."""
        if self.plan is None:
            return np.arange(len(places)), places
        tokens = self._token_at(places)[self.rows]
        there = np.flatnonzero(tokens >= 0)
        return tokens[there], there

    def to_all(self, rows):
        """Route of `rows` int64 [n] of the pack from the ranks that hold them to every rank, in that order."""
        plan = self.plan
        owner = plan.owners[rows // max(1, plan.chunk)]
        one = np.stack([owner, owner, plan.local_row(rows), np.arange(len(rows)), np.ones_like(rows)], axis=1)
        moves = np.tile(one, (plan.ranks, 1))
        moves[:, 1] = np.repeat(np.arange(plan.ranks), len(one))
        return plan.route(moves, plan.local, len(rows), "hidden states for logits")

    def _token_at(self, places):
        """int64 [tokens]: the vision token of each row, or -1."""
        token_at = np.full(self.tokens, -1, dtype=np.int64)
        token_at[places] = np.arange(len(places))
        return token_at

    def _own(self, rank):
        return np.concatenate([np.arange(begin, end) for begin, end in self.plan.chunks_of(rank)])

    def _rows(self, rank):
        own = self._own(rank)
        if not self.depths:
            return own
        tails = [np.arange(max(begin, end - self.depths), end) for begin, end in self.plan.chunks_of(rank)]
        seen = [self._ahead(tail, k)[0] for tail in tails for k in range(1, self.depths + 1)]
        return np.concatenate([own, np.setdiff1d(np.concatenate(seen), own)])

    def _ahead(self, rows, k):
        ends = self._ends[rows]
        inside = rows + k < ends
        return np.where(inside, rows + k, np.where(ends > 0, ends - 1, rows)), inside
