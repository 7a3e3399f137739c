#include "adam.h"

#include <math.h>
#include <string.h>

#include "am_bf16.h"
#include "am_block.h"
#include "am_cpu.h"
#include "am_pool.h"
#include "flat.h"

/* ADAM_GRAIN: elements of a parallel chunk. ADAM_BLOCK: elements of the float32 blocks on a worker's stack. */
enum { ADAM_GRAIN = 1 << 15, ADAM_BLOCK = 1024 };

typedef struct adam_coef {
    float b1, one_minus_b1, b2, one_minus_b2;
    float step_size;    /* lr / (1 - b1^t) */
    float inv_sqrt_bc2; /* 1 / sqrt(1 - b2^t) */
    float eps, decay;   /* decay = lr * wd */
    float inv_scale;    /* 1 / grad_scale */
} adam_coef;

typedef struct adam_slab { /* consecutive elements of one tensor */
    void *p, *w, *m, *v;   /* w: master or remainder, NULL without one */
    const void *g;
    am_dtype param, master, moment, grad;
    int64_t n;
} adam_slab;

#define AM_CPU_INC "adam_cpu.inc"
#include "am_each_isa.h"
#if !defined(__x86_64__)
#define slab_avx2 slab_scalar
#define slab_avx512 slab_scalar
#endif

static void (*const slab_by_isa[AM_ISA_COUNT])(const adam_slab *, const adam_coef *) = {
    [AM_ISA_SCALAR] = slab_scalar,
    [AM_ISA_AVX2] = slab_avx2,
    [AM_ISA_AVX512] = slab_avx512,
    [AM_ISA_AVX512_BF16] = slab_avx512,
};

static bool given(const am_tensor *t) { return t->dtype != AM_NONE && am_numel(t) != 0; }

static am_status check_one(const char *name, const am_tensor *t)
{
    AM_CHECK(t->dtype == AM_F32, AM_ERR_DTYPE, "adam_step: %s is %s, float32 is needed", name, am_dtype_name(t->dtype));
    AM_CHECK(am_numel(t) == 1, AM_ERR_SHAPE, "adam_step: %s has %lld elements, 1 is needed", name,
             (long long)am_numel(t));
    return AM_OK;
}

static am_status check_groups(const am_adam_args *a)
{
    const int64_t groups = a->group_sizes.present ? a->group_sizes.n : 1;
    const struct {
        const char *name;
        const am_f64_array *of;
        double limit;
    } numbers[] = {{"lr", &a->lr, INFINITY},
                   {"beta1", &a->beta1, 1.0},
                   {"beta2", &a->beta2, 1.0},
                   {"eps", &a->eps, INFINITY},
                   {"weight_decay", &a->weight_decay, INFINITY}};
    for (int k = 0; k < 5; k++) {
        AM_CHECK(numbers[k].of->n == groups, AM_ERR_SHAPE, "adam_step: %s has %lld numbers for %lld groups",
                 numbers[k].name, (long long)numbers[k].of->n, (long long)groups);
        for (int64_t i = 0; i < groups; i++)
            AM_CHECK(numbers[k].of->data[i] >= 0 && numbers[k].of->data[i] < numbers[k].limit, AM_ERR_ARG,
                     "adam_step: %s of group %lld is %g, it lies in [0, %g)", numbers[k].name, (long long)i,
                     numbers[k].of->data[i], numbers[k].limit);
    }
    int64_t total = a->group_sizes.present ? 0 : a->params.n;
    for (int64_t i = 0; i < a->group_sizes.n; i++) {
        const int64_t size = a->group_sizes.data[i];
        AM_CHECK(size >= 0 && size <= a->params.n - total, AM_ERR_ARG,
                 "adam_step: group_sizes[%lld] is %lld, %lld tensors are left", (long long)i, (long long)size,
                 (long long)(a->params.n - total));
        total += size;
    }
    AM_CHECK(total == a->params.n, AM_ERR_ARG, "adam_step: group_sizes sum to %lld, params has %lld tensors",
             (long long)total, (long long)a->params.n);
    AM_CHECK(a->lr_tensors.items == NULL || a->lr_tensors.n == groups, AM_ERR_SHAPE,
             "adam_step: lr_tensors has %lld tensors for %lld groups", (long long)a->lr_tensors.n, (long long)groups);
    for (int64_t i = 0; i < a->lr_tensors.n; i++)
        if (given(&a->lr_tensors.items[i]))
            AM_TRY(check_one("an lr_tensor", &a->lr_tensors.items[i]));
    if (a->found_inf.dtype != AM_NONE)
        AM_TRY(check_one("found_inf", &a->found_inf));
    return a->grad_scale.dtype != AM_NONE ? check_one("grad_scale", &a->grad_scale) : AM_OK;
}

