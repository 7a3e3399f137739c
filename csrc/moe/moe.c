#include "moe.h"

#include <string.h>

#include "am_cpu.h"
#include "am_rows.h"
#include "moe_plan.h"

/* `extents` of `ndim` axes, in the dtype. */
static am_status check_tensor(const char *name, const am_tensor *t, am_dtype dtype, int ndim, const int64_t *extents)
{
    AM_CHECK(t->dtype == dtype, AM_ERR_DTYPE, "moe: %s is %s, %s is needed", name, am_dtype_name(t->dtype),
             am_dtype_name(dtype));
    AM_CHECK(t->ndim == ndim, AM_ERR_SHAPE, "moe: %s has %d axes, %d are needed", name, t->ndim, ndim);
    for (int d = 0; d < ndim; d++)
        AM_CHECK(t->shape[d] == extents[d], AM_ERR_SHAPE, "moe: %s has extent %lld on axis %d, %lld is needed", name,
                 (long long)t->shape[d], d, (long long)extents[d]);
    return AM_OK;
}

static am_status check_unit(const char *name, const am_tensor *t)
{
    const int last = t->ndim - 1;
    AM_CHECK(am_numel(t) == 0 || t->shape[last] == 1 || t->stride[last] == 1, AM_ERR_SHAPE,
             "moe: %s has stride %lld on its last axis, 1 is needed", name, (long long)t->stride[last]);
    return AM_OK;
}

static am_status check_input(const char *name, const am_tensor *t, const am_moe_args *a, int ndim,
                             const int64_t *extents)
{
    AM_CHECK(t->dtype == a->hidden.dtype, AM_ERR_DTYPE, "moe: %s is %s, hidden is %s", name, am_dtype_name(t->dtype),
             am_dtype_name(a->hidden.dtype));
    AM_TRY(check_tensor(name, t, t->dtype, ndim, extents));
    return check_unit(name, t);
}

/* A tensor of ours: dense; an optional one may be left out. */
static am_status check_own(const char *name, const am_tensor *t, bool optional, am_dtype dtype, int ndim,
                           const int64_t *extents)
{
    if (optional && t->dtype == AM_NONE)
        return AM_OK;
    AM_TRY(check_tensor(name, t, dtype, ndim, extents));
    AM_CHECK(am_is_contiguous(t), AM_ERR_SHAPE, "moe: %s is not contiguous", name);
    return AM_OK;
}

#define EXTENTS(...)                                                                                                   \
    (const int64_t[]) { __VA_ARGS__ }

static am_status check_inputs(const am_moe_args *a, const am_exec *ex)
{
    const am_tensor *const x = &a->hidden;
    AM_CHECK(x->dtype == AM_F32 || x->dtype == AM_BF16, AM_ERR_DTYPE,
             "moe: hidden is %s, float32 or bfloat16 is needed", am_dtype_name(x->dtype));
    AM_CHECK(x->ndim == 2, AM_ERR_SHAPE, "moe: hidden has %d axes, [T, H] is needed", x->ndim);
    AM_TRY(check_unit("hidden", x));
    AM_CHECK(a->router_weight.ndim == 2, AM_ERR_SHAPE, "moe: router_weight has %d axes, [E, H] is needed",
             a->router_weight.ndim);
    AM_CHECK(a->down.ndim == 3, AM_ERR_SHAPE, "moe: down has %d axes, [E, H, I] is needed", a->down.ndim);
    const int64_t tokens = x->shape[0], hidden = x->shape[1], experts = a->router_weight.shape[0];
    const int64_t inner = a->down.shape[2];
    AM_TRY(check_input("router_weight", &a->router_weight, a, 2, EXTENTS(experts, hidden)));
    AM_TRY(check_input("gate_up", &a->gate_up, a, 3, EXTENTS(experts, 2 * inner, hidden)));
    AM_TRY(check_input("down", &a->down, a, 3, EXTENTS(experts, hidden, inner)));
    AM_CHECK(a->top_k >= 1 && a->top_k <= experts, AM_ERR_ARG, "moe: top_k is %lld, 1 to %lld experts are possible",
             (long long)a->top_k, (long long)experts);
    if (a->padding.dtype != AM_NONE)
        AM_TRY(check_tensor("padding", &a->padding, AM_BOOL, 1, EXTENTS(tokens)));
    AM_CHECK(ex->dev == AM_DEV_CPU, AM_ERR_UNSUPPORTED, "moe: there is a CPU kernel only, the tensors are on CUDA");
    return AM_OK;
}

