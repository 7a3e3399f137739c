#include "loss.h"

#include <math.h>
#include <string.h>

#include "am_pool.h"
#include "loss_rows.h"

#ifndef AM_WITH_CUDA
#define am_cuda_cross_entropy_forward(a, ex) am_no_cuda("cross_entropy")
#define am_cuda_cross_entropy_backward(a, ex) am_no_cuda("cross_entropy")
#endif

static row_stats stats_of(const am_cross_entropy_args *a, int64_t row)
{
    row_stats s = {-INFINITY, 0.0f};
    am_loss_kernels()->join(&s, am_at(&a->logits, row * a->logits.stride[0]), a->logits.shape[1],
                            a->logits.dtype == AM_BF16);
    return s;
}

static void forward_rows(int64_t begin, int64_t end, void *ctx)
{
    const am_cross_entropy_args *const a = ctx;
    double *const row_loss = a->row_loss.data;
    for (int64_t t = begin; t < end; t++) {
        const int64_t label = am_loss_int_at(&a->labels, t);
        row_loss[t] = 0.0;
        if (label == a->ignore_index)
            continue;
        const row_stats s = stats_of(a, t);
        row_loss[t] = am_loss_of(s, am_loss_logit_at(&a->logits, t, label));
        if (a->stats.dtype != AM_NONE) {
            ((float *)a->stats.data)[t] = s.top;
            ((float *)a->stats.data)[t + a->stats.shape[1]] = s.sum;
        }
    }
}

typedef struct backward_job {
    const am_cross_entropy_args *args;
    float scale; /* dloss / count */
} backward_job;

static void backward_rows(int64_t begin, int64_t end, void *ctx)
{
    const backward_job *const job = ctx;
    const am_cross_entropy_args *const a = job->args;
    const float scale = job->scale;
    const bool bf16 = a->logits.dtype == AM_BF16;
    const int64_t vocab = a->logits.shape[1];
    for (int64_t t = begin; t < end; t++) {
        const int64_t label = am_loss_int_at(&a->labels, t);
        void *const out = am_at(&a->dlogits, t * vocab);
        if (label == a->ignore_index || scale == 0.0f) {
            memset(out, 0, (size_t)vocab * am_dtype_size(a->dlogits.dtype));
            continue;
        }
        const void *const row = am_at(&a->logits, t * a->logits.stride[0]);
        const float *const kept = a->stats.data;
        const row_stats s = kept ? (row_stats){kept[t], kept[t + a->stats.shape[1]]} : stats_of(a, t);
        am_loss_kernels()->grad(out, row, vocab, label, s, scale, bf16);
    }
}

static am_status check_cross_entropy(const am_cross_entropy_args *a, const am_exec *ex, int64_t *n)
{
    const char *const fn = "cross_entropy";
    AM_CHECK(a->chunk_len > 0, AM_ERR_ARG, "%s: chunk_len must be greater than zero, it is %lld", fn,
             (long long)a->chunk_len);
    AM_TRY(am_loss_check_rows(fn, "logits", &a->logits));
    AM_TRY(am_loss_check_count(fn, &a->num_label_tokens, ex));
    const int64_t tokens = a->logits.shape[0];
    AM_CHECK(a->stats.dtype == AM_NONE || (a->stats.dtype == AM_F32 && a->stats.ndim == 2 && a->stats.shape[0] == 2 &&
                                           a->stats.shape[1] == tokens && am_is_contiguous(&a->stats)),
             AM_ERR_ARG, "%s: stats must be contiguous float32 [2, %lld]", fn, (long long)tokens);
    AM_CHECK(a->stats.dtype != AM_NONE || ex->dev == AM_DEV_CPU, AM_ERR_ARG, "%s: stats must be given on CUDA", fn);
    return am_loss_check_labels(fn, &a->labels, tokens, a->logits.shape[1], a->ignore_index, n, ex);
}

am_status am_cross_entropy_forward(am_cross_entropy_args *a, const am_exec *ex)
{
    int64_t n = 0;
    AM_TRY(check_cross_entropy(a, ex, &n));
    const int64_t tokens = a->logits.shape[0];
    AM_TRY(am_loss_check_scalar("cross_entropy", "loss", &a->loss));
    AM_CHECK(a->row_loss.dtype == AM_F64 && am_numel(&a->row_loss) == tokens && am_is_contiguous(&a->row_loss),
             AM_ERR_ARG, "cross_entropy: row_loss must be contiguous float64 of %lld elements", (long long)tokens);
    AM_TRY(am_loss_check_own_count("cross_entropy", &a->count));
    if (ex->dev != AM_DEV_CPU)
        return am_cuda_cross_entropy_forward(a, ex);
    am_parallel_for(tokens, a->chunk_len, forward_rows, a);
    double total = 0.0;
    for (int64_t t = 0; t < tokens; t++)
        total += ((const double *)a->row_loss.data)[t];
    const double inverse = am_loss_inverse_count(&a->num_label_tokens, n);
    if (a->count.dtype != AM_NONE)
        *(int64_t *)a->count.data = a->num_label_tokens.dtype == AM_NONE ? n : am_loss_int_at(&a->num_label_tokens, 0);
    *(float *)a->loss.data = inverse == 0.0 ? 0.0f : (float)(total * inverse);
    return AM_OK;
}

am_status am_cross_entropy_backward(am_cross_entropy_args *a, const am_exec *ex)
{
    int64_t n = 0;
    AM_TRY(check_cross_entropy(a, ex, &n));
    AM_TRY(am_loss_check_scalar("cross_entropy", "dloss", &a->dloss));
    AM_CHECK(a->dlogits.dtype == a->logits.dtype, AM_ERR_DTYPE, "cross_entropy: dlogits is %s, logits is %s",
             am_dtype_name(a->dlogits.dtype), am_dtype_name(a->logits.dtype));
    AM_CHECK(am_same_shape(&a->dlogits, &a->logits) && am_is_contiguous(&a->dlogits), AM_ERR_SHAPE,
             "cross_entropy: dlogits must be contiguous and have logits' shape [%lld, %lld]",
             (long long)a->logits.shape[0], (long long)a->logits.shape[1]);
    AM_CHECK(!am_overlaps(&a->dlogits, &a->logits), AM_ERR_ARG, "cross_entropy: dlogits shares memory with logits");
    AM_CHECK(a->num_label_tokens.dtype != AM_NONE || ex->dev == AM_DEV_CPU, AM_ERR_ARG,
             "cross_entropy: num_label_tokens must be given on CUDA");
    if (am_numel(&a->logits) == 0)
        return AM_OK;
    if (ex->dev != AM_DEV_CPU)
        return am_cuda_cross_entropy_backward(a, ex);
    const double inverse = am_loss_inverse_count(&a->num_label_tokens, n);
    backward_job job = {a, inverse == 0.0 ? 0.0f : (float)(*(const float *)a->dloss.data * inverse)};
    am_parallel_for(a->logits.shape[0], a->chunk_len, backward_rows, &job);
    return AM_OK;
}