static bool is_float(am_dtype dtype) { return dtype == AM_F32 || dtype == AM_BF16; }

static am_status check_dtypes(const am_adam_args *a, int64_t i)
{
    const long long at = i;
    const am_dtype p = a->params.items[i].dtype, m = a->exp_avgs.items[i].dtype, v = a->exp_avg_sqs.items[i].dtype;
    const am_dtype g = a->grads.items[i].dtype, t = a->steps.items[i].dtype;
    AM_CHECK(is_float(p), AM_ERR_DTYPE, "adam_step: params[%lld] is %s, float32 or bfloat16 is needed", at,
             am_dtype_name(p));
    AM_CHECK(is_float(m), AM_ERR_DTYPE, "adam_step: exp_avgs[%lld] is %s, float32 or bfloat16 is needed", at,
             am_dtype_name(m));
    AM_CHECK(v == m, AM_ERR_DTYPE, "adam_step: exp_avg_sqs[%lld] is %s, exp_avgs[%lld] is %s", at, am_dtype_name(v), at,
             am_dtype_name(m));
    AM_CHECK(is_float(g), AM_ERR_DTYPE, "adam_step: grads[%lld] is %s, float32 or bfloat16 is needed", at,
             am_dtype_name(g));
    AM_CHECK(t == AM_F32 || t == AM_I64, AM_ERR_DTYPE, "adam_step: steps[%lld] is %s, float32 or int64 is needed", at,
             am_dtype_name(t));
    if (a->masters.items == NULL || !given(&a->masters.items[i]))
        return AM_OK;
    const am_dtype w = a->masters.items[i].dtype;
    AM_CHECK(p == AM_BF16, AM_ERR_DTYPE,
             "adam_step: masters[%lld] is given, but params[%lld] is %s: only bfloat16 "
             "has masters",
             at, at, am_dtype_name(p));
    AM_CHECK(w == AM_F32 || w == AM_I16, AM_ERR_DTYPE, "adam_step: masters[%lld] is %s, float32 or int16 is needed", at,
             am_dtype_name(w));
    return AM_OK;
}

static am_status check_layout(const char *name, const am_tensor *t, const am_tensor *p, int64_t i)
{
    const long long at = i;
    const size_t dims = (size_t)p->ndim * sizeof *p->shape;
    if (t->ndim == p->ndim && memcmp(t->shape, p->shape, dims) == 0 && memcmp(t->stride, p->stride, dims) == 0)
        return AM_OK; /* nearly always; what follows allows odd strides that address nothing, and finds the words */
    AM_CHECK(am_numel(t) == am_numel(p), AM_ERR_SHAPE, "adam_step: %s[%lld] has %lld elements, params[%lld] has %lld",
             name, at, (long long)am_numel(t), at, (long long)am_numel(p));
    AM_CHECK(t->ndim == p->ndim, AM_ERR_SHAPE, "adam_step: %s[%lld] has %d axes, params[%lld] has %d", name, at,
             t->ndim, at, p->ndim);
    for (int d = 0; d < p->ndim; d++)
        AM_CHECK(t->shape[d] == p->shape[d], AM_ERR_SHAPE,
                 "adam_step: %s[%lld] has extent %lld on axis %d, params[%lld] has %lld", name, at,
                 (long long)t->shape[d], d, at, (long long)p->shape[d]);
    if (am_numel(p) == 0)
        return AM_OK;
    for (int d = 0; d < p->ndim; d++)
        AM_CHECK(p->shape[d] == 1 || t->stride[d] == p->stride[d], AM_ERR_SHAPE,
                 "adam_step: %s[%lld] has stride %lld on axis %d, params[%lld] has %lld", name, at,
                 (long long)t->stride[d], d, at, (long long)p->stride[d]);
    return AM_OK;
}

