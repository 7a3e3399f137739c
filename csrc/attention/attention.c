#include "attention.h"

#include <math.h>
#include <string.h>

#include "am_bf16.h"
#include "am_cpu.h"
#include "attention_plan.h"

static const int64_t dims[] = {16, 32, 64, 72, 80, 128, 256};

static am_status check_tensor(const am_tensor *t, const char *name, am_dtype dtype, int64_t tokens, int64_t heads,
                              int64_t dim)
{
    AM_CHECK(t->ndim == 3, AM_ERR_SHAPE, "attention: %s has %d axes, [tokens, heads, dim] is needed", name, t->ndim);
    AM_CHECK(t->dtype == dtype, AM_ERR_DTYPE, "attention: %s is %s, q is %s", name, am_dtype_name(t->dtype),
             am_dtype_name(dtype));
    AM_CHECK(t->shape[0] == tokens && t->shape[1] == heads && t->shape[2] == dim, AM_ERR_SHAPE,
             "attention: %s is [%lld, %lld, %lld], [%lld, %lld, %lld] is needed", name, (long long)t->shape[0],
             (long long)t->shape[1], (long long)t->shape[2], (long long)tokens, (long long)heads, (long long)dim);
    AM_CHECK(am_numel(t) == 0 || t->stride[2] == 1, AM_ERR_SHAPE,
             "attention: the last axis of %s has stride %lld, it must be contiguous (stride 1)", name,
             (long long)t->stride[2]);
    return AM_OK;
}

static am_status check_inputs(const am_attention_args *a, const am_exec *ex)
{
    const am_tensor *const q = &a->q;
    const am_tensor *const k = &a->k;
    AM_CHECK(q->dtype == AM_F32 || q->dtype == AM_BF16 || (q->dtype == AM_F16 && ex->dev != AM_DEV_CPU), AM_ERR_DTYPE,
             "attention: q is %s, float32 or bfloat16 is needed (on CUDA also float16)", am_dtype_name(q->dtype));
    AM_CHECK(q->ndim == 3, AM_ERR_SHAPE, "attention: q has %d axes, [tokens, heads, dim] is needed", q->ndim);
    bool known = false;
    for (size_t i = 0; i < sizeof dims / sizeof *dims; i++)
        known |= q->shape[2] == dims[i];
    AM_CHECK(known, AM_ERR_UNSUPPORTED,
             "attention: head dim %lld has no kernel; there are 16, 32, 64, 72, 80, 128, 256", (long long)q->shape[2]);
    AM_TRY(check_tensor(q, "q", q->dtype, q->shape[0], q->shape[1], q->shape[2]));
    AM_CHECK(k->ndim == 3, AM_ERR_SHAPE, "attention: k has %d axes, [tokens, heads, dim] is needed", k->ndim);
    AM_TRY(check_tensor(k, "k", q->dtype, k->shape[0], k->shape[1], q->shape[2]));
    AM_TRY(check_tensor(&a->v, "v", q->dtype, k->shape[0], k->shape[1], q->shape[2]));
    AM_CHECK(k->shape[1] > 0 && q->shape[1] % k->shape[1] == 0, AM_ERR_SHAPE,
             "attention: %lld query heads are not a multiple of %lld key heads", (long long)q->shape[1],
             (long long)k->shape[1]);
    AM_CHECK(isfinite(a->scale), AM_ERR_ARG, "attention: scale is %g, it must be finite", a->scale);
    AM_CHECK(a->docs_k.present || q->shape[0] == k->shape[0], AM_ERR_SHAPE,
             "attention: k has %lld tokens and q %lld: docs_k is needed", (long long)k->shape[0],
             (long long)q->shape[0]);
    return AM_OK;
}

static am_status check_rows(const am_attention_args *a, const am_tensor *t, const char *name)
{
    AM_CHECK(t->dtype == AM_F32, AM_ERR_DTYPE, "attention: %s is %s, float32 is needed", name, am_dtype_name(t->dtype));
    AM_CHECK(t->ndim == 2 && t->shape[0] == a->q.shape[0] && t->shape[1] == a->q.shape[1], AM_ERR_SHAPE,
             "attention: %s must be [%lld, %lld]", name, (long long)a->q.shape[0], (long long)a->q.shape[1]);
    return AM_OK;
}

