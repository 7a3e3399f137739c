/* exchange_heads.c -- documents on more than one rank, and their heads over the ranks. */
#include <stdlib.h>
#include <string.h>

#include "exchange_plan.h"

static double whole_cost(const exchange_map *map, int64_t doc)
{
    return exchange_cost(map, doc, exchange_start(map, doc), exchange_stop(map, doc));
}

static bool is_wide(const exchange_map *map, int64_t doc)
{
    const int64_t *const owners = map->a->owners.data;
    const int64_t first = exchange_start(map, doc) / map->chunk_rows;
    for (int64_t c = first + 1; c * map->chunk_rows < exchange_stop(map, doc); c++)
        if (owners[c] != owners[first])
            return true;
    return false;
}

void exchange_find_wide(exchange_map *map)
{
    int64_t before = -1;
    map->n_wide = 0;
    for (int64_t c = 1; c < map->a->owners.n; c++) { /* the document over the edge before each chunk */
        const int64_t edge = c * map->chunk_rows, doc = am_doc_after(&map->a->docs, edge);
        if (doc == before || doc == map->a->docs.n / 2 || exchange_start(map, doc) >= edge || !is_wide(map, doc))
            continue;
        before = doc;
        int64_t at = map->n_wide;
        for (map->n_wide++; at > 0 && whole_cost(map, map->wide[at - 1]) < whole_cost(map, doc); at--)
            map->wide[at] = map->wide[at - 1];
        map->wide[at] = doc;
    }
}

void exchange_stay(const exchange_map *map, exchange_split *split)
{
    memcpy(split->pieces, map->pieces, (size_t)map->n_pieces * sizeof *split->pieces);
    memcpy(split->cost, map->home, (size_t)map->a->ranks * sizeof *split->cost);
    split->n_groups = split->n_blocks = 0;
}

int64_t exchange_group(const exchange_map *map, int64_t head, int64_t heads)
{
    const int64_t of_key = map->a->heads / map->a->kv_heads, inside = head % of_key;
    if (inside != 0 || heads < of_key)
        return exchange_min(heads, of_key - inside);
    return heads - heads % of_key;
}

/* The rank with the least work of those that hold the document and may do `cost` more; if none may, of all. */
static int64_t taker_of(const exchange_split *split, int64_t ranks, double most)
{
    int64_t holder = -1, any = 0;
    for (int64_t r = 0; r < ranks; r++) {
        any = split->cost[r] < split->cost[any] ? r : any;
        if (split->held[r] && split->cost[r] <= most && (holder < 0 || split->cost[r] < split->cost[holder]))
            holder = r;
    }
    return holder < 0 ? any : holder;
}

/* Hands out heads one by one; the groups are in the order of ranks. */
static void split_document(const exchange_map *map, int64_t doc, double limit, exchange_split *split)
{
    const int64_t ranks = map->a->ranks, heads = map->a->heads;
    const int64_t start = exchange_start(map, doc), stop = exchange_stop(map, doc);
    const double cost = whole_cost(map, doc) / (double)heads, most = limit * map->total / (double)ranks - cost;
    memset(split->shares, 0, (size_t)ranks * sizeof *split->shares);
    memset(split->held, 0, (size_t)ranks * sizeof *split->held);
    for (int64_t c = start / map->chunk_rows; c * map->chunk_rows < stop; c++)
        split->held[map->a->owners.data[c]] = 1;
    for (int64_t i = 0; i < heads; i++) {
        const int64_t r = taker_of(split, ranks, most);
        split->shares[r]++;
        split->cost[r] += cost;
    }
    for (int64_t r = 0, head = 0; r < ranks; head += split->shares[r++])
        if (split->shares[r] > 0)
            split->blocks[split->n_blocks++] = (exchange_block){r, doc, start, stop, head, split->shares[r]};
}

void exchange_split_heads(const exchange_map *map, int64_t n, double limit, exchange_split *split)
{
    for (int64_t i = 0; i < n; i++)
        split->is_wide[map->wide[i]] = 1;
    for (int64_t i = 0; i < map->n_pieces; i++) {
        exchange_block *const p = &split->pieces[i];
        if (!split->is_wide[p->doc])
            continue;
        split->cost[p->rank] -= exchange_cost(map, p->doc, p->begin, p->end);
        p->end = p->begin;
    }
    for (int64_t i = 0; i < n; i++) {
        split_document(map, map->wide[i], limit, split);
        split->is_wide[map->wide[i]] = 0;
    }
    split->n_groups = split->n_blocks;
}
