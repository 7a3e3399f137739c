/* exchange_plan.c -- documents and chunks in, tasks and moves out: pure host integers, no threads. */
#include "exchange_plan.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const double limits[AM_EXCHANGE_TRIES] = {INFINITY, 2.0, 1.5, 1.25, 1.1, 1.02};
static const double even_enough = 1.05; /* auto does not look further where home is this close to the mean */

typedef struct draft { /* one way to do it */
    am_exchange_list tasks, keys, queries;
    double seconds;
} draft;

static am_status check_pack(const am_exchange_plan_args *a)
{
    AM_CHECK(a->docs.n % 2 == 0, AM_ERR_SHAPE, "exchange_plan: docs has %lld elements, an even number is needed",
             (long long)a->docs.n);
    int64_t before = 0;
    for (int64_t i = 0; i < a->docs.n; i++) {
        AM_CHECK(a->docs.data[i] >= before, AM_ERR_ARG, "exchange_plan: docs[%lld] is %lld, after %lld", (long long)i,
                 (long long)a->docs.data[i], (long long)before);
        before = a->docs.data[i];
    }
    AM_CHECK(before <= a->tokens, AM_ERR_ARG, "exchange_plan: docs ends at %lld, tokens is %lld", (long long)before,
             (long long)a->tokens);
    AM_CHECK(a->ranks >= 1 && a->ranks <= INT32_MAX, AM_ERR_ARG, "exchange_plan: ranks is %lld, at least 1 is needed",
             (long long)a->ranks);
    AM_CHECK(a->owners.n >= 1 && a->tokens % a->owners.n == 0, AM_ERR_SHAPE,
             "exchange_plan: tokens is %lld, a multiple of the %lld owners is needed", (long long)a->tokens,
             (long long)a->owners.n);
    for (int64_t c = 0; c < a->owners.n; c++)
        AM_CHECK(a->owners.data[c] >= 0 && a->owners.data[c] < a->ranks, AM_ERR_ARG,
                 "exchange_plan: owners[%lld] is %lld, it lies in [0, %lld)", (long long)c,
                 (long long)a->owners.data[c], (long long)a->ranks);
    return AM_OK;
}

static am_status check_choice(const am_exchange_plan_args *a)
{
    AM_CHECK(a->prices.n == 4, AM_ERR_SHAPE, "exchange_plan: prices has %lld numbers, 4 are needed",
             (long long)a->prices.n);
    for (int i = 0; i < 4; i++)
        AM_CHECK(a->prices.data[i] >= 0 && isfinite(a->prices.data[i]), AM_ERR_ARG,
                 "exchange_plan: prices[%d] is %g, it lies in [0, inf)", i, a->prices.data[i]);
    AM_CHECK(strcmp(a->scheme, "home") == 0 || strcmp(a->scheme, "balanced") == 0 || strcmp(a->scheme, "auto") == 0,
             AM_ERR_ARG, "exchange_plan: scheme is '%s', one of home, balanced, auto is needed", a->scheme);
    return AM_OK;
}

int64_t *exchange_push(am_exchange_list *list)
{
    if (list->n == list->room) {
        const int64_t room = list->room ? 2 * list->room : 64;
        int64_t *const data = realloc(list->data, (size_t)(room * list->width) * sizeof *data);
        if (data == NULL)
            return NULL;
        list->data = data;
        list->room = room;
    }
    return list->data + list->width * list->n++;
}

am_status exchange_add_move(am_exchange_list *list, int64_t src, int64_t dst, int64_t from, int64_t to, int64_t rows)
{
    int64_t *const last = list->n ? list->data + list->width * (list->n - 1) : NULL;
    if (last && last[0] == src && last[1] == dst && last[2] + last[4] == from && last[3] + last[4] == to) {
        last[4] += rows;
        return AM_OK;
    }
    int64_t *const move = exchange_push(list);
    AM_CHECK(move != NULL, AM_ERR_NOMEM, "exchange_plan: no memory for %lld moves", (long long)list->n);
    memcpy(move, (int64_t[]){src, dst, from, to, rows}, AM_EXCHANGE_MOVE * sizeof *move);
    return AM_OK;
}

