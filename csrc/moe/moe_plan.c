#include "moe_plan.h"

#include <string.h>

#include "am_pool.h"

enum { LINE = 64, CLASSES = 256, WORD = 4 };

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t depth_of(const moe_row *row, int64_t elements)
{
    return am_round_up(moe_blocks(elements, row->ku), row->grain);
}

/* Rows of an expert's blocks: as few blocks as MOE_BLOCK allows, about equal, whole groups. */
static int64_t block_rows(int64_t rows)
{
    return rows ? am_round_up(moe_blocks(rows, moe_blocks(rows, MOE_BLOCK)), MOE_GROUP) : MOE_BLOCK;
}

typedef struct weight_shape {
    int64_t experts, height, width;
} weight_shape;

static weight_shape weight_of(const moe_job *job, int weight)
{
    const weight_shape shapes[] = {{job->experts, 2 * job->inner, job->hidden},
                                   {job->experts, job->hidden, job->inner},
                                   {1, job->experts, job->hidden}};
    return shapes[weight];
}

static int64_t count_weight_tasks(const moe_job *job)
{
    int64_t tasks = 0;
    for (int w = 0; w < 3; w++) {
        const weight_shape s = weight_of(job, w);
        tasks += s.experts * moe_blocks(s.height, MOE_HEIGHT) * moe_blocks(s.width, job->grad_columns);
    }
    return tasks;
}

static int64_t most_tasks(const moe_job *job)
{
    const int64_t pairs = job->tokens * job->top_k;
    const int64_t blocks = (pairs / MOE_BLOCK + job->experts) * moe_blocks(job->inner, job->pair_columns);
    int64_t most = larger(moe_blocks(job->tokens, MOE_GROUP), moe_blocks(job->experts, job->row->nr));
    most = larger(larger(most, blocks), moe_blocks(job->hidden, job->sum_columns));
    return job->backward ? larger(most, count_weight_tasks(job)) : most;
}

/* Places a task's buffers from `base`; returns their bytes. */
static size_t place_buffers(const moe_job *job, char *base, moe_buffers *b)
{
    const int64_t nr = job->row->nr, strip = MOE_DEPTH / job->row->ku;
    const int64_t height = am_round_up(MOE_HEIGHT, job->row->mr);
    const int64_t pair = am_round_up(job->pair_columns, nr), block = am_round_up(job->sum_columns, nr);
    int64_t right = job->backward ? pair * job->depth_h : 2 * pair * job->depth_h;
    right = larger(right, block * (job->backward ? larger(job->depth_2i, job->depth_e) : job->depth_i));
    int64_t left = MOE_GROUP * job->depth_h, sums = MOE_GROUP * larger(2 * pair, block);
    if (job->backward) {
        left = larger(left, height * strip);
        right = larger(right, am_round_up(job->grad_columns, nr) * strip);
        sums = larger(larger(sums, height * am_round_up(job->grad_columns, nr)), job->experts);
    } else {
        sums = larger(sums, MOE_GROUP * am_round_up(job->experts, nr));
    }
    size_t at = 0;
    b->left = am_take(base, &at, left * WORD);
    b->right = am_take(base, &at, right * WORD);
    b->c = am_take(base, &at, sums * WORD);
    for (int i = 0; i < 4; i++)
        b->line[i] = am_take(base, &at, job->line * (int64_t)sizeof(float));
    b->picks = am_take(base, &at, job->top_k * (int64_t)sizeof *b->picks);
    return at;
}

