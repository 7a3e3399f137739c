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
    """Scores that query rows [begin, end) of a document take, of one head."""
    start, stop = map(int, docs[doc])
    return sum(row - start + 1 for row in range(begin, end)) if causal else (end - begin) * (stop - start)


def key_heads(task, heads, kv_heads):
    """Key heads that a task (rank, doc, .., head, heads) reads: query head h reads h // (heads // kv_heads)."""
    return sorted({h // (heads // kv_heads) for h in range(task[-2], task[-2] + task[-1])})


def needed_keys(docs, tasks, rank, causal, heads=1, kv_heads=1):
    """The set of row * kv_heads + key head that a rank's tasks read.

    tasks: (rank, doc, begin, end, .., head, heads).
    """
    needed = set()
    for task in tasks:
        if task[0] == rank:
            start, stop = map(int, docs[task[1]])
            rows = range(start, int(task[3]) if causal else stop)
            needed |= {row * kv_heads + h for row in rows for h in key_heads(task, heads, kv_heads)}
    return needed


def deliver(shards, moves, sizes, heads=1):
    """Buffers [sizes[dst]] of row * heads + head after moves of (src, dst, from, to, rows, head, heads); else -1."""
    buffers = [np.full(n, -1, dtype=np.int64) for n in sizes]
    for src, dst, begin, to, n, head, some in moves:
        for i in range(n):
            place = buffers[dst][to + i * some : to + (i + 1) * some]
            assert (place == -1).all(), "a row is written once"
            place[:] = shards[src][begin + i] * heads + np.arange(head, head + some)
    return buffers


def single(moves):
    """Moves of (from, to, rows, runs, step of from, step of to) as moves of (from, to, rows), in order."""
    return [(m[0] + i * m[4], m[1] + i * m[5], m[2]) for m in moves for i in range(m[3])]


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