/* What forward makes and backward reads again. */
static am_status check_kept(const am_moe_args *a, bool optional)
{
    const int64_t tokens = a->hidden.shape[0], experts = a->router_weight.shape[0], k = a->top_k;
    AM_TRY(check_own("logits", &a->logits, false, a->hidden.dtype, 2, EXTENTS(tokens, experts)));
    AM_TRY(check_own("chosen", &a->chosen, false, AM_I32, 2, EXTENTS(tokens, k)));
    AM_TRY(check_own("weights", &a->weights, false, AM_F32, 2, EXTENTS(tokens, k)));
    AM_TRY(
        check_own("products", &a->products, optional, a->hidden.dtype, 2, EXTENTS(tokens * k, 2 * a->down.shape[2])));
    return check_own("workspace", &a->workspace, false, AM_U8, 1, a->workspace.shape);
}

static am_status check_forward(const am_moe_args *a, const am_exec *ex)
{
    AM_TRY(check_inputs(a, ex));
    AM_TRY(check_kept(a, true));
    AM_TRY(check_own("out", &a->out, false, a->hidden.dtype, 2, a->hidden.shape));
    AM_TRY(check_own("load", &a->load, false, AM_I64, 1, a->router_weight.shape));
    AM_TRY(check_own("prob_sum", &a->prob_sum, false, AM_F32, 1, a->router_weight.shape));
    return check_own("real_rows", &a->real_rows, false, AM_I64, 0, NULL);
}

static am_status check_chosen(const am_moe_args *a)
{
    const int32_t *const chosen = a->chosen.data;
    const uint8_t *const padding = a->padding.data;
    for (int64_t t = 0; t < a->hidden.shape[0]; t++) {
        const bool real = a->padding.dtype == AM_NONE || padding[t * a->padding.stride[0]] == 0;
        for (int64_t p = t * a->top_k; p < (t + 1) * a->top_k && real; p++)
            AM_CHECK(chosen[p] >= 0 && chosen[p] < a->router_weight.shape[0], AM_ERR_ARG,
                     "moe: chosen[%lld] is %d, there are %lld experts", (long long)p, (int)chosen[p],
                     (long long)a->router_weight.shape[0]);
    }
    return AM_OK;
}

static am_status check_backward(const am_moe_args *a, const am_exec *ex)
{
    const am_dtype dtype = a->hidden.dtype;
    AM_TRY(check_inputs(a, ex));
    AM_TRY(check_kept(a, false));
    AM_TRY(check_input("dout", &a->dout, a, 2, a->hidden.shape));
    AM_TRY(check_own("dprob_sum", &a->dprob_sum, true, AM_F32, 1, a->router_weight.shape));
    AM_TRY(check_own("dhidden", &a->dhidden, true, dtype, 2, a->hidden.shape));
    AM_TRY(check_own("drouter", &a->drouter, true, dtype, 2, a->router_weight.shape));
    AM_TRY(check_own("dgate_up", &a->dgate_up, true, dtype, 3, a->gate_up.shape));
    AM_TRY(check_own("ddown", &a->ddown, true, dtype, 3, a->down.shape));
    return check_chosen(a);
}

