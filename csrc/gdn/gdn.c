#include "gdn.h"

#include <math.h>
#include <string.h>

#include "am_cpu.h"
#include "gdn_plan.h"

static am_status check_shape(const am_tensor *t, const char *name, int ndim, const int64_t *shape)
{
    AM_CHECK(t->ndim == ndim, AM_ERR_SHAPE, "gated_delta_rule: %s has %d axes, %d are needed", name, t->ndim, ndim);
    for (int d = 0; d < ndim; d++)
        AM_CHECK(t->shape[d] == shape[d], AM_ERR_SHAPE,
                 "gated_delta_rule: %s has extent %lld on axis %d, %lld is needed", name, (long long)t->shape[d], d,
                 (long long)shape[d]);
    AM_CHECK(ndim == 2 || am_numel(t) == 0 || t->stride[ndim - 1] == 1, AM_ERR_SHAPE,
             "gated_delta_rule: the last axis of %s has stride %lld, it must be contiguous (stride 1)", name,
             (long long)t->stride[ndim - 1]);
    return AM_OK;
}

static am_status check_rows(const am_tensor *t, const char *name, am_dtype dtype, int64_t tokens, int64_t heads,
                            int64_t dim)
{
    AM_CHECK(t->dtype == dtype, AM_ERR_DTYPE, "gated_delta_rule: %s is %s, q is %s", name, am_dtype_name(t->dtype),
             am_dtype_name(dtype));
    return check_shape(t, name, 3, (const int64_t[]){tokens, heads, dim});
}

static am_status check_numbers(const am_gdn_args *a, const am_tensor *t, const char *name)
{
    AM_CHECK(t->dtype == AM_F32, AM_ERR_DTYPE, "gated_delta_rule: %s is %s, float32 is needed", name,
             am_dtype_name(t->dtype));
    return check_shape(t, name, 2, (const int64_t[]){a->v.shape[0], a->v.shape[1]});
}

static am_status check_states(const am_gdn_args *a, const am_tensor *t, const char *name)
{
    if (t->dtype == AM_NONE)
        return AM_OK;
    AM_CHECK(t->dtype == AM_F32, AM_ERR_DTYPE, "gated_delta_rule: %s is %s, float32 is needed", name,
             am_dtype_name(t->dtype));
    return check_shape(t, name, 4, (const int64_t[]){a->docs.n / 2, a->v.shape[1], a->q.shape[2], a->v.shape[2]});
}

static am_status check_dim(int64_t dim, const char *name)
{
    AM_CHECK(dim > 0 && dim <= 256 && dim % 8 == 0, AM_ERR_UNSUPPORTED,
             "gated_delta_rule: %s dim %lld has no kernel; there are multiples of 8 up to 256", name, (long long)dim);
    return AM_OK;
}

static am_status check_sizes(const am_gdn_args *a)
{
    const am_tensor *const q = &a->q;
    const am_tensor *const v = &a->v;
    AM_CHECK(q->dtype == AM_F32 || q->dtype == AM_BF16, AM_ERR_DTYPE,
             "gated_delta_rule: q is %s, float32 or bfloat16 is needed", am_dtype_name(q->dtype));
    AM_CHECK(q->ndim == 3 && v->ndim == 3, AM_ERR_SHAPE,
             "gated_delta_rule: q has %d axes and v %d, [tokens, heads, dim] is needed", q->ndim, v->ndim);
    AM_TRY(check_dim(q->shape[2], "key"));
    AM_TRY(check_dim(v->shape[2], "value"));
    AM_TRY(check_rows(q, "q", q->dtype, q->shape[0], q->shape[1], q->shape[2]));
    AM_TRY(check_rows(v, "v", q->dtype, q->shape[0], v->shape[1], v->shape[2]));
    AM_CHECK(q->shape[1] > 0 && v->shape[1] > 0 && v->shape[1] % q->shape[1] == 0, AM_ERR_SHAPE,
             "gated_delta_rule: %lld value heads are not a multiple of %lld key heads", (long long)v->shape[1],
             (long long)q->shape[1]);
    return AM_OK;
}

