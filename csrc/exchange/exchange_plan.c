/* exchange_plan.c -- documents and chunks in, tasks and moves out: pure host integers, no threads. */
#include "exchange_plan.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const double even_enough = 1.05; /* auto does not look further where home is this close to the mean */
static const double evenest = 1.02;
static const double row_limits[] = {INFINITY, 2.0, 1.5, 1.25, 1.1, evenest};
static const double head_shares[] = {1.0, 1.0 / 4, 1.0 / 16};
enum { ROW_LIMITS = 6, HEAD_SHARES = 3 };

typedef struct draft { /* one way to do it */
    am_exchange_list tasks, keys, queries;
    am_exchange_try as;
    double largest; /* cost of a rank */
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
    const char *const schemes[] = {"home", "balanced", "heads", "auto"};
    bool known = false;
    for (int i = 0; i < 4; i++)
        known = known || strcmp(a->scheme, schemes[i]) == 0;
    AM_CHECK(known, AM_ERR_ARG, "exchange_plan: scheme is '%s', one of home, balanced, heads, auto is needed",
             a->scheme);
    AM_CHECK(a->kv_heads >= 1 && a->heads >= 1 && a->heads % a->kv_heads == 0, AM_ERR_SHAPE,
             "exchange_plan: %lld query heads are not a multiple of %lld key heads", (long long)a->heads,
             (long long)a->kv_heads);
    AM_CHECK(a->tokens <= INT64_MAX / a->heads, AM_ERR_ARG, "exchange_plan: %lld rows of %lld heads are beyond 2^63",
             (long long)a->tokens, (long long)a->heads);
    return AM_OK;
}

/* The next record of a list, or NULL without memory. */
static int64_t *push(am_exchange_list *list)
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

typedef struct rows_in { /* where rows go: heads [head, head + heads) of them, from head `at` of rank dst's buffer on */
    am_exchange_list *list;
    int64_t dst, head, heads, at;
} rows_in;

/* Adds a move of rows, or lengthens the last one where it goes on. A record is written field by field: a copy of it
 * would wait for them. */
static am_status add_move(const rows_in *to, int64_t src, int64_t from, int64_t rows)
{
    am_exchange_list *const list = to->list;
    int64_t *m = list->n ? list->data + list->width * (list->n - 1) : NULL;
    if (m && m[0] == src && m[1] == to->dst && m[5] == to->head && m[6] == to->heads && m[2] + m[4] == from &&
        m[3] + m[4] * m[6] == to->at) {
        m[4] += rows;
        return AM_OK;
    }
    m = push(list);
    AM_CHECK(m != NULL, AM_ERR_NOMEM, "exchange_plan: no memory for %lld moves", (long long)list->n);
    m[0] = src;
    m[1] = to->dst;
    m[2] = from;
    m[3] = to->at;
    m[4] = rows;
    m[5] = to->head;
    m[6] = to->heads;
    return AM_OK;
}

/* Moves of rows [begin, end) of the pack from whoever holds them; `at` is behind them then. */
static am_status add_rows(const exchange_map *map, rows_in *to, int64_t begin, int64_t end)
{
    while (begin < end) {
        const int64_t c = begin / map->chunk_rows, stop = exchange_min(end, (c + 1) * map->chunk_rows);
        const int64_t from = map->chunk_at[c] + begin - c * map->chunk_rows;
        AM_TRY(add_move(to, map->a->owners.data[c], from, stop - begin));
        to->at += (stop - begin) * to->heads;
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
                map->pieces[map->n_pieces++] = (exchange_block){r, d, begin, end, 0, a->heads};
                map->home[r] += exchange_cost(map, d, begin, end);
            }
        }
        map->total += map->home[r];
    }
    map->first_piece[a->ranks] = map->n_pieces;
}