static am_status check(const am_adam_args *a)
{
    AM_TRY(check_groups(a));
    const am_named_list lists[] = {
        {"params", &a->params, true}, {"exp_avgs", &a->exp_avgs, true}, {"exp_avg_sqs", &a->exp_avg_sqs, true},
        {"steps", &a->steps, true},   {"grads", &a->grads, false},      {"masters", &a->masters, true},
    };
    const int n_lists = a->masters.items ? 6 : 5;
    for (int l = 1; l < n_lists; l++)
        AM_CHECK(lists[l].list->n == a->params.n, AM_ERR_SHAPE, "adam_step: %s has %lld tensors, params has %lld",
                 lists[l].name, (long long)lists[l].list->n, (long long)a->params.n);
    AM_CHECK(a->params.n <= UINT32_MAX, AM_ERR_ARG, "adam_step: params has %lld tensors, at most 2^32 - 1 are taken",
             (long long)a->params.n);
    for (int64_t i = 0; i < a->params.n; i++) {
        const am_tensor *const p = &a->params.items[i];
        AM_TRY(check_dtypes(a, i));
        AM_CHECK(am_is_dense(p), AM_ERR_SHAPE,
                 "adam_step: params[%lld] of %lld elements has gaps or repeats in memory: a dense tensor is needed",
                 (long long)i, (long long)am_numel(p));
        for (int l = 1; l < n_lists; l++)
            if (lists[l].list != &a->steps && (lists[l].list != &a->masters || given(&a->masters.items[i])))
                AM_TRY(check_layout(lists[l].name, &lists[l].list->items[i], p, i));
        AM_CHECK(am_numel(&a->steps.items[i]) == 1, AM_ERR_SHAPE, "adam_step: steps[%lld] has %lld elements, not 1",
                 (long long)i, (long long)am_numel(&a->steps.items[i]));
    }
    return am_check_disjoint("adam_step", lists, n_lists);
}

static float scalar_or(const am_tensor *t, float absent)
{
    return t->dtype == AM_NONE ? absent : *(const float *)t->data;
}

static double step_of(const am_tensor *t)
{
    return t->dtype == AM_I64 ? (double)*(const int64_t *)t->data : (double)*(const float *)t->data;
}

static adam_coef coef_of(const am_adam_args *a, int64_t group, double lr, double t)
{
    const double b1 = a->beta1.data[group], b2 = a->beta2.data[group];
    return (adam_coef){
        .b1 = (float)b1,
        .one_minus_b1 = (float)(1.0 - b1),
        .b2 = (float)b2,
        .one_minus_b2 = (float)(1.0 - b2),
        .step_size = (float)(lr / (1.0 - pow(b1, t))),
        .inv_sqrt_bc2 = (float)(1.0 / sqrt(1.0 - pow(b2, t))),
        .eps = (float)a->eps.data[group],
        .decay = (float)(lr * a->weight_decay.data[group]),
        .inv_scale = (float)(1.0 / (double)scalar_or(&a->grad_scale, 1.0f)),
    };
}

typedef struct adam_work {
    const am_adam_args *a;
    int64_t *begin;  /* [n + 1] */
    adam_coef *coef; /* [n] */
} adam_work;

