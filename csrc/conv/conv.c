#include "conv.h"

#include <string.h>

#include "am_cpu.h"
#include "am_math.h"
#include "am_pool.h"
#include "am_rows.h"

enum {
    CONV_TILE = 256, /* channels of a task */
    CONV_ROWS = 128, /* rows of a task of forward; backward's are a run of partials */
    CONV_SUM = 8,    /* rows that are summed in float32 */
    DOCS_GRAIN = 64  /* documents of a parallel chunk */
};

typedef struct conv_piece { /* rows of one document, and the channels of one task */
    const am_conv_args *a;
    int64_t doc, start, end; /* the document */
    int64_t row, stop;       /* its rows that the task owns */
    int64_t first, n;        /* channels */
    int64_t width, channels;
    const float *bias, *weight[AM_CONV_MAX_WIDTH], *flipped[AM_CONV_MAX_WIDTH]; /* flipped: the last tap first */
    double *partial; /* the run's sums from channel `first` on; NULL where nobody asks */
    bool bf16;
} conv_piece;

static bool given(const am_tensor *t) { return t->dtype != AM_NONE; }

static float read_element(const am_tensor *t, int64_t index)
{
    return t->dtype == AM_BF16 ? am_bf16_to_f32(((const am_bf16 *)t->data)[index]) : ((const float *)t->data)[index];
}

static void write_element(const am_tensor *t, int64_t index, float value)
{
    if (t->dtype == AM_BF16)
        ((am_bf16 *)t->data)[index] = am_f32_to_bf16(value);
    else
        ((float *)t->data)[index] = value;
}

/* Place k of the piece's state; 0 where the state is not given. */
static void conv_read_state(float *tile, const am_tensor *state, const conv_piece *p, int64_t k)
{
    if (!given(state)) {
        memset(tile, 0, (size_t)p->n * sizeof *tile);
        return;
    }
    const int64_t at = p->doc * state->stride[0] + p->first * state->stride[1] + k * state->stride[2];
    for (int64_t i = 0; i < p->n; i++)
        tile[i] = read_element(state, at + i * state->stride[1]);
}

static void conv_write_state(const am_tensor *state, const conv_piece *p, int64_t k, const float *tile)
{
    const int64_t at = p->doc * state->stride[0] + p->first * state->stride[1] + k * state->stride[2];
    for (int64_t i = 0; i < p->n; i++)
        write_element(state, at + i * state->stride[1], tile[i]);
}

#define AM_CPU_INC "conv_cpu.inc"
#include "am_each_isa.h"
#define KERNELS(isa) {conv_##isa, conv_grad_##isa}
#if defined(__x86_64__)
#define KERNELS_BY_ISA {KERNELS(scalar), KERNELS(avx2), KERNELS(avx512), KERNELS(avx512)}
#else
#define KERNELS_BY_ISA {KERNELS(scalar), KERNELS(scalar), KERNELS(scalar), KERNELS(scalar)}
#endif

static void (*const kernels[AM_ISA_COUNT][2])(const conv_piece *) = KERNELS_BY_ISA; /* forward, backward */

static const char *const fn = "causal_conv1d";

#ifndef AM_WITH_CUDA
#define am_cuda_causal_conv1d_forward(a, ex) am_no_cuda(fn)
#define am_cuda_causal_conv1d_backward(a, ex) am_no_cuda(fn)
#endif

static am_status check_rows(const char *name, const am_tensor *t, const am_tensor *x)
{
    AM_CHECK(t->dtype == x->dtype, AM_ERR_DTYPE, "%s: %s is %s, x is %s", fn, name, am_dtype_name(t->dtype),
             am_dtype_name(x->dtype));
    AM_CHECK(t->ndim == 2, AM_ERR_SHAPE, "%s: %s has %d axes, 2 are needed (tokens, channels)", fn, name, t->ndim);
    for (int d = 0; d < 2; d++)
        AM_CHECK(t->shape[d] == x->shape[d], AM_ERR_SHAPE, "%s: %s has extent %lld on axis %d, x has %lld", fn, name,
                 (long long)t->shape[d], d, (long long)x->shape[d]);
    AM_CHECK(am_numel(t) == 0 || t->shape[1] == 1 || t->stride[1] == 1, AM_ERR_SHAPE,
             "%s: %s has stride %lld on its last axis, 1 is needed", fn, name, (long long)t->stride[1]);
    return AM_OK;
}

