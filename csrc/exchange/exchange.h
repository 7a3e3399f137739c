/* exchange.h -- rows that travel between ranks: who computes what, which rows that takes, and the copies at both ends.
 *
 * Tokens [0, T) of a pack are cut into C equal chunks; chunk c belongs to rank owners[c], and a rank's rows are its
 * chunks laid end to end. Nothing moves between ranks here: the caller carries the packed rows.
 *
 * exchange_plan. Attention of the documents becomes tasks: one rank, query rows [begin, end) of one document, the
 * document's keys up to `end` (causal) or all of them, and a group of query heads, with the key heads that it reads. A
 * task costs its share of the heads of its scores,
 *     sum over i in [begin, end) of (i - start + 1)      or      (end - begin) * (stop - start).
 *   home      every rank computes the rows that it holds
 *   balanced  a rank whose cost is above LIMIT times the mean (and by no mere scrap) gives row blocks away, costliest
 *             rows first, each to the rank below the limit that makes the least traffic for the work it takes; LIMIT is
 *             1.02
 *   heads     every head of the documents that lie on more than one rank and cost more than SHARE times the mean
 *             goes to the rank with the least work so far, of those that hold some of the document while any has room;
 *             heads of a rank are consecutive, and it computes all their rows. Other documents stay home, or give rows
 *             away as above. Of SHARES 1, 1/4, 1/16, each with LIMIT 1.02 and without, it is the cheapest that leaves
 *             nobody more than 1.05 of the mean; where none does, the most even: of a single document some rank has
 *             ceil(heads / ranks) heads
 *   auto      the cheapest of home, of LIMITs 2, 1.5, 1.25, 1.1, 1.02, and of what heads tries, by
 *                 seconds = price[0] * largest cost + largest traffic of a rank,
 *                 traffic = price[1] * query rows + price[2] * key rows + price[3] * messages, in and out,
 *             a row of some heads counting as its share of a row
 * A key head's row goes to a rank once at most, however many of its tasks read it.
 *
 * exchange_copy: out[to + i] = x[from + i].   exchange_sum: out[to + i] = sum of x[from + i], in a fixed order.
 *
 * A device does not read moves: exchange_table and exchange_index make of them, once and on the host, what a kernel may
 * trust and look rows up in, and exchange_copy_by and exchange_sum_by take that as a tensor beside the rows. The same
 * bits on every device.
 */
#ifndef AM_EXCHANGE_H
#define AM_EXCHANGE_H

#include "am_exec.h"

enum { AM_EXCHANGE_TRIES = 12, AM_EXCHANGE_TASK = 10, AM_EXCHANGE_MOVE = 7, AM_EXCHANGE_ENTRY = 7 };

typedef struct am_exchange_try {
    double limit;   /* infinity: rows stay home */
    double seconds; /* predicted */
    int64_t split;  /* documents whose heads are split */
} am_exchange_try;

typedef struct am_exchange_list {
    int64_t *data; /* [n, width], allocated here with malloc */
    int64_t n, room, width;
} am_exchange_list;

typedef struct am_exchange_plan_args {
    am_exchange_list tasks; /* [n, 10] out: rank, doc, begin, end, round, query_at, key_at, keys, head, heads; by rank,
                               begin and head */
    am_exchange_list keys;  /* [m, 7] out: src, dst, from, to, rows, head, heads: [head, head + heads) of local rows
                               from `from` at src -> the key buffer of dst, row after row from its head `to` on */
    am_exchange_list queries; /* [p, 7] out: the same for query rows -> the query buffer of dst; src == dst too */
    am_exchange_try tried[AM_EXCHANGE_TRIES]; /* out */
    int64_t n_tried, chosen;                  /* out */
    am_i64_array docs;                        /* [2 N] start and stop of each document, ascending, at most tokens */
    am_i64_array owners;                      /* [C] in [0, ranks) */
    am_f64_array prices;                      /* [4] seconds of a score, a query row, a key row, a message; >= 0 */
    int64_t tokens;                           /* a multiple of C */
    int64_t ranks;                            /* >= 1 */
    int64_t heads, kv_heads;                  /* heads is a multiple of kv_heads; both >= 1 */
    const char *scheme;
    bool causal;
} am_exchange_plan_args;