static am_status check_forward(const am_attention_args *a, const am_exec *ex)
{
    const am_tensor *const q = &a->q;
    AM_TRY(check_inputs(a, ex));
    AM_TRY(check_tensor(&a->out, "out", q->dtype, q->shape[0], q->shape[1], q->shape[2]));
    AM_TRY(check_rows(a, &a->lse, "lse"));
    if (a->lse_low.dtype != AM_NONE)
        AM_TRY(check_rows(a, &a->lse_low, "lse_low"));
    AM_CHECK(a->workspace.dtype == AM_U8 && a->workspace.ndim == 1 && am_is_contiguous(&a->workspace), AM_ERR_DTYPE,
             "attention: workspace must be contiguous uint8 of one axis");
    return AM_OK;
}

static am_status check_backward(const am_attention_args *a, const am_exec *ex)
{
    const am_tensor *const q = &a->q;
    const am_tensor *const k = &a->k;
    AM_TRY(check_forward(a, ex));
    AM_TRY(check_tensor(&a->dout, "dout", q->dtype, q->shape[0], q->shape[1], q->shape[2]));
    AM_TRY(check_tensor(&a->dq, "dq", q->dtype, q->shape[0], q->shape[1], q->shape[2]));
    AM_TRY(check_tensor(&a->dk, "dk", q->dtype, k->shape[0], k->shape[1], q->shape[2]));
    return check_tensor(&a->dv, "dv", q->dtype, k->shape[0], k->shape[1], q->shape[2]);
}

static const attention_row *pick_row(const am_attention_args *a)
{
    static const attention_row *const fp32[AM_ISA_COUNT] = {&am_attention_scalar, &am_attention_avx2,
                                                            &am_attention_avx512, &am_attention_avx512};
    const am_isa isa = am_cpu_isa();
    if (a->q.dtype == AM_BF16 && isa == AM_ISA_AVX512_BF16)
        return am_cpu_amx() ? &am_attention_amx : &am_attention_bf16;
    return fp32[isa];
}

/* Zeros (lse: -inf) in the tokens outside every document. */
static void fill_gaps(const am_tensor *t, const am_i64_array *docs, float value)
{
    int64_t at = 0;
    const int64_t inner = t->ndim == 3 ? t->shape[2] : 1;
    for (int64_t n = 0; n <= docs->n; n += 2) {
        const int64_t end = n < docs->n ? docs->data[n] : t->shape[0];
        for (; at < end; at++)
            for (int64_t h = 0; h < t->shape[1]; h++)
                for (int64_t i = 0; i < inner; i++) {
                    const int64_t place = at * t->stride[0] + h * t->stride[1] + i;
                    if (t->dtype == AM_F32)
                        ((float *)t->data)[place] = value;
                    else
                        ((am_bf16 *)t->data)[place] = am_f32_to_bf16(value);
                }
        at = n < docs->n ? docs->data[n + 1] : end;
    }
}

#ifndef AM_WITH_CUDA
am_status am_cuda_attention_plan(const am_attention_args *a, bool backward, const char **row, size_t *bytes)
{
    (void)a, (void)backward, (void)row, (void)bytes;
    return am_no_cuda("attention");
}
am_status am_cuda_attention_forward(const am_attention_args *a, const am_exec *ex)
{
    (void)a, (void)ex;
    return am_no_cuda("attention");
}
am_status am_cuda_attention_backward(const am_attention_args *a, const am_exec *ex)
{
    (void)a, (void)ex;
    return am_no_cuda("attention");
}
#endif

