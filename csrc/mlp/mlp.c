#include "mlp.h"

#include "am_cpu.h"
#include "am_pool.h"
#include "am_rows.h"
#include "mlp_rows.h"

enum { GRAIN_ELEMENTS = 1 << 14 }; /* elements of a parallel chunk, at least one row */

#if defined(__x86_64__)
static const mlp_kernels *const kernels[AM_ISA_COUNT] = {&am_mlp_scalar, &am_mlp_avx2, &am_mlp_avx512, &am_mlp_avx512};
#else
static const mlp_kernels *const kernels[AM_ISA_COUNT] = {&am_mlp_scalar, &am_mlp_scalar, &am_mlp_scalar,
                                                         &am_mlp_scalar};
#endif

static const struct {
    const char *function, *a, *b;
} names[] = {{"swiglu", "gate", "up"}, {"sigmoid_gate", "x", "gate"}, {"gelu", "x", NULL}, {"gelu", "x", NULL}};

#ifndef AM_WITH_CUDA
#define am_cuda_mlp(a, ex) am_no_cuda(names[(a)->kind].function)
#endif

static am_status check_like(const char *fn, const char *name, const am_tensor *t, const char *a_name,
                            const am_tensor *a)
{
    AM_CHECK(t->dtype == a->dtype, AM_ERR_DTYPE, "%s: %s is %s, %s is %s", fn, name, am_dtype_name(t->dtype), a_name,
             am_dtype_name(a->dtype));
    AM_CHECK(t->ndim == a->ndim, AM_ERR_SHAPE, "%s: %s has %d axes, %s has %d", fn, name, t->ndim, a_name, a->ndim);
    for (int d = 0; d < a->ndim; d++)
        AM_CHECK(t->shape[d] == a->shape[d], AM_ERR_SHAPE, "%s: %s has extent %lld on axis %d, %s has %lld", fn, name,
                 (long long)t->shape[d], d, a_name, (long long)a->shape[d]);
    const int last = a->ndim - 1;
    AM_CHECK(am_numel(t) == 0 || t->shape[last] == 1 || t->stride[last] == 1, AM_ERR_SHAPE,
             "%s: %s has stride %lld on its last axis, 1 is needed", fn, name, (long long)t->stride[last]);
    return AM_OK;
}

static am_status check(const am_mlp_args *a)
{
    const char *const fn = names[a->kind].function, *const name = names[a->kind].a;
    AM_CHECK(a->a.dtype == AM_F32 || a->a.dtype == AM_BF16, AM_ERR_DTYPE, "%s: %s is %s, float32 or bfloat16 is needed",
             fn, name, am_dtype_name(a->a.dtype));
    AM_CHECK(a->a.ndim >= 1, AM_ERR_SHAPE, "%s: %s has no axes, at least 1 is needed", fn, name);
    AM_TRY(check_like(fn, name, &a->a, name, &a->a));
    const char *const second = names[a->kind].b;
    if (second)
        AM_TRY(check_like(fn, second, &a->b, name, &a->a));
    if (!a->backward)
        return check_like(fn, "y", &a->y, name, &a->a);
    AM_TRY(check_like(fn, "dy", &a->dy, name, &a->a));
    AM_TRY(check_like(fn, "the first gradient", &a->da, name, &a->a));
    return second ? check_like(fn, "the second gradient", &a->db, name, &a->a) : AM_OK;
}

static void *row_of(const am_tensor *t, int64_t row) { return t->dtype == AM_NONE ? NULL : am_row(t, row); }

static void rows(int64_t begin, int64_t end, void *ctx)
{
    const am_mlp_args *const a = ctx;
    const mlp_forward forward = kernels[am_cpu_isa()]->forward[a->kind];
    const mlp_backward backward = kernels[am_cpu_isa()]->backward[a->kind];
    const int64_t n = a->a.shape[a->a.ndim - 1];
    const bool bf16 = a->a.dtype == AM_BF16;
    for (int64_t row = begin; row < end; row++) {
        const void *const x = am_row(&a->a, row), *const other = row_of(&a->b, row);
        if (a->backward)
            backward(am_row(&a->da, row), row_of(&a->db, row), am_row(&a->dy, row), x, other, n, bf16);
        else
            forward(am_row(&a->y, row), x, other, n, bf16);
    }
}

static am_status run(am_mlp_args *a, const am_exec *ex, am_mlp_kind kind, bool backward)
{
    a->kind = kind;
    a->backward = backward;
    AM_TRY(check(a));
    const int64_t n = a->a.shape[a->a.ndim - 1];
    if (am_numel(&a->a) == 0)
        return AM_OK;
    if (ex->dev == AM_DEV_CPU)
        am_parallel_for(am_row_count(&a->a), n < GRAIN_ELEMENTS ? GRAIN_ELEMENTS / n : 1, rows, a);
    return ex->dev == AM_DEV_CPU ? AM_OK : am_cuda_mlp(a, ex);
}

am_status am_swiglu_forward(am_mlp_args *a, const am_exec *ex) { return run(a, ex, AM_MLP_SWIGLU, false); }
am_status am_swiglu_backward(am_mlp_args *a, const am_exec *ex) { return run(a, ex, AM_MLP_SWIGLU, true); }
am_status am_sigmoid_gate_forward(am_mlp_args *a, const am_exec *ex) { return run(a, ex, AM_MLP_SIGMOID_GATE, false); }
am_status am_sigmoid_gate_backward(am_mlp_args *a, const am_exec *ex) { return run(a, ex, AM_MLP_SIGMOID_GATE, true); }

am_status am_gelu_forward(am_mlp_args *a, const am_exec *ex)
{
    return run(a, ex, a->tanh ? AM_MLP_GELU_TANH : AM_MLP_GELU, false);
}

am_status am_gelu_backward(am_mlp_args *a, const am_exec *ex)
{
    return run(a, ex, a->tanh ? AM_MLP_GELU_TANH : AM_MLP_GELU, true);
}
