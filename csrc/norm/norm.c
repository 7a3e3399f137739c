#include "norm.h"

#include <math.h>
#include <string.h>

#include "am_cpu.h"
#include "am_math.h"
#include "am_pool.h"
#include "am_rows.h"
#include "norm_rows.h"

enum { GRAIN = 16, COLUMNS = 256 }; /* rows of a parallel chunk; columns of one, where runs are added */

#define AM_CPU_INC "norm_cpu.inc"
#include "am_each_isa.h"
/* The first two of am_norm_kind. */
#define FORWARD(isa) {rms_##isa, gated_##isa}
#define BACKWARD(isa) {rms_grad_##isa, gated_grad_##isa}
#define LAYER(isa) &am_layer_##isa
#if defined(__x86_64__)
#define BY_ISA(table) {table(scalar), table(avx2), table(avx512), table(avx512)}
#else
#define BY_ISA(table) {table(scalar), table(scalar), table(scalar), table(scalar)}
#endif

static void (*const forward_by_isa[AM_ISA_COUNT][2])(const norm_row *) = BY_ISA(FORWARD);
static void (*const backward_by_isa[AM_ISA_COUNT][2])(const norm_grad_row *) = BY_ISA(BACKWARD);
static const layer_kernels *const layers[AM_ISA_COUNT] = BY_ISA(LAYER);

static const char *const names[] = {"rms_norm", "gated_rms_norm", "layer_norm"};

#ifndef AM_WITH_CUDA
#define am_cuda_norm_forward(a, ex) am_no_cuda(names[(a)->kind])
#define am_cuda_norm_backward(a, ex) am_no_cuda(names[(a)->kind])
#endif

static bool given(const am_tensor *t) { return t->dtype != AM_NONE; }
static bool is_float(const am_tensor *t) { return t->dtype == AM_F32 || t->dtype == AM_BF16; }
static const void *row_of(const am_tensor *t, int64_t row) { return given(t) ? am_row(t, row) : NULL; }

static am_status check_x(const char *fn, const am_tensor *x)
{
    AM_CHECK(is_float(x), AM_ERR_DTYPE, "%s: x is %s, float32 or bfloat16 is needed", fn, am_dtype_name(x->dtype));
    AM_CHECK(x->ndim >= 1, AM_ERR_SHAPE, "%s: x has no axes, at least 1 is needed", fn);
    AM_CHECK(x->shape[x->ndim - 1] > 0, AM_ERR_SHAPE, "%s: the last axis of x has 0 elements, at least 1 is needed",
             fn);
    return AM_OK;
}

/* A tensor of x's shape and dtype with a contiguous last axis. */
static am_status check_like_x(const char *fn, const char *name, const am_tensor *t, const am_tensor *x)
{
    AM_CHECK(t->dtype == x->dtype, AM_ERR_DTYPE, "%s: %s is %s, x is %s", fn, name, am_dtype_name(t->dtype),
             am_dtype_name(x->dtype));
    AM_CHECK(t->ndim == x->ndim, AM_ERR_SHAPE, "%s: %s has %d axes, x has %d", fn, name, t->ndim, x->ndim);
    for (int d = 0; d < x->ndim; d++)
        AM_CHECK(t->shape[d] == x->shape[d], AM_ERR_SHAPE, "%s: %s has extent %lld on axis %d, x has %lld", fn, name,
                 (long long)t->shape[d], d, (long long)x->shape[d]);
    const int last = x->ndim - 1;
    AM_CHECK(am_numel(x) == 0 || t->shape[last] == 1 || t->stride[last] == 1, AM_ERR_SHAPE,
             "%s: %s has stride %lld on its last axis, 1 is needed", fn, name, (long long)t->stride[last]);
    return AM_OK;
}

static am_status check_output(const char *fn, const char *name, const am_tensor *t, const am_tensor *x)
{
    AM_TRY(check_like_x(fn, name, t, x));
    AM_CHECK(am_is_contiguous(t), AM_ERR_SHAPE, "%s: %s must be contiguous", fn, name);
    return AM_OK;
}

static am_status check_vector(const char *fn, const char *name, const am_tensor *t, int64_t n)
{
    AM_CHECK(is_float(t), AM_ERR_DTYPE, "%s: %s is %s, float32 or bfloat16 is needed", fn, name,
             am_dtype_name(t->dtype));
    AM_CHECK(t->ndim == 1, AM_ERR_SHAPE, "%s: %s has %d axes, 1 is needed", fn, name, t->ndim);
    AM_CHECK(t->shape[0] == n, AM_ERR_SHAPE, "%s: %s has %lld elements, the last axis of x has %lld", fn, name,
             (long long)t->shape[0], (long long)n);
    AM_CHECK(n == 1 || t->stride[0] == 1, AM_ERR_SHAPE, "%s: %s has stride %lld, 1 is needed", fn, name,
             (long long)t->stride[0]);
    return AM_OK;
}