/* Moves of rows [begin, end) of the pack from whoever holds them to `to` of rank dst's buffer. */
static am_status add_rows(const exchange_map *map, am_exchange_list *list, int64_t dst, int64_t begin, int64_t end,
                          int64_t to)
{
    while (begin < end) {
        const int64_t c = begin / map->chunk_rows, stop = exchange_min(end, (c + 1) * map->chunk_rows);
        const int64_t from = map->chunk_at[c] + begin - c * map->chunk_rows;
        AM_TRY(exchange_add_move(list, map->a->owners.data[c], dst, from, to, stop - begin));
        to += stop - begin;
        begin = stop;
    }
    return AM_OK;
}

static void sort_chunks(exchange_map *map)
{
    const am_exchange_plan_args *const a = map->a;
    for (int64_t c = 0; c < a->owners.n; c++)
        map->first_chunk[a->owners.data[c] + 1]++;
    for (int64_t r = 0; r < a->ranks; r++)
        map->first_chunk[r + 1] += map->first_chunk[r];
    for (int64_t c = a->owners.n - 1; c >= 0; c--) { /* from the back; first_piece counts meanwhile */
        const int64_t r = a->owners.data[c];
        map->rank_chunks[map->first_chunk[r + 1] - 1 - map->first_piece[r]++] = c;
    }
    for (int64_t r = 0; r < a->ranks; r++)
        for (int64_t i = map->first_chunk[r]; i < map->first_chunk[r + 1]; i++)
            map->chunk_at[map->rank_chunks[i]] = (i - map->first_chunk[r]) * map->chunk_rows;
}

static void cut_pieces(exchange_map *map)
{
    const am_exchange_plan_args *const a = map->a;
    for (int64_t r = 0; r < a->ranks; r++) {
        map->first_piece[r] = map->n_pieces;
        for (int64_t i = map->first_chunk[r]; i < map->first_chunk[r + 1]; i++) {
            const int64_t chunk = map->rank_chunks[i] * map->chunk_rows, stop = chunk + map->chunk_rows;
            for (int64_t d = am_doc_after(&a->docs, chunk); d < a->docs.n / 2 && exchange_start(map, d) < stop; d++) {
                const int64_t begin = exchange_max(chunk, exchange_start(map, d));
                const int64_t end = exchange_min(stop, exchange_stop(map, d));
                if (begin >= end)
                    continue;
                map->pieces[map->n_pieces++] = (exchange_block){r, d, begin, end};
                map->home[r] += exchange_cost(map, d, begin, end);
            }
        }
        map->total += map->home[r];
    }
    map->first_piece[a->ranks] = map->n_pieces;
}

/* Tasks in order of rank and place: what stays, merged with what was given; rows that go on become one task. */
static am_status list_tasks(const exchange_map *map, const exchange_split *split, am_exchange_list *tasks)
{
    const exchange_block *p = split->pieces, *const p_end = p + map->n_pieces;
    const exchange_block *b = split->blocks, *const b_end = b + split->n_blocks;
    int64_t *last = NULL;
    while (p < p_end || b < b_end) {
        const bool given =
            p == p_end || (b < b_end && (b->rank < p->rank || (b->rank == p->rank && b->begin < p->begin)));
        const exchange_block *const next = given ? b++ : p++;
        if (next->begin == next->end)
            continue;
        if (last && last[0] == next->rank && last[1] == next->doc && last[3] == next->begin) {
            last[3] = next->end;
            continue;
        }
        const int64_t round = last && last[0] == next->rank && last[1] == next->doc ? last[4] + 1 : 0;
        last = exchange_push(tasks);
        AM_CHECK(last != NULL, AM_ERR_NOMEM, "exchange_plan: no memory for %lld tasks", (long long)tasks->n);
        memcpy(last, (int64_t[AM_EXCHANGE_TASK]){next->rank, next->doc, next->begin, next->end, round},
               AM_EXCHANGE_TASK * sizeof *last);
    }
    return AM_OK;
}

