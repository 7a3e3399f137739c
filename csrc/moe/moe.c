#include "moe.h"

#include <string.h>

#include "am_cpu.h"
#include "am_rows.h"
#include "moe_plan.h"

#ifndef AM_WITH_CUDA
#define am_cuda_moe_plan(a, row, bytes) ((void)(bytes), am_no_cuda("moe"))
#define am_cuda_moe_forward(a, ex) am_no_cuda("moe")
#define am_cuda_moe_backward(a, ex) am_no_cuda("moe")
#endif

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

static bool has(const am_tensor *t) { return t->dtype != AM_NONE; }

static am_status check_router(const am_moe_args *a)
{
    const int64_t experts = a->router_weight.shape[0];
    AM_CHECK(a->router_weight.ndim == 2, AM_ERR_SHAPE, "moe: router_weight has %d axes, [E, H] is needed",
             a->router_weight.ndim);
    AM_TRY(check_input("router_weight", &a->router_weight, a, 2, EXTENTS(experts, a->hidden.shape[1])));
    AM_CHECK(a->top_k >= 1 && a->top_k <= experts, AM_ERR_ARG, "moe: top_k is %lld, 1 to %lld experts are possible",
             (long long)a->top_k, (long long)experts);
    if (has(&a->padding))
        AM_TRY(check_tensor("padding", &a->padding, AM_BOOL, 1, EXTENTS(a->hidden.shape[0])));
    return AM_OK;
}

static am_status check_experts(const am_moe_args *a, int64_t experts)
{
    AM_CHECK(a->down.ndim == 3, AM_ERR_SHAPE, "moe: down has %d axes, [E, H, I] is needed", a->down.ndim);
    const int64_t hidden = a->hidden.shape[1], inner = a->down.shape[2];
    AM_TRY(check_input("gate_up", &a->gate_up, a, 3, EXTENTS(experts, 2 * inner, hidden)));
    return check_input("down", &a->down, a, 3, EXTENTS(experts, hidden, inner));
}

/* Nobody looks whether they are those of the choice; that they stay inside of the rows can be seen. */
static am_status check_counts_given(const am_moe_args *a, const am_exec *ex)
{
    int64_t left = a->hidden.shape[0] * a->top_k;
    if (!a->counts.present)
        return AM_OK;
    AM_CHECK(ex->dev != AM_DEV_CPU, AM_ERR_UNSUPPORTED, "moe: counts are for cuBLASLt, hidden is on the CPU");
    AM_CHECK(has(&a->down) && a->counts.n == a->down.shape[0], AM_ERR_SHAPE,
             "moe: counts has %lld elements, there are %lld experts", (long long)a->counts.n,
             (long long)(has(&a->down) ? a->down.shape[0] : 0));
    for (int64_t e = 0; e < a->counts.n; left -= a->counts.data[e++])
        AM_CHECK(a->counts.data[e] >= 0 && a->counts.data[e] <= left, AM_ERR_ARG,
                 "moe: counts[%lld] is %lld, 0 to %lld rows are left", (long long)e, (long long)a->counts.data[e],
                 (long long)left);
    return AM_OK;
}

/* The inputs of the whole layer, or of the half whose weights are given. */
static am_status check_inputs(const am_moe_args *a, const am_exec *ex)
{
    const am_tensor *const x = &a->hidden;
    AM_CHECK(x->dtype == AM_F32 || x->dtype == AM_BF16, AM_ERR_DTYPE,
             "moe: hidden is %s, float32 or bfloat16 is needed", am_dtype_name(x->dtype));
    AM_CHECK(x->ndim == 2, AM_ERR_SHAPE, "moe: hidden has %d axes, [T, H] is needed", x->ndim);
    AM_TRY(check_unit("hidden", x));
    AM_CHECK(has(&a->gate_up) == has(&a->down), AM_ERR_ARG, "moe: gate_up and down are needed together");
    AM_CHECK(has(&a->router_weight) || has(&a->down), AM_ERR_ARG, "moe: router_weight or gate_up and down are needed");
    AM_CHECK(a->top_k >= 1, AM_ERR_ARG, "moe: top_k is %lld, at least 1 is needed", (long long)a->top_k);
    if (has(&a->router_weight))
        AM_TRY(check_router(a));
    if (has(&a->down))
        AM_TRY(check_experts(a, has(&a->router_weight) ? a->router_weight.shape[0] : a->down.shape[0]));
    return check_counts_given(a, ex);
}

static am_status check_choice(const am_moe_args *a)
{
    const int64_t tokens = a->hidden.shape[0], k = a->top_k;
    AM_TRY(check_own("chosen", &a->chosen, false, AM_I32, 2, EXTENTS(tokens, k)));
    AM_TRY(check_own("weights", &a->weights, false, AM_F32, 2, EXTENTS(tokens, k)));
    return check_own("workspace", &a->workspace, false, AM_U8, 1, a->workspace.shape);
}