static am_status check_forward(const am_gdn_args *a)
{
    const am_tensor *const q = &a->q;
    const am_tensor *const v = &a->v;
    AM_TRY(check_sizes(a));
    AM_TRY(check_rows(&a->k, "k", q->dtype, q->shape[0], q->shape[1], q->shape[2]));
    AM_TRY(check_numbers(a, &a->g, "g"));
    AM_CHECK(a->beta.dtype == AM_F32 || a->beta.dtype == q->dtype, AM_ERR_DTYPE,
             "gated_delta_rule: beta is %s, float32 or q's %s is needed", am_dtype_name(a->beta.dtype),
             am_dtype_name(q->dtype));
    AM_TRY(check_shape(&a->beta, "beta", 2, v->shape));
    AM_TRY(check_states(a, &a->initial, "initial_state"));
    AM_TRY(check_states(a, &a->final, "final_state"));
    AM_CHECK(isfinite(a->scale), AM_ERR_ARG, "gated_delta_rule: scale is %g, it must be finite", a->scale);
    AM_CHECK(a->part >= AM_GDN_WHOLE && a->part <= AM_GDN_REST, AM_ERR_ARG, "gated_delta_rule: part is %lld of 0, 1, 2",
             (long long)a->part);
    if (a->states.dtype != AM_NONE) {
        AM_CHECK(a->states.dtype == AM_F32, AM_ERR_DTYPE, "gated_delta_rule: states is %s, float32 is needed",
                 am_dtype_name(a->states.dtype));
        AM_TRY(check_shape(&a->states, "states", 4,
                           (const int64_t[]){q->shape[0] / AM_GDN_STEP, v->shape[1], q->shape[2], v->shape[2]}));
    }
    AM_CHECK(a->workspace.dtype == AM_U8 && a->workspace.ndim == 1 && am_is_contiguous(&a->workspace), AM_ERR_DTYPE,
             "gated_delta_rule: workspace must be contiguous uint8 of one axis");
    return AM_OK;
}

static am_status check_backward(const am_gdn_args *a)
{
    const am_tensor *const q = &a->q;
    const am_tensor *const v = &a->v;
    AM_TRY(check_forward(a));
    AM_CHECK(a->part != AM_GDN_REST, AM_ERR_ARG, "gated_delta_rule: part is 2, backward has 0 and 1");
    AM_CHECK(a->states.dtype != AM_NONE || q->shape[0] < AM_GDN_STEP, AM_ERR_ARG,
             "gated_delta_rule: %lld tokens need the states that forward kept", (long long)q->shape[0]);
    AM_TRY(check_rows(&a->dout, "dout", q->dtype, q->shape[0], v->shape[1], v->shape[2]));
    AM_TRY(check_rows(&a->dq, "dq", q->dtype, q->shape[0], q->shape[1], q->shape[2]));
    AM_TRY(check_rows(&a->dk, "dk", q->dtype, q->shape[0], q->shape[1], q->shape[2]));
    AM_TRY(check_rows(&a->dv, "dv", q->dtype, q->shape[0], v->shape[1], v->shape[2]));
    AM_TRY(check_numbers(a, &a->dg, "dg"));
    AM_CHECK(a->dbeta.dtype == a->beta.dtype, AM_ERR_DTYPE, "gated_delta_rule: dbeta is %s, beta is %s",
             am_dtype_name(a->dbeta.dtype), am_dtype_name(a->beta.dtype));
    AM_TRY(check_shape(&a->dbeta, "dbeta", 2, v->shape));
    AM_TRY(check_states(a, &a->dfinal, "the gradient of final_state"));
    return check_states(a, &a->dinitial, "the gradient of initial_state");
}

static const gdn_row *pick_row(void)
{
    static const gdn_row *const rows[AM_ISA_COUNT] = {&am_gdn_scalar, &am_gdn_avx2, &am_gdn_avx512, &am_gdn_avx512};
    return rows[am_cpu_isa()];
}

#ifndef AM_WITH_CUDA
am_status am_cuda_gdn_plan(const am_gdn_args *a, bool backward, const char **row, size_t *bytes)
{
    (void)a, (void)backward, (void)row, (void)bytes;
    return am_no_cuda("gated_delta_rule");
}
am_status am_cuda_gdn_forward(const am_gdn_args *a, const am_exec *ex)
{
    (void)a, (void)ex;
    return am_no_cuda("gated_delta_rule");
}
am_status am_cuda_gdn_backward(const am_gdn_args *a, const am_exec *ex)
{
    (void)a, (void)ex;
    return am_no_cuda("gated_delta_rule");
}
#endif