/* Places the key rows of one rank's tasks [t, stop): a document's keys once, as far as any of them reads. */
static am_status place_keys(const exchange_map *map, int64_t *t, const int64_t *stop, am_exchange_list *keys)
{
    int64_t at = 0;
    while (t < stop) {
        const int64_t doc = t[1], start = exchange_start(map, doc), rank = t[0];
        int64_t end = start;
        for (; t < stop && t[1] == doc; t += AM_EXCHANGE_TASK) {
            t[6] = at;
            t[7] = exchange_keys_end(map, doc, t[3]) - start;
            end = exchange_max(end, start + t[7]);
        }
        AM_TRY(add_rows(map, keys, rank, start, end, at));
        at += end - start;
    }
    return AM_OK;
}

static am_status place_queries(const exchange_map *map, int64_t *t, const int64_t *stop, am_exchange_list *queries)
{
    int64_t at = 0, left = (stop - t) / AM_EXCHANGE_TASK;
    for (int64_t round = 0; left > 0; round++)
        for (int64_t *task = t; task < stop; task += AM_EXCHANGE_TASK) {
            if (task[4] != round)
                continue;
            task[5] = at;
            AM_TRY(add_rows(map, queries, task[0], task[2], task[3], at));
            at += task[3] - task[2];
            left--;
        }
    return AM_OK;
}

static am_status place_tasks(const exchange_map *map, draft *d)
{
    const int64_t *const end = d->tasks.data + AM_EXCHANGE_TASK * d->tasks.n;
    for (int64_t *t = d->tasks.data, *stop; t < end; t = stop) {
        for (stop = t; stop < end && stop[0] == t[0];)
            stop += AM_EXCHANGE_TASK;
        AM_TRY(place_keys(map, t, stop, &d->keys));
        AM_TRY(place_queries(map, t, stop, &d->queries));
    }
    return AM_OK;
}

/* Adds the seconds that a list's moves take to the ranks at both ends. */
static void add_traffic(const am_exchange_list *moves, double row_price, double message, int64_t *seen, double *busy)
{
    for (int64_t i = 0; i < moves->n; i++) {
        const int64_t *const m = moves->data + AM_EXCHANGE_MOVE * i;
        if (m[0] == m[1])
            continue;
        const double seconds = row_price * (double)m[4] + (seen[m[0]] == m[1] ? 0 : message);
        seen[m[0]] = m[1]; /* moves come by dst */
        busy[m[0]] += seconds;
        busy[m[1]] += seconds;
    }
}

static am_status predict(const exchange_map *map, const exchange_split *split, draft *d)
{
    const int64_t ranks = map->a->ranks;
    const double *const price = map->a->prices.data;
    double *const busy = calloc((size_t)ranks, sizeof *busy);
    int64_t *const seen = malloc((size_t)ranks * sizeof *seen);
    double work = 0, traffic = 0;
    am_status st = AM_OK;
    if (busy == NULL || seen == NULL) {
        st = am_fail(AM_ERR_NOMEM, "exchange_plan: no memory for %lld ranks", (long long)ranks);
        goto out;
    }
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t r = 0; r < ranks; r++)
            seen[r] = -1;
        add_traffic(pass ? &d->queries : &d->keys, price[pass ? 1 : 2], price[3], seen, busy);
    }
    for (int64_t r = 0; r < ranks; r++) {
        work = split->cost[r] > work ? split->cost[r] : work;
        traffic = busy[r] > traffic ? busy[r] : traffic;
    }
    d->seconds = price[0] * work + traffic;
out:
    free(busy);
    free(seen);
    return st;
}

static void free_draft(draft *d)
{
    free(d->tasks.data);
    free(d->keys.data);
    free(d->queries.data);
}

static am_status make_draft(const exchange_map *map, double limit, exchange_split *split, draft *d)
{
    *d = (draft){{.width = AM_EXCHANGE_TASK}, {.width = AM_EXCHANGE_MOVE}, {.width = AM_EXCHANGE_MOVE}, 0};
    exchange_balance(map, limit, split);
    am_status st = list_tasks(map, split, &d->tasks);
    if (st == AM_OK)
        st = place_tasks(map, d);
    if (st == AM_OK)
        st = predict(map, split, d);
    if (st != AM_OK)
        free_draft(d);
    return st;
}