static am_status check_logits(const am_moe_args *a)
{
    return check_own("logits", &a->logits, false, a->hidden.dtype, 2,
                     EXTENTS(a->hidden.shape[0], a->router_weight.shape[0]));
}

static am_status check_products(const am_moe_args *a, bool optional)
{
    return check_own("products", &a->products, optional, a->hidden.dtype, 2,
                     EXTENTS(a->hidden.shape[0] * a->top_k, 2 * a->down.shape[2]));
}

static am_status check_counts(const am_moe_args *a)
{
    AM_TRY(check_own("load", &a->load, false, AM_I64, 1, a->router_weight.shape));
    AM_TRY(check_own("prob_sum", &a->prob_sum, false, AM_F32, 1, a->router_weight.shape));
    return check_own("real_rows", &a->real_rows, false, AM_I64, 0, NULL);
}

static am_status check_out(const am_moe_args *a, bool optional)
{
    return check_own("out", &a->out, optional, a->hidden.dtype, 2, a->hidden.shape);
}

/* Every real token's choice is one of `experts`, or, where `none` may be, -1. */
static am_status check_chosen(const am_moe_args *a, int64_t experts, bool none)
{
    const int32_t *const chosen = a->chosen.data;
    const uint8_t *const padding = a->padding.data;
    for (int64_t t = 0; t < a->hidden.shape[0]; t++) {
        const bool real = !has(&a->padding) || padding[t * a->padding.stride[0]] == 0;
        for (int64_t p = t * a->top_k; p < (t + 1) * a->top_k && real; p++)
            AM_CHECK(chosen[p] >= (none ? -1 : 0) && chosen[p] < experts, AM_ERR_ARG,
                     "moe: chosen[%lld] is %d, there are %lld experts", (long long)p, (int)chosen[p],
                     (long long)experts);
    }
    return AM_OK;
}

static am_status check_router_grad(const am_moe_args *a)
{
    AM_TRY(check_logits(a));
    AM_TRY(check_own("dprob_sum", &a->dprob_sum, true, AM_F32, 1, a->router_weight.shape));
    return check_own("drouter", &a->drouter, true, a->hidden.dtype, 2, a->router_weight.shape);
}

/* In the dtype of its weight, or in float32. */
static am_status check_weight_grad(const char *name, const am_tensor *grad, const am_tensor *weight)
{
    return check_own(name, grad, true, grad->dtype == AM_F32 ? AM_F32 : weight->dtype, 3, weight->shape);
}

static am_status check_experts_grad(const am_moe_args *a)
{
    AM_TRY(check_products(a, false));
    AM_TRY(check_input("dout", &a->dout, a, 2, a->hidden.shape));
    AM_TRY(check_weight_grad("dgate_up", &a->dgate_up, &a->gate_up));
    return check_weight_grad("ddown", &a->ddown, &a->down);
}

static am_status check_dhidden(const am_moe_args *a)
{
    return check_own("dhidden", &a->dhidden, true, a->hidden.dtype, 2, a->hidden.shape);
}

static am_status check_dweights(const am_moe_args *a, bool optional)
{
    return check_own("dweights", &a->dweights, optional, AM_F32, 2, EXTENTS(a->hidden.shape[0], a->top_k));
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
    if (ex->dev == AM_DEV_CPU)
        moe_plan(a, pick_row(a->hidden.dtype), a->backward, &job, &bytes);
    else
        AM_TRY(am_cuda_moe_plan(a, &a->row, &bytes));
    a->workspace_bytes = (int64_t)bytes;
    return AM_OK;
}

am_status am_moe_row(am_moe_args *a, const am_exec *ex)
{
    size_t bytes = 0;
    AM_TRY(check_inputs(a, ex));
    if (ex->dev != AM_DEV_CPU)
        return am_cuda_moe_plan(a, &a->row, &bytes);
    a->row = pick_row(a->hidden.dtype)->name;
    return AM_OK;
}

static am_status start(const am_moe_args *a, bool backward, moe_job *job)
{
    size_t bytes = 0;
    moe_plan(a, pick_row(a->hidden.dtype), backward, job, &bytes);
    AM_TRY(moe_layout(job, &a->workspace));
    if (a->hidden.dtype == AM_F32)
        job->sum = backward ? a->dhidden.data : a->out.data;
    return AM_OK;
}

/* The router's rows of padding, which no kernel touches. */
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
}

