#include "loss.h"

#include <math.h>
#include <string.h>

#include "am_math.h"
#include "am_pool.h"
#include "loss_rows.h"

enum { GRAIN = 8 }; /* rows of a parallel chunk */
static const char *const fn = "linear_cross_entropy";

#ifndef AM_WITH_CUDA
#define am_cuda_lce_targets(a, ex) am_no_cuda(fn)
#define am_cuda_lce_chunk(a, ex) am_no_cuda(fn)
#define am_cuda_lce_join(a, ex) am_no_cuda(fn)
#define am_cuda_lce_loss(a, ex) am_no_cuda(fn)
#define am_cuda_lce_grad(a, ex) am_no_cuda(fn)
#define am_cuda_lce_mask(a, ex) am_no_cuda(fn)
#endif

static am_status check_layer(am_lce_rows_args *a, const am_exec *ex)
{
    AM_TRY(am_loss_check_matrix(fn, "hidden", &a->hidden));
    AM_TRY(am_loss_check_matrix(fn, "weight", &a->weight));
    AM_CHECK(a->weight.dtype == a->hidden.dtype, AM_ERR_DTYPE, "%s: weight is %s, hidden is %s", fn,
             am_dtype_name(a->weight.dtype), am_dtype_name(a->hidden.dtype));
    AM_CHECK(a->weight.shape[1] == a->hidden.shape[1], AM_ERR_SHAPE, "%s: weight has %lld columns, hidden has %lld", fn,
             (long long)a->weight.shape[1], (long long)a->hidden.shape[1]);
    AM_CHECK(a->vocab >= a->weight.shape[0], AM_ERR_ARG, "%s: weight has %lld words of %lld", fn,
             (long long)a->weight.shape[0], (long long)a->vocab);
    AM_TRY(am_loss_check_count(fn, &a->num_label_tokens, ex));
    return am_loss_check_labels(fn, &a->labels, a->hidden.shape[0], a->vocab, a->ignore_index, &a->n, ex);
}

static am_status check_targets(const am_tensor *targets, int64_t n)
{
    AM_CHECK(targets->dtype == AM_I64 && targets->ndim == 1 && am_is_contiguous(targets) && targets->shape[0] >= n,
             AM_ERR_ARG, "%s: targets must be contiguous int64 of at least %lld elements", fn, (long long)n);
    return AM_OK;
}

am_status am_lce_rows(am_lce_rows_args *a, const am_exec *ex)
{
    AM_TRY(check_layer(a, ex));
    AM_TRY(am_loss_check_cpu("linear_cross_entropy_rows", ex));
    const int64_t tokens = a->hidden.shape[0];
    const am_tensor *const outs[] = {&a->rows, &a->targets};
    for (int i = 0; i < 2; i++)
        AM_CHECK(outs[i]->dtype == AM_I64 && am_numel(outs[i]) == tokens && am_is_contiguous(outs[i]), AM_ERR_ARG,
                 "%s: rows and targets must be contiguous int64 of %lld elements", fn, (long long)tokens);
    int64_t *const rows = a->rows.data, *const targets = a->targets.data;
    for (int64_t t = 0, at = 0; t < tokens; t++) {
        const int64_t label = am_loss_int_at(&a->labels, t);
        if (label == a->ignore_index)
            continue;
        rows[at] = t;
        targets[at++] = label;
    }
    return AM_OK;
}

am_status am_lce_targets(am_lce_rows_args *a, const am_exec *ex)
{
    AM_TRY(check_layer(a, ex));
    AM_TRY(check_targets(&a->targets, a->hidden.shape[0]));
    AM_CHECK(a->count.dtype != AM_NONE, AM_ERR_ARG, "%s: count must be given", fn);
    AM_TRY(am_loss_check_own_count(fn, &a->count));
    if (ex->dev != AM_DEV_CPU)
        return am_cuda_lce_targets(a, ex);
    for (int64_t t = 0; t < a->hidden.shape[0]; t++) {
        const int64_t label = am_loss_int_at(&a->labels, t);
        ((int64_t *)a->targets.data)[t] = label == a->ignore_index ? AM_LOSS_IGNORED : label;
    }
    *(int64_t *)a->count.data = a->num_label_tokens.dtype == AM_NONE ? a->n : am_loss_int_at(&a->num_label_tokens, 0);
    return AM_OK;
}