static const moe_row *pick_row(am_dtype dtype)
{
#if defined(__x86_64__)
    static const moe_row *const fp32[AM_ISA_COUNT] = {&am_moe_scalar, &am_moe_avx2, &am_moe_avx512, &am_moe_avx512};
    const am_isa isa = am_cpu_isa();
    if (dtype == AM_BF16 && isa == AM_ISA_AVX512_BF16)
        return am_cpu_amx() ? &am_moe_amx : &am_moe_bf16;
    return fp32[isa];
#else
    (void)dtype;
    return &am_moe_scalar;
#endif
}

am_status am_moe_workspace(am_moe_args *a, const am_exec *ex)
{
    moe_job job;
    size_t bytes = 0;
    AM_TRY(check_inputs(a, ex));
    moe_plan(a, pick_row(a->hidden.dtype), a->backward, &job, &bytes);
    a->workspace_bytes = (int64_t)bytes;
    return AM_OK;
}

/* The rows of padding, which no kernel touches. */
static void fill_padding(const moe_job *job)
{
    const am_moe_args *const a = job->a;
    const size_t logits = (size_t)job->experts * am_dtype_size(a->logits.dtype), k = (size_t)job->top_k;
    for (int64_t t = 0, i = 0; t < job->tokens; t++) {
        if (i < job->n_real && job->real[i] == t) {
            i++;
            continue;
        }
        memset(am_at(&a->logits, t * job->experts), 0, logits);
        memset(am_at(&a->chosen, t * job->top_k), 0xff, k * sizeof(int32_t));
        memset(am_at(&a->weights, t * job->top_k), 0, k * sizeof(float));
    }
    const size_t row = (size_t)(2 * job->inner) * am_dtype_size(a->hidden.dtype);
    const int64_t rows = job->n_real * job->top_k, all = job->tokens * job->top_k;
    if (a->products.dtype != AM_NONE && rows < all)
        memset(am_at(&a->products, rows * 2 * job->inner), 0, (size_t)(all - rows) * row);
}

static void count(const moe_job *job)
{
    const am_moe_args *const a = job->a;
    for (int64_t e = 0; e < job->experts; e++) {
        double total = 0.0;
        for (int64_t i = 0; i < moe_blocks(job->n_real, MOE_GROUP); i++)
            total += job->partial[i * job->experts + e];
        ((float *)a->prob_sum.data)[e] = (float)total;
        ((int64_t *)a->load.data)[e] = job->offset[e + 1] - job->offset[e];
    }
    *(int64_t *)a->real_rows.data = job->n_real;
}

am_status am_moe_forward(am_moe_args *a, const am_exec *ex)
{
    moe_job job;
    size_t bytes = 0;
    AM_TRY(check_forward(a, ex));
    moe_plan(a, pick_row(a->hidden.dtype), false, &job, &bytes);
    AM_TRY(moe_layout(&job, &a->workspace));
    if (a->hidden.dtype == AM_F32)
        job.sum = a->out.data;
    fill_padding(&job);
    moe_run(&job, MOE_PACK_ROUTER);
    moe_run(&job, MOE_ROUTE);
    moe_sort(&job);
    count(&job);
    moe_run(&job, MOE_GATE_UP);
    moe_run(&job, MOE_COMBINE);
    return AM_OK;
}

am_status am_moe_backward(am_moe_args *a, const am_exec *ex)
{
    moe_job job;
    size_t bytes = 0;
    AM_TRY(check_backward(a, ex));
    moe_plan(a, pick_row(a->hidden.dtype), true, &job, &bytes);
    AM_TRY(moe_layout(&job, &a->workspace));
    if (a->hidden.dtype == AM_F32)
        job.sum = a->dhidden.data;
    moe_sort(&job);
    moe_run(&job, MOE_ACT_GRAD);
    moe_run(&job, MOE_ROUTE_GRAD);
    moe_run(&job, MOE_WEIGHT_GRAD);
    if (a->dhidden.dtype != AM_NONE)
        moe_run(&job, MOE_HIDDEN_GRAD);
    return AM_OK;
}
