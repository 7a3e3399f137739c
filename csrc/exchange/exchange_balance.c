/* exchange_balance.c -- query rows from ranks that have too much to compute to ranks that have too little. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "exchange_plan.h"

/* The most rows at the end of [begin, end) that cost at most `room`. */
static int64_t rows_within(const exchange_map *map, int64_t doc, int64_t begin, int64_t end, double room)
{
    const double last = (double)(end - exchange_start(map, doc));
    double rows = room / (double)(exchange_stop(map, doc) - exchange_start(map, doc));
    if (map->a->causal) { /* rows * last - rows (rows - 1) / 2 = room */
        const double half = last + 0.5, root = half * half - 2 * room;
        rows = root > 0 ? half - sqrt(root) : last;
    }
    int64_t n = rows < (double)(end - begin) ? (int64_t)rows : end - begin;
    while (n > 0 && exchange_cost(map, doc, end - n, end) > room)
        n--;
    return n;
}

/* Work, in means of a rank, that is not worth a message and a pass over keys. */
static const double scrap = 0.015;

/* A further block of one document is a further pass over its keys: so much of the price of having them sent. */
static const double another_pass = 0.25;

/* Fills held[r], where the keys that rank r has, or will have, of the document end (-1 without any), and passes[r]. */
static void find_held(const exchange_map *map, const exchange_split *split, int64_t doc)
{
    const int64_t start = exchange_start(map, doc), stop = exchange_stop(map, doc), rows = map->chunk_rows;
    for (int64_t r = 0; r < map->a->ranks; r++)
        split->held[r] = -1;
    memset(split->passes, 0, (size_t)map->a->ranks * sizeof *split->passes);
    for (int64_t c = start / rows; c * rows < stop; c++)
        split->held[map->a->owners.data[c]] = exchange_min(stop, (c + 1) * rows);
    for (int64_t i = split->n_groups; i < split->n_blocks; i++) {
        const exchange_block *const b = &split->blocks[i];
        if (b->doc != doc)
            continue;
        split->held[b->rank] = exchange_max(split->held[b->rank], b->end);
        split->passes[b->rank]++;
    }
}

typedef struct offer { /* the rows at the end of `piece`, and who takes how many */
    exchange_block *piece;
    int64_t rank, rows;
} offer;

/* The taker with the least traffic for the work it takes. rows == 0: nobody has room for a row. */
static void find_taker(const exchange_map *map, const exchange_split *split, double bound, double over, offer *best)
{
    const exchange_block *const p = best->piece;
    const double *const price = map->a->prices.data;
    const int64_t end = exchange_keys_end(map, p->doc, p->end), start = exchange_start(map, p->doc);
    const double least_room = scrap * map->total / (double)map->a->ranks;
    double least = INFINITY;
    best->rows = 0;
    find_held(map, split, p->doc);
    for (int64_t r = 0; r < map->a->ranks; r++) {
        const double room = bound - split->cost[r];
        if (room <= 0 || (room < over && room < least_room))
            continue;
        int64_t rows = rows_within(map, p->doc, p->begin, p->end, room < over ? room : over);
        const bool more = rows < p->end - p->begin && exchange_cost(map, p->doc, p->end - rows, p->end) < over;
        rows += more && exchange_cost(map, p->doc, p->end - rows - 1, p->end) <= room; /* to the limit, not near it */
        if (rows == 0)
            continue;
        const int64_t held = split->held[r];
        const int64_t missing = held < 0 ? end - start : map->a->causal ? exchange_max(0, end - held) : 0;
        const double taken = exchange_cost(map, p->doc, p->end - rows, p->end);
        const double passes = (double)split->passes[r] + (room < over); /* what it leaves makes a further block too */
        const double keys = (double)missing + another_pass * passes * (double)(end - start);
        const double traffic = price[1] * (double)rows + price[2] * keys + price[3];
        const double ratio = (traffic + 1e-30) / taken;
        if (ratio < least) {
            least = ratio;
            best->rank = r;
            best->rows = rows;
        }
    }
}

/* The piece of the rank whose last row costs most; NULL when it has no rows left. */
static exchange_block *costliest(const exchange_map *map, const exchange_split *split, int64_t rank)
{
    exchange_block *best = NULL;
    int64_t most = 0;
    for (int64_t i = map->first_piece[rank]; i < map->first_piece[rank + 1]; i++) {
        exchange_block *const p = &split->pieces[i];
        const int64_t keys = exchange_keys_end(map, p->doc, p->end) - exchange_start(map, p->doc);
        if (p->end > p->begin && keys > most) {
            most = keys;
            best = p;
        }
    }
    return best;
}

static void give(const exchange_map *map, exchange_split *split, int64_t from, const offer *o)
{
    exchange_block *const p = o->piece;
    const double cost = exchange_cost(map, p->doc, p->end - o->rows, p->end);
    exchange_block *const last = split->n_blocks > split->n_groups ? &split->blocks[split->n_blocks - 1] : NULL;
    if (last && last->rank == o->rank && last->doc == p->doc && last->begin == p->end)
        last->begin -= o->rows;
    else
        split->blocks[split->n_blocks++] =
            (exchange_block){o->rank, p->doc, p->end - o->rows, p->end, 0, map->a->heads};
    p->end -= o->rows;
    split->cost[from] -= cost;
    split->cost[o->rank] += cost;
}

static int by_rank_and_place(const void *a_, const void *b_)
{
    const exchange_block *const a = a_, *const b = b_;
    if (a->rank != b->rank)
        return a->rank < b->rank ? -1 : 1;
    return a->begin < b->begin ? -1 : a->begin > b->begin;
}

void exchange_balance(const exchange_map *map, double limit, exchange_split *split)
{
    const int64_t ranks = map->a->ranks;
    const double mean = map->total / (double)ranks, bound = limit * mean, enough = bound + scrap * mean;
    memset(split->stuck, 0, (size_t)ranks);
    while (isfinite(limit) && split->n_blocks < split->room) {
        int64_t from = -1;
        for (int64_t r = 0; r < ranks; r++)
            if (!split->stuck[r] && split->cost[r] > enough && (from < 0 || split->cost[r] > split->cost[from]))
                from = r;
        if (from < 0)
            break;
        offer o = {.piece = costliest(map, split, from)};
        if (o.piece != NULL)
            find_taker(map, split, bound, split->cost[from] - bound, &o);
        if (o.rows == 0)
            split->stuck[from] = 1; /* the next row is larger than any room that is left */
        else
            give(map, split, from, &o);
    }
    qsort(split->blocks, (size_t)split->n_blocks, sizeof *split->blocks, by_rank_and_place);
}
