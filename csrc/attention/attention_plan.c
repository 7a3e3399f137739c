#include "attention_plan.h"

#include <string.h>

#include "am_pool.h"

enum { LINE = AM_SLOT_LINE, CLASSES = 256 };

static am_status check_docs(const am_i64_array *docs, int64_t tokens, const char *name)
{
    AM_CHECK(docs->n % 2 == 0, AM_ERR_SHAPE, "attention: %s has %lld elements, an even number is needed", name,
             (long long)docs->n);
    int64_t before = 0;
    for (int64_t i = 0; i < docs->n; i++) {
        AM_CHECK(docs->data[i] >= before, AM_ERR_ARG, "attention: %s[%lld] is %lld, after %lld", name, (long long)i,
                 (long long)docs->data[i], (long long)before);
        before = docs->data[i];
    }
    AM_CHECK(before <= tokens, AM_ERR_SHAPE, "attention: %s ends at %lld, there are %lld tokens", name,
             (long long)before, (long long)tokens);
    return AM_OK;
}

am_status attention_check_docs(const am_attention_args *a)
{
    AM_TRY(check_docs(&a->docs, a->q.shape[0], "docs"));
    if (a->docs_k.present)
        AM_TRY(check_docs(&a->docs_k, a->k.shape[0], "docs_k"));
    else
        AM_TRY(check_docs(&a->docs, a->k.shape[0], "docs (of the keys)"));
    AM_CHECK(!a->docs_k.present || a->docs_k.n == a->docs.n, AM_ERR_SHAPE,
             "attention: the keys have %lld documents, the queries %lld", (long long)a->docs_k.n / 2,
             (long long)a->docs.n / 2);
    return AM_OK;
}

static attention_doc doc_of(const am_attention_args *a, int64_t n)
{
    const int64_t *const q = a->docs.data + 2 * n;
    const int64_t *const k = a->docs_k.present ? a->docs_k.data + 2 * n : q;
    attention_doc doc = {.q0 = q[0], .nq = q[1] - q[0], .k0 = k[0], .nk = k[1] - k[0], .columns = 1};
    doc.column = am_round_up(doc.nk, ATTENTION_KEYS);
    if (doc.nk > ATTENTION_COLUMN) {
        const int64_t wanted = am_min((doc.nk + ATTENTION_COLUMN - 1) / ATTENTION_COLUMN, ATTENTION_COLUMNS);
        doc.column = am_round_up((doc.nk + wanted - 1) / wanted, ATTENTION_KEYS);
        doc.columns = (doc.nk + doc.column - 1) / doc.column;
    }
    return doc;
}

static int64_t count_units(const attention_job *job, const attention_doc *doc, attention_kind kind)
{
    const int64_t tiles = (doc->nq * job->group + ATTENTION_ROWS - 1) / ATTENTION_ROWS;
    switch (kind) {
    case ATTENTION_PACK: return (doc->nk + ATTENTION_KEYS - 1) / ATTENTION_KEYS;
    case ATTENTION_FORWARD: return tiles;
    case ATTENTION_BACKWARD: return doc->columns;
    default: return doc->columns > 1 ? tiles : 0;
    }
}

/* A class that grows with the scores a task computes: four to an octave. */
static int cost_class(const attention_job *job, const attention_doc *doc, attention_kind kind, int64_t index)
{
    const int64_t rows = doc->nq * job->group;
    uint64_t cost = 4;
    if (kind == ATTENTION_FORWARD) {
        const int64_t end = am_min(rows, (index + 1) * ATTENTION_ROWS);
        cost += (uint64_t)(end - index * ATTENTION_ROWS) * (uint64_t)(attention_limit(job, doc, end - 1) + 64);
    } else if (kind == ATTENTION_BACKWARD) {
        const int64_t first = index * doc->column, keys = am_min(doc->nk - first, doc->column);
        const int64_t unseen = job->a->causal ? (first + doc->nq - doc->nk) * job->group : 0;
        const int64_t seeing = rows - am_min(rows, unseen < 0 ? 0 : unseen);
        cost += (uint64_t)(keys + 64) * (uint64_t)(seeing + 64);
    }
    const int octave = 63 - __builtin_clzll(cost);
    return 4 * octave + (int)(cost >> (octave - 2) & 3);
}

static void list_tasks(attention_job *job, attention_kind kind)
{
    int64_t start[CLASSES + 1] = {0};
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t d = 0; d < job->n_docs; d++) {
            const attention_doc *const doc = &job->docs[d];
            const int64_t units = count_units(job, doc, kind);
            for (int64_t u = 0; u < units; u++) {
                const int place = CLASSES - 1 - cost_class(job, doc, kind, u);
                if (pass == 0)
                    start[place + 1] += job->heads;
                for (int64_t h = 0; h < job->heads && pass == 1; h++)
                    job->tasks[start[place]++] = (attention_task){.doc = d, .head = h, .index = u};
            }
        }
        for (int c = 0; c < CLASSES && pass == 0; c++)
            start[c + 1] += start[c];
    }
    job->n_tasks = start[CLASSES - 1];
}

