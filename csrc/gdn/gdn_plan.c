#include "gdn_plan.h"

#include "am_pool.h"

enum { CLASSES = 256, FEW = 4 }; /* FEW: tasks a thread below which a group is cut */

am_status gdn_check_docs(const am_i64_array *docs, int64_t tokens)
{
    AM_CHECK(docs->n % 2 == 0, AM_ERR_SHAPE, "gated_delta_rule: docs has %lld elements, an even number is needed",
             (long long)docs->n);
    int64_t before = 0;
    for (int64_t i = 0; i < docs->n; i++) {
        AM_CHECK(docs->data[i] >= before, AM_ERR_ARG, "gated_delta_rule: docs[%lld] is %lld, after %lld", (long long)i,
                 (long long)docs->data[i], (long long)before);
        before = docs->data[i];
    }
    AM_CHECK(before <= tokens, AM_ERR_SHAPE, "gated_delta_rule: docs end at %lld, there are %lld tokens",
             (long long)before, (long long)tokens);
    return AM_OK;
}

/* A class that grows with a document's length: four to an octave. */
static int cost_class(int64_t tokens)
{
    const uint64_t cost = 4 + (uint64_t)tokens;
    const int octave = 63 - __builtin_clzll(cost);
    return 4 * octave + (int)(cost >> (octave - 2) & 3);
}

static void list_tasks(gdn_job *job)
{
    int64_t start[CLASSES + 1] = {0};
    const int64_t heads = job->group / job->split;
    for (int64_t d = 0; d < job->n_docs; d++)
        start[CLASSES - cost_class(job->docs[d].n)] += job->key_heads * job->split;
    for (int c = 0; c < CLASSES; c++)
        start[c + 1] += start[c];
    for (int64_t d = 0; d < job->n_docs; d++) {
        int64_t *const at = &start[CLASSES - 1 - cost_class(job->docs[d].n)];
        for (int64_t h = 0; h < job->key_heads; h++)
            for (int64_t first = 0; first < job->group; first += heads)
                job->tasks[(*at)++] = (gdn_task){d, h, first, heads};
    }
}

static float *floats(char *base, size_t *at, int64_t n) { return am_take(base, at, (size_t)n * sizeof(float)); }

static void place_backward(const gdn_job *job, char *base, size_t *at, gdn_buffers *b)
{
    const int64_t dk = job->padded_dk, dv = job->padded_dv;
    b->dstate = floats(base, at, job->group * dk * dv);
    b->state_t = floats(base, at, dk * dv);
    b->v_new_t = floats(base, at, GDN_CHUNK * dv);
    b->dv_new = floats(base, at, GDN_CHUNK * dv);
    b->do_rows = floats(base, at, GDN_CHUNK * dv);
    b->do_panels = floats(base, at, GDN_CHUNK * dv);
    b->dr_rows = floats(base, at, GDN_CHUNK * dv);
    b->m = floats(base, at, GDN_SQUARE);
    b->n = floats(base, at, GDN_SQUARE);
    b->ga = floats(base, at, GDN_SQUARE);
    b->h1 = floats(base, at, GDN_CHUNK * dk);
    b->h2 = floats(base, at, GDN_CHUNK * dk);
    b->h3 = floats(base, at, GDN_CHUNK * dk);
    b->q_panels = floats(base, at, GDN_CHUNK * dk);
    b->k_panels = floats(base, at, GDN_CHUNK * dk);
    b->dq = floats(base, at, GDN_CHUNK * dk);
    b->dk = floats(base, at, GDN_CHUNK * dk);
    b->own = floats(base, at, GDN_CHUNK * dk);
    b->dots = floats(base, at, 4 * GDN_CHUNK);
}