static am_status check_vector(const char *name, const am_tensor *t, const am_tensor *x, int64_t width)
{
    const int axes = width ? 2 : 1;
    AM_CHECK(t->dtype == AM_F32 || t->dtype == AM_BF16, AM_ERR_DTYPE, "%s: %s is %s, float32 or bfloat16 is needed", fn,
             name, am_dtype_name(t->dtype));
    AM_CHECK(t->ndim == axes, AM_ERR_SHAPE, "%s: %s has %d axes, %d is needed", fn, name, t->ndim, axes);
    AM_CHECK(t->shape[0] == x->shape[1], AM_ERR_SHAPE, "%s: %s has %lld channels, x has %lld", fn, name,
             (long long)t->shape[0], (long long)x->shape[1]);
    AM_CHECK(!width || t->shape[1] == width, AM_ERR_SHAPE, "%s: %s has width %lld, weight has %lld", fn, name,
             (long long)t->shape[1], (long long)width);
    return AM_OK;
}

static am_status check_state(const char *name, const am_tensor *t, const am_conv_args *a)
{
    if (!given(t))
        return AM_OK;
    const int64_t wanted[3] = {a->docs.n / 2, a->x.shape[1], a->weight.shape[1] - 1};
    AM_CHECK(t->dtype == a->x.dtype, AM_ERR_DTYPE, "%s: %s is %s, x is %s", fn, name, am_dtype_name(t->dtype),
             am_dtype_name(a->x.dtype));
    AM_CHECK(t->ndim == 3, AM_ERR_SHAPE, "%s: %s has %d axes, 3 are needed (documents, channels, width - 1)", fn, name,
             t->ndim);
    for (int d = 0; d < 3; d++)
        AM_CHECK(t->shape[d] == wanted[d], AM_ERR_SHAPE, "%s: %s has extent %lld on axis %d, %lld is needed", fn, name,
                 (long long)t->shape[d], d, (long long)wanted[d]);
    return AM_OK;
}

static am_status check_docs(const am_i64_array *docs, int64_t tokens)
{
    AM_CHECK(docs->n % 2 == 0, AM_ERR_SHAPE, "%s: docs has %lld elements, an even number is needed", fn,
             (long long)docs->n);
    int64_t before = 0;
    for (int64_t i = 0; i < docs->n; i++) {
        AM_CHECK(docs->data[i] >= before, AM_ERR_ARG, "%s: docs[%lld] is %lld, after %lld", fn, (long long)i,
                 (long long)docs->data[i], (long long)before);
        before = docs->data[i];
    }
    AM_CHECK(before <= tokens, AM_ERR_SHAPE, "%s: docs ends at %lld, x has %lld tokens", fn, (long long)before,
             (long long)tokens);
    return AM_OK;
}

/* On CUDA a captured graph may replay other documents than those of the call: the buffer's are taken. */
static am_status check_device_docs(const am_conv_args *a, bool cuda)
{
    const am_tensor *const docs = &a->device_docs;
    if (!given(docs)) {
        AM_CHECK(!cuda || a->docs.n == 2, AM_ERR_ARG, "%s: device_docs is needed on CUDA for %lld documents", fn,
                 (long long)(a->docs.n / 2));
        return AM_OK;
    }
    AM_CHECK(docs->dtype == AM_I64, AM_ERR_DTYPE, "%s: device_docs is %s, int64 is needed", fn,
             am_dtype_name(docs->dtype));
    AM_CHECK(am_numel(docs) == a->docs.n && am_is_contiguous(docs), AM_ERR_SHAPE,
             "%s: device_docs must be contiguous and have %lld elements as docs", fn, (long long)a->docs.n);
    return AM_OK;
}

static am_status check_outputs(const am_conv_args *a)
{
    const am_tensor *const rows = a->backward ? &a->dx : &a->y, *const parts = &a->partials;
    const int64_t width = a->weight.shape[1], channels = a->x.shape[1];
    AM_TRY(check_rows(a->backward ? "dx" : "y", rows, &a->x));
    AM_CHECK(am_is_contiguous(rows), AM_ERR_SHAPE, "%s: %s must be contiguous", fn, a->backward ? "dx" : "y");
    AM_TRY(check_state("final_state", &a->final_state, a));
    AM_TRY(check_state("dstate", &a->dstate, a));
    if (!a->backward)
        return AM_OK;
    if (given(&a->dweight))
        AM_TRY(check_vector("dweight", &a->dweight, &a->x, width));
    if (given(&a->dbias))
        AM_TRY(check_vector("dbias", &a->dbias, &a->x, 0));
    AM_CHECK(parts->dtype == AM_F64 && parts->ndim == 3 && parts->shape[0] >= 1 && parts->shape[1] == width + 1 &&
                 parts->shape[2] == channels && am_is_contiguous(parts),
             AM_ERR_ARG, "%s: partials must be contiguous float64 [k, %lld, %lld]", fn, (long long)width + 1,
             (long long)channels);
    return AM_OK;
}

