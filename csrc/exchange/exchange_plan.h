/* exchange_plan.h -- what planning shares: the chunks of a pack, blocks of query rows, and lists that grow. */
#ifndef AM_EXCHANGE_PLAN_H
#define AM_EXCHANGE_PLAN_H

#include "exchange.h"

typedef struct exchange_block { /* some heads of query rows [begin, end) of a document, computed by `rank` */
    int64_t rank, doc, begin, end, head, heads;
} exchange_block;

typedef struct exchange_map { /* the pack as the planner sees it */
    const am_exchange_plan_args *a;
    int64_t chunk_rows;
    int64_t *chunk_at;      /* [C] first local row of a chunk */
    int64_t *rank_chunks;   /* [C] chunks in order of their owner, then of place */
    int64_t *first_chunk;   /* [R + 1] into rank_chunks */
    exchange_block *pieces; /* [n_pieces] what every rank holds, by rank, then by place; none is empty */
    int64_t *first_piece;   /* [R + 1] */
    int64_t n_pieces;
    double *home;   /* [R] cost of the rows that a rank holds */
    int64_t *wide;  /* [n_wide] documents on more than one rank, costliest first */
    int64_t n_wide; /* less than C */
    double total;
} exchange_map;

typedef struct exchange_split { /* who computes what, under one limit */
    exchange_block *pieces;     /* [n_pieces] what stays: `end` may have come down to `begin` */
    exchange_block *blocks; /* [n_blocks] groups of heads, then rows that were given away; at the end by rank, place */
    int64_t n_groups, n_blocks, room;
    int64_t *shares;        /* [R] scratch: heads of one document that a rank has taken */
    unsigned char *is_wide; /* [N] scratch: documents whose heads are split */
    double *cost;           /* [R] */
    int64_t *held;          /* [R] scratch: where the keys that a rank has of one document end; -1: none */
    int64_t *passes;        /* [R] scratch: blocks of one document that a rank has taken */
    unsigned char *stuck;   /* [R] scratch */
} exchange_split;

static inline int64_t exchange_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t exchange_max(int64_t a, int64_t b) { return a > b ? a : b; }

static inline int64_t exchange_start(const exchange_map *map, int64_t doc) { return map->a->docs.data[2 * doc]; }
static inline int64_t exchange_stop(const exchange_map *map, int64_t doc) { return map->a->docs.data[2 * doc + 1]; }

/* Where the keys of rows up to `end` of a document end. */
static inline int64_t exchange_keys_end(const exchange_map *map, int64_t doc, int64_t end)
{
    return map->a->causal ? end : exchange_stop(map, doc);
}

/* Scores of query rows [begin, end). */
static inline double exchange_cost(const exchange_map *map, int64_t doc, int64_t begin, int64_t end)
{
    const double rows = (double)(end - begin), last = (double)(end - exchange_start(map, doc));
    if (!map->a->causal)
        return rows * (double)(exchange_stop(map, doc) - exchange_start(map, doc));
    return rows * last - rows * (rows - 1) / 2;
}

/* Every row stays at home. */
void exchange_stay(const exchange_map *map, exchange_split *split);

/* Finds map->wide. */
void exchange_find_wide(exchange_map *map);

/* Splits the heads of the first `n` documents of map->wide over the ranks, after exchange_stay. A rank that holds some
 * of a document is preferred as long as it has at most limit * mean. */
void exchange_split_heads(const exchange_map *map, int64_t n, double limit, exchange_split *split);

/* How many of the heads from `head` on, at most `heads`, may be one task: whole key heads, or some heads of one. */
int64_t exchange_group(const exchange_map *map, int64_t head, int64_t heads);

/* Moves rows from ranks above limit * mean to ranks below, as far as whole rows allow; sorts the blocks. */
void exchange_balance(const exchange_map *map, double limit, exchange_split *split);

#endif