/* Both buffers are counted in heads of rows. A part is tasks of one rank, round and group of heads; in it a document
 * comes once. A group reads whole key heads, or some of the query heads of a single one. The query buffer has the parts
 * with all heads, by round, then the others, each by document; the key buffer one section for all parts with all heads,
 * then one for each other. keys: rows of the section that a task reads, from its head key_at on. */
am_status am_exchange_plan(am_exchange_plan_args *a, const am_exec *ex);

typedef struct am_exchange_rows_args {
    am_tensor out;          /* [M, ...] any dtype, rows without gaps inside, out; shares no memory with x and own */
    am_tensor x;            /* [N, ...] out's dtype and trailing shape, in */
    am_tensor own;          /* exchange_sum: [O, ...] as x, a second source, in */
    am_i64_array moves;     /* [3 n] from (row of x), to (row of out), rows; no two of a copy's share rows of out */
    am_i64_array own_moves; /* exchange_sum: the same for own */
    int64_t own_after;      /* exchange_sum: how many of `moves` are added before own_moves */
    bool reverse;           /* the moves name out's row first: (to, from, rows) */
    bool runs; /* moves are [6 n]: behind those, how often the rows come, and steps from one time to the next,
                  in x and in out, in the order of the first two */
} am_exchange_rows_args;

/* Rows of out that no move names are left alone. */
am_status am_exchange_copy(const am_exchange_rows_args *a, const am_exec *ex);

/* f32, bf16 (summed in f32) or f64; every row of out is written, those that no move names with 0, and rounded once. */
am_status am_exchange_sum(const am_exchange_rows_args *a, const am_exec *ex);

typedef struct am_exchange_table_args {
    am_exchange_list table;   /* [n + 1, 7] out: of every move that has rows, how many rows those before it have, then
                                 from, to, rows, runs, step of from, step of to; at the end how many rows there are */
    am_i64_array moves;       /* as of exchange_copy */
    int64_t rows_x, rows_out; /* of the tensors that it will be used on */
    bool reverse, runs;
} am_exchange_table_args;

am_status am_exchange_table(am_exchange_table_args *a, const am_exec *ex);

typedef struct am_exchange_index_args {
    am_exchange_list index; /* [rows_out + 1 + n] out: where each row's sources begin among the n behind them, and where
                               the last one's end; the sources in the order in which they are added: a row of x, or
                               -1 - a row of own */
    am_i64_array moves, own_moves; /* as of exchange_sum */
    int64_t own_after;
    int64_t rows_x, rows_own, rows_out;
    bool reverse, runs;
} am_exchange_index_args;

am_status am_exchange_index(am_exchange_index_args *a, const am_exec *ex);

typedef struct am_exchange_by_args {
    am_tensor out;   /* [M, ...] as of exchange_copy or exchange_sum, out */
    am_tensor x;     /* [N, ...] in */
    am_tensor own;   /* exchange_sum_by: [O, ...] in */
    am_tensor table; /* [n + 1, 7] or [M + 1 + n] i64 contiguous, in: of exchange_table or exchange_index. Rows that are
                        outside the tensors are left out */
    int64_t rows;    /* exchange_copy_by: how many rows the table's moves have; on a CPU more is an error, but where
                        out has so many: a table made on a device may not say where it ends */
} am_exchange_by_args;

am_status am_exchange_copy_by(const am_exchange_by_args *a, const am_exec *ex);
am_status am_exchange_sum_by(const am_exchange_by_args *a, const am_exec *ex);

am_status am_cuda_exchange_copy_by(const am_exchange_by_args *a, const am_exec *ex);
am_status am_cuda_exchange_sum_by(const am_exchange_by_args *a, const am_exec *ex);

#endif
