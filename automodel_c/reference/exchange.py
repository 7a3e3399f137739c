"""Rows over ranks, row by row: what csrc/exchange plans and moves."""

import numpy as np


def rows_of_ranks(owners, tokens, ranks):
    """Rows of the pack that each rank holds, in its local order: a list of int arrays."""
    chunk = tokens // len(owners)
    held = [[] for _ in range(ranks)]
    for c, rank in enumerate(owners):
        held[rank] += range(c * chunk, (c + 1) * chunk)
    return [np.array(rows, dtype=np.int64) for rows in held]


def scores(docs, doc, begin, end, causal):
    """Scores that query rows [begin, end) of a document take."""
    start, stop = map(int, docs[doc])
    return sum(row - start + 1 for row in range(begin, end)) if causal else (end - begin) * (stop - start)


def needed_keys(docs, tasks, rank, causal):
    """The set of key rows that a rank's tasks read; tasks: (rank, doc, begin, end, ...)."""
    needed = set()
    for task in tasks:
        if task[0] == rank:
            start, stop = map(int, docs[task[1]])
            needed |= set(range(start, int(task[3]) if causal else stop))
    return needed


def deliver(shards, moves, rows):
    """Buffers [rows[dst]] of every rank after moves of (src, dst, from, to, rows); -1 where nothing went."""
    buffers = [np.full(n, -1, dtype=np.int64) for n in rows]
    for src, dst, begin, to, n in moves:
        assert (buffers[dst][to : to + n] == -1).all(), "a row is written once"
        buffers[dst][to : to + n] = shards[src][begin : begin + n]
    return buffers


def copy(out, x, moves):
    """``out`` with rows of ``x`` put in; moves: (from, to, rows)."""
    out = out.clone()
    for begin, to, rows in moves:
        for i in range(rows):
            out[to + i] = x[begin + i]
    return out


def add(rows, sources):
    """float64 [rows, ...]: the sum of rows of every (x, moves) of ``sources``."""
    x = sources[0][0]
    total = x.double().new_zeros((rows, *x.shape[1:]))
    for x, moves in sources:
        for begin, to, n in moves:
            for i in range(n):
                total[to + i] += x[begin + i].double()
    return total