static am_status check_stats(const am_lce_chunk_args *a, int64_t n, const am_exec *ex)
{
    AM_CHECK(a->stats.dtype == AM_F32 && a->stats.ndim == 2 && a->stats.shape[0] == 3 &&
                 (a->stats.stride[1] == 1 || a->stats.shape[1] <= 1),
             AM_ERR_ARG, "%s: stats must be float32 [3, T], its last axis contiguous", fn);
    AM_TRY(check_targets(&a->targets, n));
    AM_CHECK(n >= 0 && n <= a->stats.shape[1], AM_ERR_SHAPE, "%s: %lld rows, stats has room for %lld", fn, (long long)n,
             (long long)a->stats.shape[1]);
    return am_loss_check_count(fn, &a->num_label_tokens, ex);
}

static am_status check_chunk(const am_lce_chunk_args *a, const am_exec *ex)
{
    AM_TRY(am_loss_check_rows(fn, "logits", &a->logits));
    return check_stats(a, a->logits.shape[0], ex);
}

static void chunk_rows(int64_t begin, int64_t end, void *ctx)
{
    const am_lce_chunk_args *const a = ctx;
    const int64_t stride = a->stats.stride[0], width = a->logits.shape[1];
    for (int64_t t = begin; t < end; t++) {
        const int64_t target = ((const int64_t *)a->targets.data)[t];
        if (target < 0)
            continue;
        const int64_t column = target < a->first ? -1 : target - a->first;
        float *const stats = (float *)a->stats.data + t;
        row_stats s = {stats[0], stats[stride]};
        am_loss_kernels()->join(&s, am_at(&a->logits, t * a->logits.stride[0]), width, a->logits.dtype == AM_BF16);
        stats[0] = s.top;
        stats[stride] = s.sum;
        if (column >= 0 && column < width)
            stats[2 * stride] = am_loss_logit_at(&a->logits, t, column);
    }
}

am_status am_lce_chunk(am_lce_chunk_args *a, const am_exec *ex)
{
    AM_TRY(check_chunk(a, ex));
    if (am_numel(&a->logits) == 0)
        return AM_OK;
    if (ex->dev != AM_DEV_CPU)
        return am_cuda_lce_chunk(a, ex);
    am_parallel_for(a->logits.shape[0], GRAIN, chunk_rows, a);
    return AM_OK;
}

static void join_rows(int64_t begin, int64_t end, void *ctx)
{
    const am_lce_join_args *const a = ctx;
    const int64_t ranks = a->parts.shape[0], tokens = a->parts.shape[2], stride = a->stats.stride[0];
    for (int64_t t = begin; t < end; t++) {
        const float *const parts = (const float *)a->parts.data + t;
        float *const stats = (float *)a->stats.data + t;
        float top = -INFINITY, sum = 0.0f, logit = 0.0f;
        for (int64_t r = 0; r < ranks; r++)
            top = parts[3 * r * tokens] > top ? parts[3 * r * tokens] : top;
        for (int64_t r = 0; r < ranks; r++) {
            const float *const part = parts + 3 * r * tokens;
            sum += top == -INFINITY ? part[tokens] : part[tokens] * am_expf(part[0] - top);
            logit += part[2 * tokens];
        }
        stats[0] = top;
        stats[stride] = sum;
        stats[2 * stride] = logit;
    }
}

am_status am_lce_join(am_lce_join_args *a, const am_exec *ex)
{
    AM_CHECK(a->parts.dtype == AM_F32 && a->parts.ndim == 3 && a->parts.shape[1] == 3 && am_is_contiguous(&a->parts),
             AM_ERR_ARG, "%s: parts must be contiguous float32 [R, 3, T]", fn);
    AM_CHECK(a->stats.dtype == AM_F32 && a->stats.ndim == 2 && a->stats.shape[0] == 3 &&
                 a->stats.shape[1] == a->parts.shape[2] && (a->stats.stride[1] == 1 || a->stats.shape[1] <= 1),
             AM_ERR_ARG, "%s: stats must be float32 [3, %lld], its last axis contiguous", fn,
             (long long)a->parts.shape[2]);
    if (a->parts.shape[2] == 0)
        return AM_OK;
    if (ex->dev != AM_DEV_CPU)
        return am_cuda_lce_join(a, ex);
    am_parallel_for(a->parts.shape[2], 64 * GRAIN, join_rows, a);
    return AM_OK;
}