/* A block's groups of heads, a task each; rows that go on become one task. `last`: the task before, or NULL. */
static am_status list_block(const exchange_map *map, const exchange_block *block, am_exchange_list *tasks)
{
    int64_t *last = tasks->n ? tasks->data + AM_EXCHANGE_TASK * (tasks->n - 1) : NULL;
    if (last && (last[0] != block->rank || last[1] != block->doc))
        last = NULL;
    if (last && last[3] == block->begin) {
        last[3] = block->end;
        return AM_OK;
    }
    const int64_t round = last ? last[4] + 1 : 0, stop = block->head + block->heads;
    for (int64_t head = block->head, n; head < stop; head += n) {
        n = exchange_group(map, head, stop - head);
        int64_t *const task = push(tasks);
        AM_CHECK(task != NULL, AM_ERR_NOMEM, "exchange_plan: no memory for %lld tasks", (long long)tasks->n);
        task[0] = block->rank;
        task[1] = block->doc;
        task[2] = block->begin;
        task[3] = block->end;
        task[4] = round;
        task[5] = task[6] = task[7] = 0;
        task[8] = head;
        task[9] = n;
    }
    return AM_OK;
}

/* Tasks in order of rank and place: what stays, merged with what was given. */
static am_status list_tasks(const exchange_map *map, const exchange_split *split, am_exchange_list *tasks)
{
    const exchange_block *p = split->pieces, *const p_end = p + map->n_pieces;
    const exchange_block *b = split->blocks, *const b_end = b + split->n_blocks;
    while (p < p_end || b < b_end) {
        const bool given =
            p == p_end || (b < b_end && (b->rank < p->rank || (b->rank == p->rank && b->begin < p->begin)));
        const exchange_block *const next = given ? b++ : p++;
        if (next->begin < next->end)
            AM_TRY(list_block(map, next, tasks));
    }
    return AM_OK;
}

static bool has_all_heads(const exchange_map *map, const int64_t *task) { return task[9] == map->a->heads; }

/* Places the key rows of one rank's tasks [t, stop) with all heads: a document's once, as far as any of them reads. */
static am_status place_keys(const exchange_map *map, int64_t *t, const int64_t *stop, rows_in *keys)
{
    while (t < stop) {
        const int64_t doc = t[1], start = exchange_start(map, doc);
        int64_t end = start;
        for (; t < stop && t[1] == doc; t += AM_EXCHANGE_TASK) {
            if (!has_all_heads(map, t))
                continue;
            t[6] = keys->at;
            t[7] = exchange_keys_end(map, doc, t[3]) - start;
            end = exchange_max(end, start + t[7]);
        }
        AM_TRY(add_rows(map, keys, start, end));
    }
    return AM_OK;
}

static am_status place_queries(const exchange_map *map, int64_t *t, const int64_t *stop, rows_in *queries)
{
    int64_t left = 0;
    for (const int64_t *task = t; task < stop; task += AM_EXCHANGE_TASK)
        left += has_all_heads(map, task);
    for (int64_t round = 0; left > 0; round++)
        for (int64_t *task = t; task < stop; task += AM_EXCHANGE_TASK) {
            if (!has_all_heads(map, task) || task[4] != round)
                continue;
            task[5] = queries->at;
            AM_TRY(add_rows(map, queries, task[2], task[3]));
            left--;
        }
    return AM_OK;
}

/* Places the tasks of [t, stop) that have the group of heads of t, which is one of several. */
static am_status place_group(const exchange_map *map, int64_t *t, const int64_t *stop, rows_in *keys, rows_in *queries)
{
    const int64_t of_key = map->a->heads / map->a->kv_heads;
    queries->head = t[8];
    queries->heads = t[9];
    keys->head = t[8] / of_key;
    keys->heads = (t[9] + of_key - 1) / of_key;
    for (int64_t *task = t; task < stop; task += AM_EXCHANGE_TASK) {
        if (task[8] != queries->head || task[9] != queries->heads)
            continue;
        task[5] = queries->at;
        task[6] = keys->at;
        task[7] = exchange_stop(map, task[1]) - exchange_start(map, task[1]);
        AM_TRY(add_rows(map, keys, exchange_start(map, task[1]), exchange_stop(map, task[1])));
        AM_TRY(add_rows(map, queries, task[2], task[3]));
    }
    return AM_OK;
}

