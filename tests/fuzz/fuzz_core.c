/* fuzz_core.c -- bytes as documents, frame costs, plans, moves and tables, straight into the C core.
 *
 * With clang -fsanitize=fuzzer it is a coverage-guided fuzzer (`make fuzz-core`); with -DREPLAY its main runs files, as
 * test_fuzz_core.py does with the corpus. What is refused is refused with a status; what is accepted keeps its laws.
 */
#include "exchange.h"
#include "partition.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HOLDS(what)                                                                                                    \
    do {                                                                                                               \
        if (!(what)) {                                                                                                 \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what);                                                 \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

typedef struct input {
    const uint8_t *at;
    size_t left;
} input;

static const am_exec CPU = {AM_DEV_CPU, 0, NULL};

static uint8_t byte(input *in) { return in->left ? (in->left--, *in->at++) : 0; }

/* Small numbers mostly, and the ones at which arithmetic ends. */
static int64_t number(input *in)
{
    static const int64_t extremes[] = {INT64_MAX, INT64_MIN, INT64_MAX / 2, -1, (int64_t)1 << 31, (int64_t)1 << 62};
    const uint8_t b = byte(in);
    return b < 250 ? b : extremes[b - 250];
}

/* Up to `most` numbers of their own allocation, so that a sanitizer sees its ends. */
static am_i64_array numbers(input *in, int64_t most)
{
    const int64_t n = in->left ? byte(in) % (most + 1) : 0;
    int64_t *data = malloc((n ? n : 1) * sizeof *data);
    for (int64_t i = 0; i < n; i++)
        data[i] = number(in);
    return (am_i64_array){data, n, true};
}

static void release(am_i64_array a) { free((void *)a.data); }

static void frames(input *in)
{
    am_frame_partition_args a = {.world = number(in), .alpha = number(in), .bisect = byte(in) & 1};
    a.patches = numbers(in, 40);
    if (a.world > 1000 || am_frame_partition(&a, &CPU) != AM_OK) /* what is asked for is allocated */
        a.cuts = NULL;
    if (a.cuts != NULL) {
        HOLDS(a.cuts[0] == 0 && a.cuts[a.world] == a.patches.n);
        for (int64_t r = 0; r < a.world; r++)
            HOLDS(a.cuts[r] < a.cuts[r + 1]);
    }
    free(a.cuts);
    release(a.patches);
}

static void documents(input *in)
{
    const int ids = byte(in) & 1;
    am_docs_args a = {.index = numbers(in, 80)};
    if ((ids ? am_docs_from_ids : am_docs_from_offsets)(&a, &CPU) == AM_OK)
        for (int64_t i = 0; i < a.n_docs; i++)
            HOLDS(a.docs[2 * i] <= a.docs[2 * i + 1] && (i == 0 || a.docs[2 * i - 1] <= a.docs[2 * i]));
    else
        a.docs = NULL;
    free(a.docs);
    release(a.index);
}

static void plan(input *in)
{
    static const char *const schemes[] = {"home", "balanced", "heads", "auto", "none"};
    double prices[4];
    for (int i = 0; i < 4; i++)
        prices[i] = (double)byte(in) / 16 - (i == 3);
    am_exchange_plan_args a = {.prices = {prices, 4}};
    a.scheme = schemes[byte(in) % 5];
    a.causal = byte(in) & 1;
    a.ranks = byte(in) % 9;
    a.kv_heads = byte(in) % 5;
    a.heads = a.kv_heads * (byte(in) % 4) + (byte(in) == 255);
    const int wild = byte(in) == 255;
    const int64_t chunks = a.ranks * (1 + byte(in) % 2);
    int64_t *owners = malloc((chunks ? chunks : 1) * sizeof *owners);
    for (int64_t i = 0; i < chunks; i++)
        owners[i] = wild ? number(in) : i % (a.ranks ? a.ranks : 1);
    a.owners = (am_i64_array){owners, chunks, true};
    a.tokens = wild ? number(in) : chunks * (byte(in) % 32);
    am_i64_array edges = numbers(in, 24);
    int64_t *docs = malloc((edges.n + 1) * sizeof *docs), last = 0;
    for (int64_t i = 0; i < edges.n; i++) /* ascending and inside, or whatever comes */
        docs[i] = wild ? edges.data[i]
                       : (last = last + (edges.data[i] & 63) < a.tokens ? last + (edges.data[i] & 63) : a.tokens);
    a.docs = (am_i64_array){docs, edges.n & ~(int64_t)1, true};
    if (am_exchange_plan(&a, &CPU) == AM_OK)
        for (int64_t i = 0; i < a.tasks.n; i++) {
            const int64_t *const t = a.tasks.data + i * a.tasks.width, doc = t[1];
            HOLDS(t[0] >= 0 && t[0] < a.ranks && doc >= 0 && 2 * doc < a.docs.n);
            HOLDS(docs[2 * doc] <= t[2] && t[2] < t[3] && t[3] <= docs[2 * doc + 1]);
            HOLDS(t[8] >= 0 && t[9] >= 1 && t[8] + t[9] <= a.heads);
        }
    free(a.tasks.data);
    free(a.keys.data);
    free(a.queries.data);
    free(owners);
    free(docs);
    release(edges);
}

static am_tensor rows_of(int64_t n, int64_t width)
{
    return (am_tensor){.data = calloc(n * width ? n * width : 1, 4),
                       .shape = {n, width},
                       .stride = {width, 1},
                       .ndim = 2,
                       .dtype = AM_F32};
}

/* Moves of any numbers over arrays of a few rows: refused, or inside. */
static void moves(input *in)
{
    const int64_t n_x = byte(in) % 12, n_out = byte(in) % 12, n_own = byte(in) % 5, width = 1 + byte(in) % 3;
    const uint8_t flags = byte(in);
    am_tensor x = rows_of(n_x, width), out = rows_of(n_out, width), own = rows_of(n_own, width);
    am_i64_array some = numbers(in, 36), others = numbers(in, 18);
    am_exchange_rows_args a = {out, x, own, some, others, number(in), flags & 1, flags & 2};
    if (flags & 4)
        a.own = (am_tensor){0}, a.own_moves = (am_i64_array){0}, a.own_after = 0;
    (flags & 8 ? am_exchange_copy : am_exchange_sum)(&a, &CPU);
    am_exchange_table_args t = {
        .moves = some, .rows_x = n_x, .rows_out = n_out, .reverse = flags & 1, .runs = flags & 2};
    if (am_exchange_table(&t, &CPU) == AM_OK) {
        am_tensor table = {.data = t.table.data,
                           .shape = {t.table.n, AM_EXCHANGE_ENTRY},
                           .stride = {AM_EXCHANGE_ENTRY, 1},
                           .ndim = 2,
                           .dtype = AM_I64};
        const int64_t rows = t.table.n ? t.table.data[(t.table.n - 1) * AM_EXCHANGE_ENTRY] : 0;
        am_exchange_by_args by = {.out = out, .x = x, .table = table, .rows = rows};
        am_exchange_copy_by(&by, &CPU);
    }
    am_exchange_index_args i = {.moves = some,
                                .own_moves = a.own_moves,
                                .own_after = a.own_after,
                                .rows_x = n_x,
                                .rows_own = n_own,
                                .rows_out = n_out,
                                .reverse = flags & 1,
                                .runs = flags & 2};
    if (am_exchange_index(&i, &CPU) == AM_OK) {
        am_tensor index = {.data = i.index.data, .shape = {i.index.n}, .stride = {1}, .ndim = 1, .dtype = AM_I64};
        am_exchange_by_args by = {.out = out, .x = x, .own = a.own, .table = index};
        am_exchange_sum_by(&by, &CPU);
    }
    free(t.table.data);
    free(i.index.data);
    free(x.data);
    free(out.data);
    free(own.data);
    release(some);
    release(others);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input in = {data, size};
    void (*const kinds[])(input *) = {frames, documents, plan, moves};
    kinds[byte(&in) % 4](&in);
    return 0;
}

#ifdef REPLAY
int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        uint8_t data[4096];
        FILE *file = fopen(argv[i], "rb");
        if (file == NULL)
            return 2;
        LLVMFuzzerTestOneInput(data, fread(data, 1, sizeof data, file));
        fclose(file);
    }
    printf("%d inputs: fine\n", argc - 1);
    return 0;
}
#endif