static am_status check_counted(const am_lce_chunk_args *a, const am_exec *ex)
{
    AM_CHECK(a->num_label_tokens.dtype != AM_NONE || ex->dev == AM_DEV_CPU, AM_ERR_ARG,
             "%s: num_label_tokens must be given on CUDA", fn);
    return AM_OK;
}

am_status am_lce_loss(am_lce_chunk_args *a, const am_exec *ex)
{
    AM_TRY(am_loss_check_scalar(fn, "loss", &a->loss));
    AM_TRY(check_stats(a, a->n, ex));
    AM_TRY(check_counted(a, ex));
    if (ex->dev != AM_DEV_CPU)
        return am_cuda_lce_loss(a, ex);
    const int64_t stride = a->stats.stride[0];
    const float *const top = a->stats.data, *const sum = am_at(&a->stats, stride),
                       *const logit = am_at(&a->stats, 2 * stride);
    const double inverse = am_loss_inverse_count(&a->num_label_tokens, a->n);
    double total = 0.0;
    for (int64_t t = 0; t < a->n && inverse != 0.0; t++)
        if (((const int64_t *)a->targets.data)[t] >= 0)
            total += am_loss_of((row_stats){top[t], sum[t]}, logit[t]);
    *(float *)a->loss.data = (float)(total * inverse);
    return AM_OK;
}

typedef struct grad_job {
    const am_lce_chunk_args *args;
    float scale; /* dloss / count */
} grad_job;

static void grad_rows(int64_t begin, int64_t end, void *ctx)
{
    const grad_job *const job = ctx;
    const am_lce_chunk_args *const a = job->args;
    const int64_t stride = a->stats.stride[0], width = a->logits.shape[1];
    for (int64_t t = begin; t < end; t++) {
        const void *const row = am_at(&a->logits, t * a->logits.stride[0]);
        void *const dst = am_at(&a->dlogits, t * a->dlogits.stride[0]);
        const float *const stats = (const float *)a->stats.data + t;
        const int64_t target = ((const int64_t *)a->targets.data)[t],
                      column = target < a->first ? -1 : target - a->first;
        if (job->scale == 0.0f || target < 0)
            memset(dst, 0, (size_t)width * am_dtype_size(a->logits.dtype));
        else
            am_loss_kernels()->grad(dst, row, width, column, (row_stats){stats[0], stats[stride]}, job->scale,
                                    a->logits.dtype == AM_BF16);
    }
}

am_status am_lce_grad(am_lce_chunk_args *a, const am_exec *ex)
{
    AM_TRY(check_chunk(a, ex));
    AM_TRY(am_loss_check_scalar(fn, "dloss", &a->dloss));
    AM_TRY(am_loss_check_rows(fn, "dlogits", &a->dlogits));
    AM_CHECK(a->dlogits.dtype == a->logits.dtype, AM_ERR_DTYPE, "%s: dlogits is %s, logits is %s", fn,
             am_dtype_name(a->dlogits.dtype), am_dtype_name(a->logits.dtype));
    AM_CHECK(am_same_shape(&a->dlogits, &a->logits), AM_ERR_SHAPE, "%s: dlogits [%lld, %lld] is not of logits' shape",
             fn, (long long)a->dlogits.shape[0], (long long)a->dlogits.shape[1]);
    AM_TRY(check_counted(a, ex));
    if (am_numel(&a->logits) == 0)
        return AM_OK;
    if (ex->dev != AM_DEV_CPU)
        return am_cuda_lce_grad(a, ex);
    const double inverse = am_loss_inverse_count(&a->num_label_tokens, a->logits.shape[0]);
    grad_job job = {a, inverse == 0.0 ? 0.0f : (float)(*(const float *)a->dloss.data * inverse)};
    am_parallel_for(a->logits.shape[0], GRAIN, grad_rows, &job);
    return AM_OK;
}