/* Tensors of a group that share a step, nearly all of them, share the powers. */
static am_status fill_coefs(const adam_work *work, int64_t group, int64_t begin, int64_t end)
{
    const am_adam_args *const a = work->a;
    const bool tensor_lr = a->lr_tensors.items != NULL && given(&a->lr_tensors.items[group]);
    const double lr = tensor_lr ? (double)*(const float *)a->lr_tensors.items[group].data : a->lr.data[group];
    AM_CHECK(lr >= 0, AM_ERR_ARG, "adam_step: lr of group %lld is %g, it lies in [0, inf)", (long long)group, lr);
    double last = -1.0;
    for (int64_t i = begin; i < end; i++) {
        const double t = step_of(&a->steps.items[i]);
        AM_CHECK(t >= 0 && t < 9.0e18, AM_ERR_ARG, "adam_step: steps[%lld] holds %g, a count is needed", (long long)i,
                 t);
        work->coef[i] = t == last ? work->coef[i - 1] : coef_of(a, group, lr, t + 1.0);
        last = t;
    }
    return AM_OK;
}

static am_status fill_groups(const adam_work *work)
{
    const am_i64_array *const sizes = &work->a->group_sizes;
    if (!sizes->present)
        return fill_coefs(work, 0, 0, work->a->params.n);
    int64_t begin = 0;
    for (int64_t group = 0; group < sizes->n; group++) {
        AM_TRY(fill_coefs(work, group, begin, begin + sizes->data[group]));
        begin += sizes->data[group];
    }
    return AM_OK;
}

static void *at_element(const am_tensor *t, int64_t offset)
{
    return (char *)t->data + (size_t)offset * am_dtype_size(t->dtype);
}

static void run_range(int64_t at, int64_t end, void *ctx)
{
    const adam_work *const work = ctx;
    const am_adam_args *const a = work->a;
    for (int64_t i = am_flat_find(work->begin, a->params.n, at); at < end; i++) {
        const int64_t offset = at - work->begin[i];
        const int64_t stop = work->begin[i + 1] < end ? work->begin[i + 1] : end;
        if (stop == at)
            continue;
        const am_tensor *const w = a->masters.items && given(&a->masters.items[i]) ? &a->masters.items[i] : NULL;
        const adam_slab slab = {
            .p = at_element(&a->params.items[i], offset),
            .w = w ? at_element(w, offset) : NULL,
            .m = at_element(&a->exp_avgs.items[i], offset),
            .v = at_element(&a->exp_avg_sqs.items[i], offset),
            .g = at_element(&a->grads.items[i], offset),
            .param = a->params.items[i].dtype,
            .master = w ? w->dtype : AM_NONE,
            .moment = a->exp_avgs.items[i].dtype,
            .grad = a->grads.items[i].dtype,
            .n = stop - at,
        };
        slab_by_isa[am_cpu_isa()](&slab, &work->coef[i]);
        at = stop;
    }
}

static void count_steps(const am_tensor_list *steps)
{
    for (int64_t i = 0; i < steps->n; i++) {
        if (steps->items[i].dtype == AM_I64)
            ++*(int64_t *)steps->items[i].data;
        else
            *(float *)steps->items[i].data += 1.0f;
    }
}

static am_status cpu_step(const am_adam_args *a)
{
    const int64_t n = a->params.n;
    adam_work work = {.a = a, .begin = am_block_take((size_t)(n + 1) * (sizeof *work.begin + sizeof *work.coef))};
    AM_CHECK(work.begin != NULL, AM_ERR_NOMEM, "adam_step: no memory for a table of %lld tensors", (long long)n);
    work.coef = (adam_coef *)(work.begin + n + 1);
    const am_status st = fill_groups(&work);
    if (st == AM_OK && scalar_or(&a->found_inf, 0.0f) == 0.0f) {
        am_flat_begin(&a->params, work.begin);
        count_steps(&a->steps);
        am_parallel_for(work.begin[n], ADAM_GRAIN, run_range, &work);
    }
    am_block_give(work.begin);
    return st;
}

am_status am_adam_step(const am_adam_args *a, const am_exec *ex)
{
    AM_TRY(check(a));
    if (a->params.n == 0)
        return AM_OK;
    if (ex->dev == AM_DEV_CPU)
        return cpu_step(a);
#ifdef AM_WITH_CUDA
    return am_cuda_adam_step(a, ex);
#else
    return am_no_cuda("adam_step");
#endif
}