static am_status place_tasks(const exchange_map *map, draft *d)
{
    if (d->tasks.n == 0) /* there is no list then */
        return AM_OK;
    const int64_t *const end = d->tasks.data + AM_EXCHANGE_TASK * d->tasks.n;
    for (int64_t *t = d->tasks.data, *stop; t < end; t = stop) {
        for (stop = t; stop < end && stop[0] == t[0];)
            stop += AM_EXCHANGE_TASK;
        rows_in keys = {&d->keys, t[0], 0, map->a->kv_heads, 0}, queries = {&d->queries, t[0], 0, map->a->heads, 0};
        AM_TRY(place_keys(map, t, stop, &keys));
        AM_TRY(place_queries(map, t, stop, &queries));
        for (; d->as.split && t < stop; t += AM_EXCHANGE_TASK)
            if (t[7] == 0) /* not placed yet: a task has keys */
                AM_TRY(place_group(map, t, stop, &keys, &queries));
    }
    return AM_OK;
}

/* Adds the seconds that a list's moves take to the ranks at both ends. */
static void add_traffic(const am_exchange_list *moves, double head_price, double message, int64_t *seen, double *busy)
{
    for (int64_t i = 0; i < moves->n; i++) {
        const int64_t *const m = moves->data + AM_EXCHANGE_MOVE * i;
        if (m[0] == m[1])
            continue;
        const double seconds = head_price * (double)(m[4] * m[6]) + (seen[m[0]] == m[1] ? 0 : message);
        seen[m[0]] = m[1]; /* moves come by dst */
        busy[m[0]] += seconds;
        busy[m[1]] += seconds;
    }
}

static am_status predict(const exchange_map *map, const exchange_split *split, draft *d)
{
    const int64_t ranks = map->a->ranks;
    const double *const price = map->a->prices.data;
    const double query = price[1] / (double)map->a->heads, key = price[2] / (double)map->a->kv_heads;
    double *const busy = calloc((size_t)ranks, sizeof *busy);
    int64_t *const seen = malloc((size_t)ranks * sizeof *seen);
    double traffic = 0;
    am_status st = AM_OK;
    if (busy == NULL || seen == NULL) {
        st = am_fail(AM_ERR_NOMEM, "exchange_plan: no memory for %lld ranks", (long long)ranks);
        goto out;
    }
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t r = 0; r < ranks; r++)
            seen[r] = -1;
        add_traffic(pass ? &d->queries : &d->keys, pass ? query : key, price[3], seen, busy);
    }
    for (int64_t r = 0; r < ranks; r++) {
        d->largest = split->cost[r] > d->largest ? split->cost[r] : d->largest;
        traffic = busy[r] > traffic ? busy[r] : traffic;
    }
    d->as.seconds = price[0] * d->largest + traffic;
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