/* Places a task's buffers from `base`; returns their bytes. */
static size_t place_buffers(const gdn_job *job, char *base, gdn_buffers *b)
{
    const int64_t dk = job->padded_dk, dv = job->padded_dv, widest = dk > dv ? dk : dv;
    const int64_t kept = job->backward ? job->step_chunks : 1;
    size_t at = 0;
    b->q = floats(base, &at, GDN_CHUNK * dk);
    b->k = floats(base, &at, GDN_CHUNK * dk);
    b->q_inverse = floats(base, &at, GDN_CHUNK);
    b->k_inverse = floats(base, &at, GDN_CHUNK);
    b->kt = floats(base, &at, GDN_CHUNK * dk);
    b->kk = floats(base, &at, GDN_SQUARE);
    b->qk = floats(base, &at, GDN_SQUARE);
    b->head.hi = floats(base, &at, GDN_CHUNK);
    b->head.lo = floats(base, &at, GDN_CHUNK);
    b->head.e = floats(base, &at, GDN_CHUNK);
    b->head.f = floats(base, &at, GDN_CHUNK);
    b->head.r = floats(base, &at, GDN_CHUNK);
    b->head.beta = floats(base, &at, GDN_CHUNK);
    b->head.d = floats(base, &at, GDN_SQUARE);
    b->head.a = floats(base, &at, GDN_SQUARE);
    b->head.p = floats(base, &at, GDN_SQUARE);
    b->rows = floats(base, &at, GDN_CHUNK * widest);
    b->panel = floats(base, &at, GDN_CHUNK * GDN_PAD);
    b->more_panel = floats(base, &at, GDN_CHUNK * GDN_PAD);
    b->state = floats(base, &at, kept * job->group * dk * dv);
    b->v_new = floats(base, &at, kept * job->group * GDN_CHUNK * dv);
    if (job->backward)
        place_backward(job, base, &at, b);
    return at;
}

/* Everything but the slots; returns its bytes. */
static size_t place_shared(gdn_job *job, char *base)
{
    size_t at = 0;
    job->docs = am_take(base, &at, (size_t)job->n_docs * sizeof *job->docs);
    job->tasks = am_take(base, &at, (size_t)job->n_tasks * sizeof *job->tasks);
    job->slots.busy = am_take(base, &at, AM_MAX_THREADS * sizeof *job->slots.busy);
    return at;
}

am_status gdn_plan(const am_gdn_args *a, const gdn_row *row, bool backward, gdn_job *job, size_t *bytes)
{
    AM_TRY(gdn_check_docs(&a->docs, a->q.shape[0]));
    *job = (gdn_job){.a = a, .row = row, .backward = backward, .n_docs = a->docs.n / 2, .key_heads = a->q.shape[1]};
    job->group = a->v.shape[1] / job->key_heads;
    job->dk = a->q.shape[2];
    job->dv = a->v.shape[2];
    job->padded_dk = am_round_up(job->dk, GDN_PAD);
    job->padded_dv = am_round_up(job->dv, GDN_PAD);
    for (int64_t d = 0; d < job->n_docs; d++) {
        const int64_t chunks = (a->docs.data[2 * d + 1] - a->docs.data[2 * d] + GDN_CHUNK - 1) / GDN_CHUNK;
        job->step_chunks = chunks > job->step_chunks ? chunks : job->step_chunks;
    }
    job->step_chunks = am_min(job->step_chunks, GDN_STEP_CHUNKS);
    /* The value heads of a group share work on their keys; alone, they give the same bits. */
    const bool few = job->n_docs * job->key_heads < (int64_t)FEW * am_num_threads();
    job->split = !backward && few ? job->group : 1;
    job->n_tasks = job->n_docs * job->key_heads * job->split;
    gdn_buffers unused = {0};
    job->slots.bytes = place_buffers(job, NULL, &unused);
    job->slots.n = am_min(am_num_threads(), job->n_tasks > 0 ? job->n_tasks : 1);
    const size_t shared = place_shared(job, NULL);
    *bytes = shared + (size_t)job->slots.n * job->slots.bytes + AM_SLOT_LINE; /* a line: to align the start */
    return AM_OK;
}

am_status gdn_layout(gdn_job *job, const am_tensor *workspace)
{
    char *start;
    AM_TRY(am_slots_lay(&job->slots, "gated_delta_rule", workspace, place_shared(job, NULL), &start));
    place_shared(job, start);
    am_slots_reset(&job->slots);
    int64_t kept = 0;
    for (int64_t d = 0; d < job->n_docs; d++) {
        const int64_t *const ends = job->a->docs.data + 2 * d;
        job->docs[d] = (gdn_doc){ends[0], ends[1] - ends[0], kept};
        kept += ends[1] > ends[0] ? (ends[1] - ends[0] - 1) / AM_GDN_STEP : 0;
    }
    return AM_OK;
}

static void run_range(int64_t begin, int64_t end, void *context)
{
    gdn_job *const job = context;
    char *memory = NULL;
    const int64_t slot = am_slots_claim(&job->slots, &memory);
    gdn_buffers buffers = {0};
    place_buffers(job, memory, &buffers);
    for (int64_t i = begin; i < end; i++)
        (job->backward ? job->row->backward : job->row->forward)(job, &job->tasks[i], &buffers);
    am_slots_release(&job->slots, slot);
}

void gdn_run(gdn_job *job)
{
    list_tasks(job);
    am_parallel_for(job->n_tasks, 1, run_range, job);
}