static am_status check(const am_conv_args *a, const am_exec *ex)
{
    const am_tensor *const x = &a->x, *const w = &a->weight;
    AM_CHECK(x->dtype == AM_F32 || x->dtype == AM_BF16, AM_ERR_DTYPE, "%s: x is %s, float32 or bfloat16 is needed", fn,
             am_dtype_name(x->dtype));
    AM_TRY(check_rows("x", x, x));
    AM_CHECK(w->dtype == AM_F32 || w->dtype == AM_BF16, AM_ERR_DTYPE, "%s: weight is %s, float32 or bfloat16 is needed",
             fn, am_dtype_name(w->dtype));
    AM_CHECK(w->ndim == 2, AM_ERR_SHAPE, "%s: weight has %d axes, 2 are needed (channels, width)", fn, w->ndim);
    AM_CHECK(w->shape[1] >= 1, AM_ERR_SHAPE, "%s: weight has width 0, at least 1 is needed", fn);
    AM_CHECK(w->shape[1] <= AM_CONV_MAX_WIDTH, AM_ERR_UNSUPPORTED, "%s: weight has width %lld, 1 to %d are there", fn,
             (long long)w->shape[1], AM_CONV_MAX_WIDTH);
    AM_TRY(check_vector("weight", w, x, w->shape[1]));
    if (given(&a->bias))
        AM_TRY(check_vector("bias", &a->bias, x, 0));
    AM_TRY(check_docs(&a->docs, x->shape[0]));
    AM_TRY(check_device_docs(a, ex->dev != AM_DEV_CPU));
    AM_TRY(check_state("initial_state", &a->initial_state, a));
    if (a->backward) {
        AM_TRY(check_rows("dy", &a->dy, x));
        AM_TRY(check_state("dfinal", &a->dfinal, a));
    }
    return check_outputs(a);
}

static void clear_rows(const am_tensor *t, const conv_piece *p, int64_t row, int64_t stop)
{
    for (; row < stop; row++)
        memset((char *)am_row(t, row) + (size_t)p->first * am_dtype_size(t->dtype), 0,
               (size_t)p->n * am_dtype_size(t->dtype));
}

/* Runs the kernel on the documents' parts of [row, stop) and clears the rows between them. */
static void walk(conv_piece *p, int64_t row, int64_t stop)
{
    const am_conv_args *const a = p->a;
    const am_tensor *const out = a->backward ? &a->dx : &a->y;
    for (p->doc = am_doc_after(&a->docs, row); p->doc < a->docs.n / 2; p->doc++) {
        p->start = a->docs.data[2 * p->doc];
        p->end = a->docs.data[2 * p->doc + 1];
        if (p->start >= stop)
            break;
        if (p->start == p->end)
            continue;
        p->row = p->start > row ? p->start : row;
        p->stop = p->end < stop ? p->end : stop;
        clear_rows(out, p, row, p->row);
        kernels[am_cpu_isa()][a->backward](p);
        row = p->stop;
    }
    clear_rows(out, p, row, stop);
}