static am_status check_cuda(const am_attention_args *a, bool backward)
{
    const int64_t needed = (a->docs_k.present ? 5 : 3) * (a->docs.n / 2);
    const am_tensor *const docs = &a->device_docs;
    const char *row = NULL;
    size_t least = 0;
    AM_TRY(attention_check_docs(a));
    AM_TRY(am_cuda_attention_plan(a, backward, &row, &least));
    AM_CHECK(docs->dtype == AM_I64 && docs->ndim == 1 && am_is_contiguous(docs), AM_ERR_DTYPE,
             "attention: device_docs must be contiguous int64 of one axis, beside q");
    AM_CHECK(docs->shape[0] == needed, AM_ERR_SHAPE, "attention: device_docs has %lld elements, %lld are needed",
             (long long)docs->shape[0], (long long)needed);
    const size_t given = (size_t)a->workspace.shape[0];
    AM_CHECK(given >= least, AM_ERR_SHAPE, "attention: workspace has %zu bytes, %zu are needed", given, least);
    return AM_OK;
}

am_status am_attention_workspace(am_attention_args *a, const am_exec *ex)
{
    attention_job job;
    size_t bytes = 0;
    AM_TRY(check_inputs(a, ex));
    if (ex->dev == AM_DEV_CPU) {
        AM_TRY(attention_plan(a, pick_row(a), a->backward, &job, &bytes));
    } else {
        AM_TRY(attention_check_docs(a));
        AM_TRY(am_cuda_attention_plan(a, a->backward, &a->row, &bytes));
    }
    a->workspace_bytes = (int64_t)bytes;
    return AM_OK;
}

am_status am_attention_row(am_attention_args *a, const am_exec *ex)
{
    size_t bytes = 0;
    AM_TRY(check_inputs(a, ex));
    AM_TRY(attention_check_docs(a));
    if (ex->dev != AM_DEV_CPU)
        return am_cuda_attention_plan(a, a->backward, &a->row, &bytes);
    a->row = pick_row(a)->name;
    return AM_OK;
}

am_status am_attention_forward(const am_attention_args *a, const am_exec *ex)
{
    attention_job job;
    size_t bytes = 0;
    AM_TRY(check_forward(a, ex));
    if (ex->dev != AM_DEV_CPU) {
        AM_TRY(check_cuda(a, false));
        return am_numel(&a->out) == 0 ? AM_OK : am_cuda_attention_forward(a, ex);
    }
    AM_TRY(attention_plan(a, pick_row(a), false, &job, &bytes));
    if (am_numel(&a->out) == 0)
        return AM_OK;
    AM_TRY(attention_layout(&job, &a->workspace));
    fill_gaps(&a->out, &a->docs, 0.0f);
    fill_gaps(&a->lse, &a->docs, -INFINITY);
    if (a->lse_low.dtype != AM_NONE)
        fill_gaps(&a->lse_low, &a->docs, 0.0f);
    attention_run(&job, ATTENTION_PACK);
    attention_run(&job, ATTENTION_FORWARD);
    return AM_OK;
}

am_status am_attention_backward(const am_attention_args *a, const am_exec *ex)
{
    attention_job job;
    size_t bytes = 0;
    AM_TRY(check_backward(a, ex));
    if (ex->dev != AM_DEV_CPU) {
        AM_TRY(check_cuda(a, true));
        return am_numel(&a->dq) == 0 && am_numel(&a->dk) == 0 ? AM_OK : am_cuda_attention_backward(a, ex);
    }
    AM_TRY(attention_plan(a, pick_row(a), true, &job, &bytes));
    if (am_numel(&a->dq) == 0 && am_numel(&a->dk) == 0)
        return AM_OK;
    AM_TRY(attention_layout(&job, &a->workspace));
    fill_gaps(&a->dq, &a->docs, 0.0f);
    fill_gaps(&a->dk, a->docs_k.present ? &a->docs_k : &a->docs, 0.0f);
    fill_gaps(&a->dv, a->docs_k.present ? &a->docs_k : &a->docs, 0.0f);
    attention_run(&job, ATTENTION_BACKWARD);
    attention_run(&job, ATTENTION_REDUCE);
    return AM_OK;
}