static am_status check_statistic(const char *fn, const char *name, const am_tensor *t, int64_t rows)
{
    AM_CHECK(t->dtype == AM_F32 && am_numel(t) == rows && am_is_contiguous(t), AM_ERR_ARG,
             "%s: %s must be contiguous float32 of %lld elements", fn, name, (long long)rows);
    return AM_OK;
}

static am_status check_forward(const am_norm_args *a)
{
    const char *const fn = names[a->kind];
    const am_tensor *const x = &a->x;
    AM_TRY(check_x(fn, x));
    const int64_t n = x->shape[x->ndim - 1];
    AM_TRY(check_like_x(fn, "x", x, x));
    AM_TRY(check_vector(fn, "weight", &a->weight, n));
    if (a->kind == AM_NORM_LAYER)
        AM_TRY(check_vector(fn, "bias", &a->bias, n));
    if (given(&a->residual))
        AM_TRY(check_like_x(fn, "residual", &a->residual, x));
    if (a->kind == AM_NORM_GATED)
        AM_TRY(check_like_x(fn, "z", &a->z, x));
    AM_CHECK(a->eps >= 0.0 && isfinite(a->eps), AM_ERR_ARG, "%s: eps is %g, it lies in [0, inf)", fn, a->eps);
    AM_TRY(check_output(fn, "y", &a->y, x));
    AM_CHECK(given(&a->sum) == given(&a->residual), AM_ERR_ARG, "%s: sum and residual come together", fn);
    if (given(&a->sum))
        AM_TRY(check_output(fn, "sum", &a->sum, x));
    if (a->kind == AM_NORM_LAYER)
        AM_TRY(check_statistic(fn, "mean", &a->mean, am_row_count(x)));
    return check_statistic(fn, "rstd", &a->rstd, am_row_count(x));
}

static void forward_rows(int64_t begin, int64_t end, void *ctx)
{
    const am_norm_args *const a = ctx;
    const am_isa isa = am_cpu_isa();
    void (*const kernel)(const norm_row *) =
        a->kind == AM_NORM_LAYER ? layers[isa]->forward : forward_by_isa[isa][a->kind];
    norm_row r = {.weight = a->weight.data,
                  .bias = a->bias.data,
                  .n = a->x.shape[a->x.ndim - 1],
                  .eps = (float)a->eps,
                  .shift = a->zero_centered ? 1.0f : 0.0f,
                  .bf16 = a->x.dtype == AM_BF16,
                  .weight_bf16 = a->weight.dtype == AM_BF16,
                  .bias_bf16 = a->bias.dtype == AM_BF16};
    for (int64_t row = begin; row < end; row++) {
        r.y = am_at(&a->y, row * r.n);
        r.sum = given(&a->sum) ? am_at(&a->sum, row * r.n) : NULL;
        r.x = am_row(&a->x, row);
        r.residual = row_of(&a->residual, row);
        r.z = row_of(&a->z, row);
        r.rstd = (float *)a->rstd.data + row;
        r.mean = given(&a->mean) ? (float *)a->mean.data + row : NULL;
        kernel(&r);
    }
}

static am_status forward(am_norm_args *a, const am_exec *ex)
{
    AM_TRY(check_forward(a));
    if (ex->dev != AM_DEV_CPU)
        return am_cuda_norm_forward(a, ex);
    am_parallel_for(am_row_count(&a->x), GRAIN, forward_rows, a);
    return AM_OK;
}

am_status am_rms_norm_forward(am_norm_args *a, const am_exec *ex)
{
    a->kind = AM_NORM_RMS;
    return forward(a, ex);
}

am_status am_gated_rms_norm_forward(am_norm_args *a, const am_exec *ex)
{
    a->kind = AM_NORM_GATED;
    return forward(a, ex);
}

am_status am_layer_norm_forward(am_norm_args *a, const am_exec *ex)
{
    a->kind = AM_NORM_LAYER;
    return forward(a, ex);
}

static am_status check_backward(const am_norm_grad_args *a)
{
    const char *const fn = names[a->kind];
    const am_tensor *const x = &a->x;
    AM_TRY(check_x(fn, x));
    const int64_t n = x->shape[x->ndim - 1], sums = a->kind == AM_NORM_LAYER ? 2 : 1;
    AM_TRY(check_like_x(fn, "x", x, x));
    AM_TRY(check_like_x(fn, "dy", &a->dy, x));
    AM_TRY(check_vector(fn, "weight", &a->weight, n));
    if (given(&a->dsum))
        AM_TRY(check_like_x(fn, "dsum", &a->dsum, x));
    if (a->kind == AM_NORM_GATED) {
        AM_TRY(check_like_x(fn, "z", &a->z, x));
        AM_TRY(check_output(fn, "dz", &a->dz, x));
    }
    AM_TRY(check_output(fn, "dx", &a->dx, x));
    if (given(&a->dweight))
        AM_TRY(check_vector(fn, "dweight", &a->dweight, n));
    if (given(&a->dbias))
        AM_TRY(check_vector(fn, "dbias", &a->dbias, n));
    AM_CHECK(a->partials.dtype == AM_F64 && a->partials.ndim == 3 && a->partials.shape[0] >= 1 &&
                 a->partials.shape[1] == sums && a->partials.shape[2] == n && am_is_contiguous(&a->partials),
             AM_ERR_ARG, "%s: partials must be contiguous float64 [k, %lld, %lld]", fn, (long long)sums, (long long)n);
    if (a->kind == AM_NORM_LAYER)
        AM_TRY(check_statistic(fn, "mean", &a->mean, am_row_count(x)));
    return check_statistic(fn, "rstd", &a->rstd, am_row_count(x));
}