static void tasks(int64_t begin, int64_t end, void *ctx)
{
    const am_conv_args *const a = ctx;
    float weight[AM_CONV_MAX_WIDTH][CONV_TILE], bias[CONV_TILE];
    const int64_t channels = a->x.shape[1], rows = a->x.shape[0], width = a->weight.shape[1];
    const int64_t tiles = (channels + CONV_TILE - 1) / CONV_TILE, runs = a->backward ? a->partials.shape[0] : 0;
    conv_piece p = {.a = a, .width = width, .channels = channels, .bias = bias, .bf16 = a->x.dtype == AM_BF16};
    for (int64_t j = 0; j < width; j++)
        p.weight[j] = p.flipped[width - 1 - j] = weight[j];
    for (int64_t task = begin; task < end; task++) {
        const int64_t run = task / tiles;
        p.first = task % tiles * CONV_TILE;
        p.n = channels - p.first < CONV_TILE ? channels - p.first : CONV_TILE;
        for (int64_t i = 0; i < p.n; i++) {
            for (int64_t j = 0; j < width; j++)
                weight[j][i] = read_element(&a->weight, (p.first + i) * a->weight.stride[0] + j * a->weight.stride[1]);
            bias[i] = given(&a->bias) ? read_element(&a->bias, (p.first + i) * a->bias.stride[0]) : 0.0f;
        }
        if (!a->backward) {
            const int64_t stop = (run + 1) * CONV_ROWS;
            walk(&p, run * CONV_ROWS, stop < rows ? stop : rows);
            continue;
        }
        double *const partial = (double *)a->partials.data + run * (width + 1) * channels + p.first;
        for (int64_t j = 0; j <= width; j++)
            memset(partial + j * channels, 0, (size_t)p.n * sizeof *partial);
        p.partial = given(&a->dweight) || given(&a->dbias) ? partial : NULL;
        walk(&p, run * rows / runs, (run + 1) * rows / runs);
    }
}

/* final_state of a document; backward: dstate of one without rows, where the state's gradient passes through. */
static void states(int64_t begin, int64_t end, void *ctx)
{
    const am_conv_args *const a = ctx;
    const am_tensor *const out = a->backward ? &a->dstate : &a->final_state;
    const am_tensor *const state = a->backward ? &a->dfinal : &a->initial_state;
    const int64_t width = a->weight.shape[1], channels = a->x.shape[1];
    float tile[CONV_TILE];
    conv_piece p = {.a = a};
    for (p.doc = begin; p.doc < end; p.doc++) {
        const int64_t first = a->docs.data[2 * p.doc], rows = a->docs.data[2 * p.doc + 1] - first;
        if (a->backward && rows > 0)
            continue;
        for (p.first = 0; p.first < channels; p.first += CONV_TILE) {
            p.n = channels - p.first < CONV_TILE ? channels - p.first : CONV_TILE;
            for (int64_t k = 0; k < width - 1; k++) {
                const int64_t row = rows + k - (width - 1); /* of the document */
                if (row < 0)
                    conv_read_state(tile, state, &p, row + width - 1);
                for (int64_t i = 0; i < p.n && row >= 0; i++)
                    tile[i] = read_element(&a->x, (first + row) * a->x.stride[0] + p.first + i);
                conv_write_state(out, &p, k, tile);
            }
        }
    }
}

/* Row `which` of every run's sums, in order, to `out` from element `at` on. */
static void add_runs(const am_tensor *out, const am_tensor *partials, int64_t which, int64_t at)
{
    const int64_t channels = partials->shape[2], step = partials->shape[1] * channels;
    const double *const first = (const double *)partials->data + which * channels;
    for (int64_t i = 0; i < channels; i++) {
        double total = 0.0;
        for (int64_t run = 0; run < partials->shape[0]; run++)
            total += first[run * step + i];
        write_element(out, at + i * out->stride[0], (float)total);
    }
}

static am_status run(am_conv_args *a, const am_exec *ex, bool backward)
{
    a->backward = backward;
    AM_TRY(check(a, ex));
    if (ex->dev != AM_DEV_CPU)
        return backward ? am_cuda_causal_conv1d_backward(a, ex) : am_cuda_causal_conv1d_forward(a, ex);
    const int64_t tiles = (a->x.shape[1] + CONV_TILE - 1) / CONV_TILE, width = a->weight.shape[1];
    const int64_t runs = backward ? a->partials.shape[0] : (a->x.shape[0] + CONV_ROWS - 1) / CONV_ROWS;
    am_parallel_for(runs * tiles, 1, tasks, a);
    if (given(backward ? &a->dstate : &a->final_state))
        am_parallel_for(a->docs.n / 2, DOCS_GRAIN, states, a);
    for (int64_t j = 0; j < width && given(&a->dweight); j++)
        add_runs(&a->dweight, &a->partials, j, j * a->dweight.stride[1]);
    if (given(&a->dbias))
        add_runs(&a->dbias, &a->partials, width, 0);
    return AM_OK;
}

am_status am_causal_conv1d_forward(am_conv_args *a, const am_exec *ex) { return run(a, ex, false); }
am_status am_causal_conv1d_backward(am_conv_args *a, const am_exec *ex) { return run(a, ex, true); }