static am_status check_cuda(const am_gdn_args *a, bool backward)
{
    const am_tensor *const docs = &a->device_docs;
    const int64_t needed = 3 * (a->docs.n / 2);
    const char *row = NULL;
    size_t least = 0;
    AM_TRY(gdn_check_docs(&a->docs, a->q.shape[0]));
    AM_TRY(am_cuda_gdn_plan(a, backward, &row, &least));
    AM_CHECK(docs->dtype == AM_I64 && docs->ndim == 1 && am_is_contiguous(docs), AM_ERR_DTYPE,
             "gated_delta_rule: device_docs must be contiguous int64 of one axis, beside q");
    AM_CHECK(docs->shape[0] == needed, AM_ERR_SHAPE, "gated_delta_rule: device_docs has %lld elements, %lld are needed",
             (long long)docs->shape[0], (long long)needed);
    const size_t given = (size_t)a->workspace.shape[0];
    AM_CHECK(given >= least, AM_ERR_SHAPE, "gated_delta_rule: workspace has %zu bytes, %zu are needed", given, least);
    return AM_OK;
}

/* Zeros in the tokens outside every document. */
static void clear_gaps(const am_tensor *t, const am_i64_array *docs)
{
    const size_t bytes = (t->ndim == 3 ? (size_t)t->shape[2] : 1) * am_dtype_size(t->dtype);
    int64_t at = 0;
    for (int64_t n = 0; n <= docs->n; n += 2) {
        const int64_t end = n < docs->n ? docs->data[n] : t->shape[0];
        for (; at < end; at++)
            for (int64_t h = 0; h < t->shape[1]; h++)
                memset(am_token_row(t, at, h), 0, bytes);
        at = n < docs->n ? docs->data[n + 1] : end;
    }
}

am_status am_gdn_workspace(am_gdn_args *a, const am_exec *ex)
{
    gdn_job job;
    size_t bytes = 0;
    AM_TRY(check_sizes(a));
    if (ex->dev == AM_DEV_CPU) {
        AM_TRY(gdn_plan(a, pick_row(), a->backward, &job, &bytes));
    } else {
        AM_TRY(gdn_check_docs(&a->docs, a->q.shape[0]));
        AM_TRY(am_cuda_gdn_plan(a, a->backward, &a->row, &bytes));
    }
    a->workspace_bytes = (int64_t)bytes;
    return AM_OK;
}

am_status am_gdn_row(am_gdn_args *a, const am_exec *ex)
{
    size_t bytes = 0;
    AM_TRY(check_sizes(a));
    AM_TRY(check_rows(&a->k, "k", a->q.dtype, a->q.shape[0], a->q.shape[1], a->q.shape[2]));
    AM_TRY(gdn_check_docs(&a->docs, a->q.shape[0]));
    if (ex->dev != AM_DEV_CPU)
        return am_cuda_gdn_plan(a, a->backward, &a->row, &bytes);
    a->row = pick_row()->name;
    return AM_OK;
}

am_status am_gdn_forward(const am_gdn_args *a, const am_exec *ex)
{
    gdn_job job;
    size_t bytes = 0;
    AM_TRY(check_forward(a));
    AM_TRY(check_rows(&a->o, "o", a->q.dtype, a->q.shape[0], a->v.shape[1], a->v.shape[2]));
    if (ex->dev != AM_DEV_CPU) {
        AM_TRY(check_cuda(a, false));
        return am_cuda_gdn_forward(a, ex);
    }
    AM_TRY(gdn_plan(a, pick_row(), false, &job, &bytes));
    AM_TRY(gdn_layout(&job, &a->workspace));
    if (a->part == AM_GDN_EARLY)
        return AM_OK;
    clear_gaps(&a->o, &a->docs);
    gdn_run(&job);
    return AM_OK;
}

am_status am_gdn_backward(const am_gdn_args *a, const am_exec *ex)
{
    const am_tensor *const grads[] = {&a->dq, &a->dk, &a->dv, &a->dg, &a->dbeta};
    gdn_job job;
    size_t bytes = 0;
    AM_TRY(check_backward(a));
    if (ex->dev != AM_DEV_CPU) {
        AM_TRY(check_cuda(a, true));
        return am_cuda_gdn_backward(a, ex);
    }
    AM_TRY(gdn_plan(a, pick_row(), true, &job, &bytes));
    AM_TRY(gdn_layout(&job, &a->workspace));
    for (size_t i = 0; i < sizeof grads / sizeof *grads; i++)
        clear_gaps(grads[i], &a->docs);
    gdn_run(&job);
    return AM_OK;
}
