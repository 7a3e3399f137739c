/* exchange_moves.h -- one move read and checked, for this slice alone. */
#ifndef EXCHANGE_MOVES_H
#define EXCHANGE_MOVES_H

#include "exchange.h"

typedef struct move { /* rows x[from + i] -> out[to + i], `runs` times, a step further each time */
    int64_t from, to, rows, runs, from_step, to_step;
} move;

static inline int move_numbers(bool runs) { return runs ? 6 : 3; }

static inline move move_of(const int64_t *m, bool reverse, bool runs)
{
    move found = {m[reverse], m[!reverse], m[2], 1, 0, 0};
    if (runs) {
        found.runs = m[3];
        found.from_step = m[4 + reverse];
        found.to_step = m[4 + !reverse];
    }
    return found;
}

/* Whether `runs` times `rows` from `at` on lie inside `all`; none of them negative but perhaps `at`. */
static inline bool fits(int64_t at, int64_t rows, int64_t runs, int64_t step, int64_t all)
{
    return at >= 0 && at <= all && rows <= all - at && (runs <= 1 || step == 0 || runs - 1 <= (all - at - rows) / step);
}

/* Elements of a row. */
int64_t am_exchange_width(const am_tensor *t);

/* Rows without gaps inside, of out's dtype and trailing shape. */
am_status am_exchange_check_rows(const char *fn, const char *name, const am_tensor *t, const am_tensor *out);

/* Moves stay inside `from_rows` and `to_rows`. */
am_status am_exchange_check_moves(const char *fn, const char *name, const am_i64_array *moves, int64_t from_rows,
                                  int64_t to_rows, bool reverse, bool runs);

#endif