/* Everything but the slots; returns its bytes. */
static size_t place_shared(moe_job *job, char *base)
{
    const int64_t pairs = job->tokens * job->top_k, rows = pairs + MOE_GROUP, wide = sizeof(int64_t);
    size_t at = 0;
    job->real = am_take(base, &at, job->tokens * wide);
    job->offset = am_take(base, &at, (job->experts + 1) * wide);
    job->order = am_take(base, &at, job->experts * wide);
    job->token = am_take(base, &at, pairs * wide);
    job->pair = am_take(base, &at, pairs * wide);
    job->place = am_take(base, &at, pairs * wide);
    job->tasks = am_take(base, &at, most_tasks(job) * (int64_t)sizeof *job->tasks);
    job->slots.busy = am_take(base, &at, AM_MAX_THREADS * (int64_t)sizeof *job->slots.busy);
    job->act = am_take(base, &at, rows * job->depth_i * WORD);
    if (job->backward) {
        job->dproducts = am_take(base, &at, rows * job->depth_2i * WORD);
        job->dweight = am_take(base, &at, pairs * moe_blocks(job->inner, job->pair_columns) * WORD);
        job->dlogits = am_take(base, &at, (job->tokens + MOE_GROUP) * job->depth_e * WORD);
    } else {
        job->router = am_take(base, &at, am_round_up(job->experts, job->row->nr) * job->depth_h * WORD);
        job->partial = am_take(base, &at, moe_blocks(job->tokens, MOE_GROUP) * job->experts * (int64_t)sizeof(double));
    }
    if (job->a->hidden.dtype != AM_F32 && (job->backward || job->a->down.dtype != AM_NONE))
        job->sum = am_take(base, &at, job->tokens * job->hidden * (int64_t)sizeof(float));
    return at;
}

void moe_plan(const am_moe_args *a, const moe_row *row, bool backward, moe_job *job, size_t *bytes)
{
    *job = (moe_job){.a = a, .row = row, .backward = backward, .top_k = a->top_k};
    job->tokens = a->hidden.shape[0];
    job->hidden = a->hidden.shape[1];
    job->experts = a->router_weight.dtype != AM_NONE ? a->router_weight.shape[0] : a->down.shape[0];
    job->inner = a->down.dtype != AM_NONE ? a->down.shape[2] : 0;
    job->depth_h = depth_of(row, job->hidden);
    job->depth_i = depth_of(row, job->inner);
    job->depth_2i = depth_of(row, 2 * job->inner);
    job->depth_e = depth_of(row, job->experts);
    job->pair_columns = job->hidden > 1024 ? 32 : job->hidden > 512 ? 64 : 128;
    job->sum_columns = am_min(128, am_round_up(larger(1, moe_blocks(job->hidden, 4)), 32));
    job->grad_columns = 128;
    while (job->grad_columns > row->nr && job->grad_columns > 32 && count_weight_tasks(job) < 32)
        job->grad_columns /= 2;
    job->line = am_round_up(larger(job->experts, job->pair_columns), LINE);
    moe_buffers unused;
    job->slots.bytes = place_buffers(job, NULL, &unused);
    job->slots.n = am_num_threads();
    *bytes = place_shared(job, NULL) + (size_t)job->slots.n * job->slots.bytes + LINE; /* LINE: to align the start */
}

static void list_real(moe_job *job)
{
    const am_tensor *const padding = &job->a->padding;
    job->n_real = 0;
    for (int64_t t = 0; t < job->tokens; t++)
        if (padding->dtype == AM_NONE || ((const uint8_t *)padding->data)[t * padding->stride[0]] == 0)
            job->real[job->n_real++] = t;
}

am_status moe_layout(moe_job *job, const am_tensor *workspace)
{
    char *start;
    AM_TRY(am_slots_lay(&job->slots, "moe", workspace, place_shared(job, NULL), &start));
    place_shared(job, start);
    am_slots_reset(&job->slots);
    list_real(job);
    return AM_OK;
}

static int64_t rows_of(const moe_job *job, int64_t expert) { return job->offset[expert + 1] - job->offset[expert]; }

/* A class that grows with the number of rows: four to an octave. */
static int row_class(int64_t rows)
{
    const uint64_t cost = (uint64_t)rows + 4;
    const int octave = 63 - __builtin_clzll(cost);
    return 4 * octave + (int)(cost >> (octave - 2) & 3);
}

static void order_experts(moe_job *job)
{
    int64_t start[CLASSES + 1] = {0};
    for (int64_t e = 0; e < job->experts; e++)
        start[CLASSES - row_class(rows_of(job, e))]++;
    for (int c = 0; c < CLASSES; c++)
        start[c + 1] += start[c];
    for (int64_t e = 0; e < job->experts; e++)
        job->order[start[CLASSES - 1 - row_class(rows_of(job, e))]++] = e;
}