static void fill_products(const moe_job *job)
{
    const am_moe_args *const a = job->a;
    const size_t row = (size_t)(2 * job->inner) * am_dtype_size(a->hidden.dtype);
    const int64_t rows = job->offset[job->experts], all = job->tokens * job->top_k;
    if (has(&a->products) && rows < all)
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

static void route(moe_job *job)
{
    fill_padding(job);
    moe_run(job, MOE_PACK_ROUTER);
    moe_run(job, MOE_ROUTE);
    moe_sort(job);
    count(job);
}

static void run_experts(moe_job *job)
{
    fill_products(job);
    moe_run(job, MOE_GATE_UP);
    if (has(&job->a->out))
        moe_run(job, MOE_COMBINE);
}

static void run_gradients(moe_job *job)
{
    moe_run(job, MOE_WEIGHT_GRAD);
    if (has(&job->a->dhidden))
        moe_run(job, MOE_HIDDEN_GRAD);
}

am_status am_moe_forward(am_moe_args *a, const am_exec *ex)
{
    moe_job job;
    AM_TRY(check_inputs(a, ex));
    AM_TRY(check_choice(a));
    AM_TRY(check_logits(a));
    AM_TRY(check_counts(a));
    AM_TRY(check_products(a, true));
    AM_TRY(check_out(a, true));
    if (ex->dev != AM_DEV_CPU)
        return am_cuda_moe_forward(a, ex);
    AM_TRY(start(a, false, &job));
    route(&job);
    run_experts(&job);
    return AM_OK;
}

am_status am_moe_route_forward(am_moe_args *a, const am_exec *ex)
{
    moe_job job;
    AM_TRY(check_inputs(a, ex));
    AM_TRY(check_choice(a));
    AM_TRY(check_logits(a));
    AM_TRY(check_counts(a));
    if (ex->dev != AM_DEV_CPU)
        return am_cuda_moe_forward(a, ex);
    AM_TRY(start(a, false, &job));
    route(&job);
    return AM_OK;
}

am_status am_moe_experts_forward(am_moe_args *a, const am_exec *ex)
{
    moe_job job;
    AM_TRY(check_inputs(a, ex));
    AM_TRY(check_choice(a));
    AM_TRY(check_products(a, true));
    AM_TRY(check_out(a, true));
    if (ex->dev != AM_DEV_CPU)
        return am_cuda_moe_forward(a, ex);
    AM_TRY(check_chosen(a, a->down.shape[0], true));
    AM_TRY(start(a, false, &job));
    moe_sort(&job);
    run_experts(&job);
    return AM_OK;
}

am_status am_moe_backward(am_moe_args *a, const am_exec *ex)
{
    moe_job job;
    AM_TRY(check_inputs(a, ex));
    AM_TRY(check_choice(a));
    AM_TRY(check_router_grad(a));
    AM_TRY(check_experts_grad(a));
    AM_TRY(check_dhidden(a));
    if (ex->dev != AM_DEV_CPU)
        return am_cuda_moe_backward(a, ex);
    AM_TRY(check_chosen(a, a->router_weight.shape[0], false));
    AM_TRY(start(a, true, &job));
    moe_sort(&job);
    moe_run(&job, MOE_ACT_GRAD);
    moe_run(&job, MOE_ROUTE_GRAD);
    run_gradients(&job);
    return AM_OK;
}

am_status am_moe_route_backward(am_moe_args *a, const am_exec *ex)
{
    moe_job job;
    AM_TRY(check_inputs(a, ex));
    AM_TRY(check_choice(a));
    AM_TRY(check_router_grad(a));
    AM_TRY(check_dweights(a, false));
    AM_TRY(check_dhidden(a));
    if (ex->dev != AM_DEV_CPU)
        return am_cuda_moe_backward(a, ex);
    AM_TRY(check_chosen(a, a->router_weight.shape[0], false));
    AM_TRY(start(a, true, &job));
    moe_run(&job, MOE_ROUTE_GRAD);
    run_gradients(&job);
    return AM_OK;
}

am_status am_moe_experts_backward(am_moe_args *a, const am_exec *ex)
{
    moe_job job;
    AM_TRY(check_inputs(a, ex));
    AM_TRY(check_choice(a));
    AM_TRY(check_experts_grad(a));
    AM_TRY(check_dweights(a, true));
    AM_TRY(check_dhidden(a));
    if (ex->dev != AM_DEV_CPU)
        return am_cuda_moe_backward(a, ex);
    AM_TRY(check_chosen(a, a->down.shape[0], true));
    AM_TRY(start(a, true, &job));
    moe_sort(&job);
    moe_run(&job, MOE_ACT_GRAD);
    for (int64_t p = 0; p < job.tokens * job.top_k && has(&a->dweights); p++)
        ((float *)a->dweights.data)[p] = moe_dweight(&job, p);
    run_gradients(&job);
    return AM_OK;
}
