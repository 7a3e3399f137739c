#include "partition.h"

#include <stdlib.h>

static am_status check(const am_frame_partition_args *a)
{
    AM_CHECK(a->world >= 1, AM_ERR_ARG, "frame_partition: world is %lld, at least 1 is needed", (long long)a->world);
    AM_CHECK(a->alpha >= 0, AM_ERR_ARG, "frame_partition: alpha is %lld, it must not be negative", (long long)a->alpha);
    int64_t largest = 0;
    for (int64_t i = 0; i < a->patches.n; i++) {
        const int64_t p = a->patches.data[i];
        AM_CHECK(p >= 0, AM_ERR_ARG, "frame_partition: patches[%lld] is %lld, it must not be negative", (long long)i,
                 (long long)p);
        largest = p > largest ? p : largest;
    }
    __int128 bound = (__int128)largest + a->alpha;
    bound = largest == 0 ? 0 : bound > INT64_MAX ? (__int128)1 << 100 : bound * largest;
    AM_CHECK(bound <= INT64_MAX && bound * a->patches.n <= INT64_MAX, AM_ERR_ARG,
             "frame_partition: %lld frames of up to %lld patches with alpha %lld may cost 2^63 or more",
             (long long)a->patches.n, (long long)largest, (long long)a->alpha);
    return AM_OK;
}

/* running[i] = cost of the first i units. */
static void accumulate(const am_frame_partition_args *a, int64_t *running)
{
    running[0] = 0;
    for (int64_t i = 0; i < a->patches.n; i++) {
        const int64_t p = a->patches.data[i];
        running[i + 1] = running[i] + (p ? p * (p + a->alpha) : 0);
    }
}

/* Largest i in [low, high] for which units [from, i) cost at most `bound`; they do for i = low. The difference is
 * compared, since running[from] + bound may pass 2^63. */
static int64_t last_within(const int64_t *running, int64_t from, int64_t low, int64_t high, int64_t bound)
{
    while (low < high) {
        const int64_t middle = low + (high - low + 1) / 2;
        if (running[middle] - running[from] <= bound)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

static bool fits(const int64_t *running, int64_t n, int64_t world, int64_t bound)
{
    int64_t at = 0;
    for (int64_t r = 0; r < world && at < n; r++)
        at = last_within(running, at, at, n, bound);
    return at == n;
}

static void cut_minimax(const int64_t *running, int64_t n, int64_t world, int64_t *cuts)
{
    int64_t low = 0, high = running[n];
    for (int64_t i = 0; i < n; i++)
        low = running[i + 1] - running[i] > low ? running[i + 1] - running[i] : low;
    const int64_t mean = running[n] / world + (running[n] % world != 0);
    low = mean > low ? mean : low;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (fits(running, n, world, middle))
            high = middle;
        else
            low = middle + 1;
    }
    cuts[0] = 0;
    for (int64_t r = 1; r <= world; r++) { /* fill to the bound, but leave a unit for every rank that follows */
        const int64_t latest = n - (world - r);
        cuts[r] = last_within(running, cuts[r - 1], cuts[r - 1] + 1, latest, low);
    }
}

static void cut_bisect(const int64_t *running, int64_t n, int64_t world, int64_t *cuts)
{
    cuts[0] = 0;
    cuts[world] = n;
    int64_t within = 0; /* units whose running cost is at most the target; grows with r */
    for (int64_t r = 1; r < world; r++) {
        const __int128 target = (__int128)running[n] * r;
        while (within < n && (__int128)running[within + 1] * world <= target)
            within++;
        const int64_t earliest = cuts[r - 1] + 1, latest = n - (world - r);
        cuts[r] = within < earliest ? earliest : within > latest ? latest : within;
    }
}

am_status am_index_array(am_index_array_args *a, const am_exec *ex)
{
    (void)a;
    (void)ex;
    return AM_OK;
}

am_status am_frame_partition(am_frame_partition_args *a, const am_exec *ex)
{
    (void)ex;
    AM_TRY(check(a));
    const int64_t n = a->patches.n;
    if (n < a->world)
        return AM_OK;
    int64_t *running = malloc((size_t)(n + 1) * sizeof *running);
    a->cuts = malloc((size_t)(a->world + 1) * sizeof *a->cuts);
    if (running == NULL || a->cuts == NULL) {
        free(running);
        return am_fail(AM_ERR_NOMEM, "frame_partition: no memory for %lld frames", (long long)n);
    }
    accumulate(a, running);
    (a->bisect ? cut_bisect : cut_minimax)(running, n, a->world, a->cuts);
    free(running);
    return AM_OK;
}

static bool starts_document(const am_i64_array *ids, int64_t i)
{
    return ids->data[i] != 0 && (i == 0 || ids->data[i] != ids->data[i - 1]);
}

static am_status allocate_docs(am_docs_args *a, const char *name)
{
    a->docs = malloc((size_t)(a->n_docs ? a->n_docs : 1) * 2 * sizeof *a->docs);
    AM_CHECK(a->docs != NULL, AM_ERR_NOMEM, "%s: no memory for %lld documents", name, (long long)a->n_docs);
    return AM_OK;
}

am_status am_docs_from_ids(am_docs_args *a, const am_exec *ex)
{
    (void)ex;
    const am_i64_array *const ids = &a->index;
    a->n_docs = 0;
    for (int64_t i = 0; i < ids->n; i++)
        a->n_docs += starts_document(ids, i);
    AM_TRY(allocate_docs(a, "docs_from_ids"));
    int64_t doc = -1;
    for (int64_t i = 0; i < ids->n; i++) {
        if (ids->data[i] == 0)
            continue;
        if (starts_document(ids, i))
            a->docs[2 * ++doc] = i;
        a->docs[2 * doc + 1] = i + 1;
    }
    return AM_OK;
}

am_status am_docs_from_offsets(am_docs_args *a, const am_exec *ex)
{
    (void)ex;
    const am_i64_array *const offsets = &a->index;
    AM_CHECK(offsets->n >= 1, AM_ERR_SHAPE, "docs_from_offsets: cu_seqlens is empty, it starts with 0");
    AM_CHECK(offsets->data[0] == 0, AM_ERR_ARG, "docs_from_offsets: cu_seqlens[0] is %lld, not 0",
             (long long)offsets->data[0]);
    for (int64_t i = 1; i < offsets->n; i++)
        AM_CHECK(offsets->data[i] >= offsets->data[i - 1], AM_ERR_ARG,
                 "docs_from_offsets: cu_seqlens[%lld] is %lld, less than the %lld before it", (long long)i,
                 (long long)offsets->data[i], (long long)offsets->data[i - 1]);
    a->n_docs = offsets->n - 1;
    AM_TRY(allocate_docs(a, "docs_from_offsets"));
    for (int64_t i = 0; i < a->n_docs; i++) {
        a->docs[2 * i] = offsets->data[i];
        a->docs[2 * i + 1] = offsets->data[i + 1];
    }
    return AM_OK;
}