void moe_sort(moe_job *job)
{
    const int32_t *const chosen = job->a->chosen.data;
    memset(job->offset, 0, (size_t)(job->experts + 1) * sizeof *job->offset);
    for (int64_t i = 0; i < job->n_real; i++)
        for (int64_t p = job->real[i] * job->top_k; p < (job->real[i] + 1) * job->top_k; p++)
            if (chosen[p] >= 0)
                job->offset[chosen[p] + 1]++;
    for (int64_t e = 0; e < job->experts; e++)
        job->offset[e + 1] += job->offset[e];
    order_experts(job);
    for (int64_t i = 0; i < job->n_real; i++)
        for (int64_t p = job->real[i] * job->top_k; p < (job->real[i] + 1) * job->top_k; p++) {
            job->place[p] = -1;
            if (chosen[p] < 0)
                continue;
            const int64_t row = job->offset[chosen[p]]++;
            job->token[row] = job->real[i];
            job->pair[row] = p;
            job->place[p] = row;
        }
    for (int64_t e = job->experts; e > 0; e--) /* each start has moved to the next one */
        job->offset[e] = job->offset[e - 1];
    job->offset[0] = 0;
}

static void add_task(moe_job *job, moe_task task) { job->tasks[job->n_tasks++] = task; }

static void list_blocks(moe_job *job) /* (expert, rows, columns of I) */
{
    for (int64_t i = 0; i < job->experts; i++) {
        const int64_t e = job->order[i], rows = rows_of(job, e), block = block_rows(rows);
        for (int64_t first = 0; first < rows; first += block)
            for (int64_t column = 0; column < job->inner; column += job->pair_columns)
                add_task(job, (moe_task){.expert = e,
                                         .first = job->offset[e] + first,
                                         .rows = am_min(block, rows - first),
                                         .column = column});
    }
}

static void list_weight(moe_job *job, int weight)
{
    const weight_shape s = weight_of(job, weight);
    for (int64_t i = 0; i < s.experts; i++)
        for (int64_t first = 0; first < s.height; first += MOE_HEIGHT)
            for (int64_t column = 0; column < s.width; column += job->grad_columns)
                add_task(job, (moe_task){.expert = weight == 2 ? 0 : job->order[i],
                                         .first = first,
                                         .rows = am_min(MOE_HEIGHT, s.height - first),
                                         .column = column,
                                         .weight = weight});
}

static void list_weights(moe_job *job)
{
    const am_moe_args *const a = job->a;
    if (a->drouter.dtype != AM_NONE)
        list_weight(job, 2);
    if (a->dgate_up.dtype != AM_NONE)
        list_weight(job, 0);
    if (a->ddown.dtype != AM_NONE)
        list_weight(job, 1);
}

static void list_tasks(moe_job *job, moe_kind kind)
{
    job->n_tasks = 0;
    switch (kind) {
    case MOE_PACK_ROUTER:
        for (int64_t e = 0; e < job->experts; e += job->row->nr)
            add_task(job, (moe_task){.first = e, .rows = am_min(job->row->nr, job->experts - e)});
        break;
    case MOE_ROUTE:
    case MOE_ROUTE_GRAD:
        for (int64_t i = 0; i < job->n_real; i += MOE_GROUP)
            add_task(job, (moe_task){.first = i, .rows = am_min(MOE_GROUP, job->n_real - i)});
        break;
    case MOE_GATE_UP:
    case MOE_ACT_GRAD: list_blocks(job); break;
    case MOE_WEIGHT_GRAD: list_weights(job); break;
    default:
        for (int64_t column = 0; column < job->hidden; column += job->sum_columns)
            add_task(job, (moe_task){.column = column, .rows = am_min(job->sum_columns, job->hidden - column)});
    }
}

typedef struct pass {
    moe_job *job;
    moe_fn fn;
} pass;

static void run_range(int64_t begin, int64_t end, void *context)
{
    const pass *const p = context;
    moe_job *const job = p->job;
    char *memory;
    const int64_t slot = am_slots_claim(&job->slots, &memory);
    moe_buffers buffers;
    place_buffers(job, memory, &buffers);
    for (int64_t i = begin; i < end; i++)
        p->fn(job, &job->tasks[i], &buffers);
    am_slots_release(&job->slots, slot);
}

void moe_run(moe_job *job, moe_kind kind)
{
    list_tasks(job, kind);
    pass p = {job, job->row->run[kind]};
    am_parallel_for(job->n_tasks, 1, run_range, &p);
}