/* Places a task's buffers from `base`; returns their bytes. */
static size_t place_buffers(const attention_job *job, char *base, attention_buffers *b)
{
    const bool fp32 = job->row->packed_bytes == sizeof(float);
    const size_t packed = job->row->packed_bytes, wide = (size_t)job->padded_dim;
    const size_t tile = ATTENTION_ROWS * wide, scores = (size_t)ATTENTION_ROWS * ATTENTION_KEYS;
    size_t at = 0;
    b->q = am_take(base, &at, tile * packed);
    b->s = am_take(base, &at, scores * sizeof(float));
    b->p = fp32 ? b->s : am_take(base, &at, scores * packed);
    b->sum = am_take(base, &at, tile * sizeof(float));
    b->top = am_take(base, &at, ATTENTION_ROWS * sizeof(float));
    b->total = am_take(base, &at, ATTENTION_ROWS * sizeof(float));
    b->low = am_take(base, &at, ATTENTION_ROWS * sizeof(float));
    b->seen = am_take(base, &at, ATTENTION_ROWS * sizeof(int64_t));
    if (!job->backward)
        return at;
    const size_t column = (size_t)job->longest_column * wide;
    b->dout = am_take(base, &at, tile * packed);
    b->q_panels = am_take(base, &at, tile * packed);
    b->dout_panels = am_take(base, &at, tile * packed);
    b->dp = am_take(base, &at, scores * sizeof(float));
    b->pt = fp32 ? b->s : am_take(base, &at, scores * packed);
    b->dst = fp32 ? b->dp : am_take(base, &at, scores * packed);
    b->kt = am_take(base, &at, column * packed);
    b->vt = am_take(base, &at, column * packed);
    b->k = am_take(base, &at, column * packed);
    b->dk = am_take(base, &at, column * sizeof(float));
    b->dv = am_take(base, &at, column * sizeof(float));
    return at;
}

/* Everything but the slots; returns its bytes. */
static size_t place_shared(attention_job *job, char *base)
{
    size_t at = 0;
    job->docs = am_take(base, &at, (size_t)job->n_docs * sizeof *job->docs);
    job->tasks = am_take(base, &at, (size_t)job->n_tasks * sizeof *job->tasks);
    job->slots.busy = am_take(base, &at, AM_MAX_THREADS * sizeof *job->slots.busy);
    if (job->backward) {
        job->partial = am_take(base, &at, (size_t)(job->partial_rows * job->dim) * sizeof(float));
    } else {
        const size_t panels = (size_t)(job->packed_rows * job->heads * job->padded_dim) * job->row->packed_bytes;
        job->packed_k = am_take(base, &at, panels);
        job->packed_v = am_take(base, &at, panels);
    }
    return at;
}

am_status attention_plan(const am_attention_args *a, const attention_row *row, bool backward, attention_job *job,
                         size_t *bytes)
{
    AM_TRY(attention_check_docs(a));
    *job = (attention_job){.a = a, .row = row, .backward = backward, .n_docs = a->docs.n / 2, .heads = a->k.shape[1]};
    job->group = a->q.shape[1] / job->heads;
    job->dim = a->q.shape[2];
    job->padded_dim = am_round_up(job->dim, ATTENTION_GRAIN);
    int64_t counts[4] = {0};
    for (int64_t n = 0; n < job->n_docs; n++) {
        const attention_doc doc = doc_of(a, n);
        for (int kind = 0; kind < 4; kind++)
            counts[kind] += count_units(job, &doc, (attention_kind)kind) * job->heads;
        job->packed_rows += am_round_up(doc.nk, ATTENTION_GRAIN);
        job->partial_rows += doc.columns > 1 ? doc.columns * doc.nq * a->q.shape[1] : 0;
        job->longest_column = doc.column > job->longest_column ? doc.column : job->longest_column;
    }
    const int first = backward ? ATTENTION_BACKWARD : ATTENTION_PACK;
    job->n_tasks = counts[first] > counts[first + 1] ? counts[first] : counts[first + 1];
    attention_buffers unused = {0};
    job->slots.bytes = place_buffers(job, NULL, &unused);
    job->slots.n = am_num_threads();
    *bytes = place_shared(job, NULL) + (size_t)job->slots.n * job->slots.bytes + LINE; /* LINE: to align the start */
    return AM_OK;
}

am_status attention_layout(attention_job *job, const am_tensor *workspace)
{
    char *start;
    AM_TRY(am_slots_lay(&job->slots, "attention", workspace, place_shared(job, NULL), &start));
    place_shared(job, start);
    am_slots_reset(&job->slots);
    int64_t packed = 0, partial = 0;
    for (int64_t n = 0; n < job->n_docs; n++) {
        attention_doc *const doc = &job->docs[n];
        *doc = doc_of(job->a, n);
        doc->packed = packed;
        doc->partial = partial;
        packed += am_round_up(doc->nk, ATTENTION_GRAIN);
        partial += doc->columns > 1 ? doc->columns * doc->nq * job->heads * job->group : 0;
    }
    return AM_OK;
}

typedef struct pass {
    attention_job *job;
    attention_fn fn;
} pass;

static void run_range(int64_t begin, int64_t end, void *context)
{
    const pass *const p = context;
    attention_job *const job = p->job;
    char *memory = NULL;
    const int64_t slot = am_slots_claim(&job->slots, &memory); /* held for one chunk of the list */
    attention_buffers buffers = {0};
    place_buffers(job, memory, &buffers);
    for (int64_t i = begin; i < end; i++)
        p->fn(job, &job->tasks[i], &buffers);
    am_slots_release(&job->slots, slot);
}

void attention_run(attention_job *job, attention_kind kind)
{
    list_tasks(job, kind);
    pass p = {job, job->row->run[kind]};
    am_parallel_for(job->n_tasks, 1, run_range, &p);
}