/* Row `row` of backward; `partial` is where its run adds up. */
static norm_grad_row grad_row(const am_norm_grad_args *a, int64_t row, double *partial)
{
    const int64_t n = a->x.shape[a->x.ndim - 1];
    return (norm_grad_row){.dx = am_at(&a->dx, row * n),
                           .dz = given(&a->dz) ? am_at(&a->dz, row * n) : NULL,
                           .dweight = given(&a->dweight) ? partial : NULL,
                           .dbias = given(&a->dbias) ? partial + n : NULL,
                           .dy = am_row(&a->dy, row),
                           .dsum = row_of(&a->dsum, row),
                           .x = am_row(&a->x, row),
                           .z = row_of(&a->z, row),
                           .weight = a->weight.data,
                           .rstd = (const float *)a->rstd.data + row,
                           .mean = given(&a->mean) ? (const float *)a->mean.data + row : NULL,
                           .n = n,
                           .shift = a->zero_centered ? 1.0f : 0.0f,
                           .bf16 = a->x.dtype == AM_BF16,
                           .weight_bf16 = a->weight.dtype == AM_BF16};
}

static void backward_runs(int64_t begin, int64_t end, void *ctx)
{
    const am_norm_grad_args *const a = ctx;
    const am_isa isa = am_cpu_isa();
    const int64_t rows = am_row_count(&a->x), runs = a->partials.shape[0];
    const int64_t width = a->partials.shape[1] * a->partials.shape[2];
    for (int64_t run = begin; run < end; run++) {
        const int64_t stop = (run + 1) * rows / runs;
        double *const partial = (double *)a->partials.data + run * width;
        norm_grad_row group[NORM_GROUP];
        memset(partial, 0, (size_t)width * sizeof *partial);
        for (int64_t row = run * rows / runs; row < stop;) {
            int64_t count = 0;
            for (; count < NORM_GROUP && row < stop; count++, row++)
                group[count] = grad_row(a, row, partial);
            if (a->kind == AM_NORM_LAYER)
                layers[isa]->backward(group, count);
            for (int64_t i = 0; i < count && a->kind != AM_NORM_LAYER; i++)
                backward_by_isa[isa][a->kind](&group[i]);
        }
    }
}

typedef struct add_job {
    const am_tensor *out, *partials;
    int64_t which;
} add_job;

/* Columns [begin, end) of all runs, one run after another. */
static void add_runs(int64_t begin, int64_t end, void *ctx)
{
    const add_job *const job = ctx;
    const am_tensor *const out = job->out, *const partials = job->partials;
    const int64_t n = partials->shape[2], step = partials->shape[1] * n;
    const double *const first = (const double *)partials->data + job->which * n + begin;
    double total[COLUMNS] = {0};
    for (int64_t run = 0; run < partials->shape[0]; run++)
        for (int64_t i = 0; i < end - begin; i++)
            total[i] += first[run * step + i];
    for (int64_t i = 0; i < end - begin; i++)
        if (out->dtype == AM_BF16)
            ((am_bf16 *)out->data)[begin + i] = am_f32_to_bf16((float)total[i]);
        else
            ((float *)out->data)[begin + i] = (float)total[i];
}

static void add_up(const am_tensor *out, const am_tensor *partials, int64_t which)
{
    add_job job = {out, partials, which};
    if (given(out))
        am_parallel_for(partials->shape[2], COLUMNS, add_runs, &job);
}

static am_status backward(am_norm_grad_args *a, const am_exec *ex)
{
    AM_TRY(check_backward(a));
    if (ex->dev != AM_DEV_CPU)
        return am_cuda_norm_backward(a, ex);
    am_parallel_for(a->partials.shape[0], 1, backward_runs, a);
    add_up(&a->dweight, &a->partials, 0);
    add_up(&a->dbias, &a->partials, 1);
    return AM_OK;
}

am_status am_rms_norm_backward(am_norm_grad_args *a, const am_exec *ex)
{
    a->kind = AM_NORM_RMS;
    return backward(a, ex);
}

am_status am_gated_rms_norm_backward(am_norm_grad_args *a, const am_exec *ex)
{
    a->kind = AM_NORM_GATED;
    return backward(a, ex);
}

am_status am_layer_norm_backward(am_norm_grad_args *a, const am_exec *ex)
{
    a->kind = AM_NORM_LAYER;
    return backward(a, ex);
}