static am_status check_sum(const am_lce_collect_args *a, const am_exec *ex)
{
    AM_CHECK(a->sum.dtype == AM_F32 && a->sum.ndim == 2 && am_is_contiguous(&a->sum), AM_ERR_ARG,
             "%s: sum must be contiguous float32 [n, H]", fn);
    return am_loss_check_cpu("linear_cross_entropy_scatter", ex);
}

static void put_row(const am_lce_collect_args *a, int64_t row, const float *src)
{
    const int64_t width = a->sum.shape[1];
    void *const dst = am_at(&a->dhidden, row * width);
    if (width == 0)
        return;
    if (src == NULL)
        memset(dst, 0, (size_t)width * am_dtype_size(a->dhidden.dtype));
    else if (a->dhidden.dtype == AM_BF16)
        am_loss_kernels()->narrow(dst, src, width);
    else
        memcpy(dst, src, (size_t)width * sizeof *src);
}

am_status am_lce_scatter(am_lce_collect_args *a, const am_exec *ex)
{
    AM_TRY(check_sum(a, ex));
    AM_TRY(am_loss_check_matrix(fn, "dhidden", &a->dhidden));
    const int64_t n = a->sum.shape[0], tokens = a->dhidden.shape[0];
    AM_CHECK(am_is_contiguous(&a->dhidden) && a->dhidden.shape[1] == a->sum.shape[1] && n <= tokens, AM_ERR_SHAPE,
             "%s: dhidden [%lld, %lld] must be contiguous and hold sum [%lld, %lld]", fn, (long long)tokens,
             (long long)a->dhidden.shape[1], (long long)n, (long long)a->sum.shape[1]);
    AM_CHECK(a->rows.dtype == AM_I64 && am_is_contiguous(&a->rows) && am_numel(&a->rows) >= n, AM_ERR_ARG,
             "%s: rows must be contiguous int64 of at least %lld elements", fn, (long long)n);
    const int64_t *const rows = a->rows.data;
    for (int64_t i = 0; i < n; i++)
        AM_CHECK(rows[i] >= (i ? rows[i - 1] + 1 : 0) && rows[i] < tokens, AM_ERR_ARG,
                 "%s: rows[%lld] is %lld, rows rise in [0, %lld)", fn, (long long)i, (long long)rows[i],
                 (long long)tokens);
    for (int64_t t = 0, at = 0; t < tokens; t++) {
        const bool labelled = at < n && rows[at] == t;
        put_row(a, t, labelled ? am_at(&a->sum, at * a->sum.shape[1]) : NULL);
        at += labelled;
    }
    return AM_OK;
}

static am_status check_mask(const am_lce_mask_args *a)
{
    AM_TRY(am_loss_check_matrix(fn, "out", &a->out));
    AM_TRY(am_loss_check_rows(fn, "rows", &a->rows));
    AM_CHECK(a->rows.dtype == AM_F32 || a->rows.dtype == a->out.dtype, AM_ERR_DTYPE,
             "%s: rows is %s; float32 or out's dtype is needed", fn, am_dtype_name(a->rows.dtype));
    AM_CHECK(am_same_shape(&a->out, &a->rows) && am_is_contiguous(&a->out), AM_ERR_SHAPE,
             "%s: out [%lld, %lld] must be contiguous and of rows' shape", fn, (long long)a->out.shape[0],
             (long long)a->out.shape[1]);
    return check_targets(&a->targets, a->rows.shape[0]);
}

am_status am_lce_mask(am_lce_mask_args *a, const am_exec *ex)
{
    AM_TRY(check_mask(a));
    if (am_numel(&a->out) == 0)
        return AM_OK;
    if (ex->dev != AM_DEV_CPU)
        return am_cuda_lce_mask(a, ex);
    const int64_t width = a->out.shape[1];
    const size_t bytes = (size_t)width * am_dtype_size(a->out.dtype);
    for (int64_t t = 0; t < a->out.shape[0]; t++) {
        void *const dst = am_at(&a->out, t * width);
        const void *const src = am_at(&a->rows, t * a->rows.stride[0]);
        if (((const int64_t *)a->targets.data)[t] == AM_LOSS_IGNORED)
            memset(dst, 0, bytes);
        else if (a->rows.dtype == a->out.dtype)
            memcpy(dst, src, bytes);
        else
            am_loss_kernels()->narrow(dst, src, width);
    }
    return AM_OK;
}