/* Whether a limit is worth a try. */
static bool wanted(const exchange_map *map, int i)
{
    const char *const scheme = map->a->scheme;
    const double mean = map->total / (double)map->a->ranks;
    double most = 0;
    for (int64_t r = 0; r < map->a->ranks; r++)
        most = map->home[r] > most ? map->home[r] : most;
    if (strcmp(scheme, "auto") != 0)
        return i == (strcmp(scheme, "home") == 0 ? 0 : AM_EXCHANGE_TRIES - 1);
    return i == 0 || (most > even_enough * mean && most > limits[i] * mean);
}

static am_status choose(const exchange_map *map, exchange_split *split, am_exchange_plan_args *a)
{
    draft best = {0};
    for (int i = 0; i < AM_EXCHANGE_TRIES; i++) {
        if (!wanted(map, i))
            continue;
        draft d;
        const am_status st = make_draft(map, limits[i], split, &d);
        if (st != AM_OK) {
            free_draft(&best);
            return st;
        }
        a->tried[a->n_tried][0] = limits[i];
        a->tried[a->n_tried][1] = d.seconds;
        const bool better = a->n_tried == 0 || d.seconds < best.seconds;
        free_draft(better ? &best : &d);
        if (better) {
            best = d;
            a->chosen = a->n_tried;
        }
        a->n_tried++;
    }
    a->tasks = best.tasks;
    a->keys = best.keys;
    a->queries = best.queries;
    return AM_OK;
}

static void *take(char *base, size_t *at, size_t bytes)
{
    void *const p = base ? base + *at : NULL;
    *at += (bytes + 15) / 16 * 16;
    return p;
}

/* Lays out the map and the split from `base`; returns their bytes. */
static size_t place(exchange_map *map, exchange_split *split, char *base)
{
    const size_t chunks = (size_t)map->a->owners.n, ranks = (size_t)map->a->ranks;
    const size_t pieces = chunks + (size_t)map->a->docs.n / 2;
    size_t at = 0;
    split->room = (int64_t)(pieces + 4 * ranks);
    map->chunk_at = take(base, &at, chunks * sizeof *map->chunk_at);
    map->rank_chunks = take(base, &at, chunks * sizeof *map->rank_chunks);
    map->first_chunk = take(base, &at, (ranks + 1) * sizeof *map->first_chunk);
    map->first_piece = take(base, &at, (ranks + 1) * sizeof *map->first_piece);
    map->pieces = take(base, &at, pieces * sizeof *map->pieces);
    map->home = take(base, &at, ranks * sizeof *map->home);
    split->pieces = take(base, &at, pieces * sizeof *split->pieces);
    split->blocks = take(base, &at, (size_t)split->room * sizeof *split->blocks);
    split->cost = take(base, &at, ranks * sizeof *split->cost);
    split->held = take(base, &at, ranks * sizeof *split->held);
    split->passes = take(base, &at, ranks * sizeof *split->passes);
    split->stuck = take(base, &at, ranks);
    return at;
}

am_status am_exchange_plan(am_exchange_plan_args *a, const am_exec *ex)
{
    (void)ex;
    AM_TRY(check_pack(a));
    AM_TRY(check_choice(a));
    exchange_map map = {.a = a, .chunk_rows = a->tokens / a->owners.n};
    exchange_split split = {0};
    char *const memory = calloc(1, place(&map, &split, NULL));
    AM_CHECK(memory != NULL, AM_ERR_NOMEM, "exchange_plan: no memory for %lld documents", (long long)a->docs.n / 2);
    (void)place(&map, &split, memory);
    if (map.chunk_rows > 0) {
        sort_chunks(&map);
        cut_pieces(&map);
    }
    const am_status st = choose(&map, &split, a);
    free(memory);
    return st;
}