/* The draft with the heads of the `n` costliest wide documents split, and the other rows balanced within a limit. */
static am_status make_draft(const exchange_map *map, double limit, int64_t n, exchange_split *split, draft *d)
{
    *d = (draft){{.width = AM_EXCHANGE_TASK}, {.width = AM_EXCHANGE_MOVE}, {.width = AM_EXCHANGE_MOVE}};
    d->as = (am_exchange_try){.limit = limit, .split = n};
    exchange_stay(map, split);
    if (n > 0)
        exchange_split_heads(map, n, evenest, split);
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

typedef struct choice {
    const exchange_map *map;
    exchange_split *split;
    am_exchange_plan_args *a;
    draft best;
    double mean;
    bool evenly; /* what is even enough comes before what is cheap */
} choice;

static bool is_better(const choice *c, const draft *d)
{
    const draft *const best = &c->best;
    const double enough = even_enough * c->mean;
    if (c->evenly && (d->largest > enough || best->largest > enough) && d->largest != best->largest)
        return d->largest < best->largest;
    return d->as.seconds < best->as.seconds;
}

/* Makes a draft and keeps the better one; *largest: its largest cost of a rank. */
static am_status attempt(choice *c, double limit, int64_t n, double *largest)
{
    am_exchange_plan_args *const a = c->a;
    draft d;
    AM_TRY(make_draft(c->map, limit, n, c->split, &d));
    const bool better = a->n_tried == 0 || is_better(c, &d);
    *largest = d.largest;
    a->tried[a->n_tried] = d.as;
    free_draft(better ? &c->best : &d);
    if (better) {
        c->best = d;
        a->chosen = a->n_tried;
    }
    a->n_tried++;
    return AM_OK;
}

static am_status try_rows(choice *c, bool home, bool others)
{
    double largest = INFINITY;
    if (home)
        AM_TRY(attempt(c, INFINITY, 0, &largest));
    const double at_home = largest;
    for (int i = 1; i < ROW_LIMITS && others; i++)
        if (home ? at_home > even_enough * c->mean && at_home > row_limits[i] * c->mean : i == ROW_LIMITS - 1)
            AM_TRY(attempt(c, row_limits[i], 0, &largest));
    return AM_OK;
}

/* How many documents cost more than a share of the mean. */
static int64_t count_wide(const exchange_map *map, double cost)
{
    int64_t n = 0;
    while (n < map->n_wide &&
           exchange_cost(map, map->wide[n], exchange_start(map, map->wide[n]), exchange_stop(map, map->wide[n])) > cost)
        n++;
    return n;
}

/* none: rows alone where no document is worth it. */
static am_status try_heads(choice *c, bool none)
{
    int64_t before = none && count_wide(c->map, head_shares[HEAD_SHARES - 1] * c->mean) == 0 ? -1 : 0;
    for (int share = 0; share < HEAD_SHARES; share++) {
        const int64_t n = count_wide(c->map, head_shares[share] * c->mean);
        double largest = 0;
        if (n != before)
            AM_TRY(attempt(c, INFINITY, n, &largest));
        if (largest > evenest * c->mean)
            AM_TRY(attempt(c, evenest, n, &largest));
        before = n;
    }
    return AM_OK;
}

static am_status choose(const exchange_map *map, exchange_split *split, am_exchange_plan_args *a)
{
    choice c = {.map = map, .split = split, .a = a, .mean = map->total / (double)a->ranks};
    am_status st = AM_OK;
    if (strcmp(a->scheme, "heads") == 0) {
        c.evenly = true;
        st = try_heads(&c, true);
    } else {
        const bool all = strcmp(a->scheme, "auto") == 0, rows = strcmp(a->scheme, "balanced") == 0;
        double most = 0;
        for (int64_t r = 0; r < a->ranks; r++)
            most = map->home[r] > most ? map->home[r] : most;
        st = try_rows(&c, !rows, all || rows);
        if (st == AM_OK && all && most > even_enough * c.mean)
            st = try_heads(&c, false);
    }
    if (st != AM_OK) {
        free_draft(&c.best);
        return st;
    }
    a->tasks = c.best.tasks;
    a->keys = c.best.keys;
    a->queries = c.best.queries;
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
    const size_t groups = chunks * (size_t)exchange_min(map->a->ranks, map->a->heads);
    split->room = (int64_t)(pieces + 4 * ranks + groups);
    map->chunk_at = take(base, &at, chunks * sizeof *map->chunk_at);
    map->rank_chunks = take(base, &at, chunks * sizeof *map->rank_chunks);
    map->first_chunk = take(base, &at, (ranks + 1) * sizeof *map->first_chunk);
    map->first_piece = take(base, &at, (ranks + 1) * sizeof *map->first_piece);
    map->pieces = take(base, &at, pieces * sizeof *map->pieces);
    map->home = take(base, &at, ranks * sizeof *map->home);
    map->wide = take(base, &at, chunks * sizeof *map->wide);
    split->pieces = take(base, &at, pieces * sizeof *split->pieces);
    split->blocks = take(base, &at, (size_t)split->room * sizeof *split->blocks);
    split->cost = take(base, &at, ranks * sizeof *split->cost);
    split->held = take(base, &at, ranks * sizeof *split->held);
    split->passes = take(base, &at, ranks * sizeof *split->passes);
    split->shares = take(base, &at, ranks * sizeof *split->shares);
    split->is_wide = take(base, &at, (size_t)map->a->docs.n / 2);
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
        exchange_find_wide(&map);
    }
    const am_status st = choose(&map, &split, a);
    free(memory);
    return st;
}
