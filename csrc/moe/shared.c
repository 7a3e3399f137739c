#include <math.h>

#include "am_cpu.h"
#include "am_math.h"
#include "am_pool.h"
#include "am_rows.h"
#include "moe.h"

enum { GRAIN_ELEMENTS = 1 << 14 }; /* elements of a parallel chunk, at least one row */

typedef struct shared_row {
    void *out, *dshared, *dgate;
    const void *routed, *shared, *gate, *dout;
    int64_t n;
    bool bf16;
} shared_row;

#define AM_CPU_INC "shared_cpu.inc"
#include "am_each_isa.h"
#if defined(__x86_64__)
#define BY_ISA(f) {f##_scalar, f##_avx2, f##_avx512, f##_avx512}
#else
#define BY_ISA(f) {f##_scalar, f##_scalar, f##_scalar, f##_scalar}
#endif

static void (*const forward_row[AM_ISA_COUNT])(const shared_row *) = BY_ISA(join_row);
static void (*const backward_row[AM_ISA_COUNT])(const shared_row *) = BY_ISA(join_grad_row);

#ifndef AM_WITH_CUDA
#define am_cuda_shared_expert(a, ex) am_no_cuda("add_shared_expert")
#endif

static am_status check_like(const char *name, const am_tensor *t, const am_tensor *like)
{
    AM_CHECK(t->dtype == like->dtype, AM_ERR_DTYPE, "add_shared_expert: %s is %s, shared is %s", name,
             am_dtype_name(t->dtype), am_dtype_name(like->dtype));
    AM_CHECK(t->ndim == 2, AM_ERR_SHAPE, "add_shared_expert: %s has %d axes, [T, H] is needed", name, t->ndim);
    for (int d = 0; d < 2; d++)
        AM_CHECK(t->shape[d] == like->shape[d], AM_ERR_SHAPE,
                 "add_shared_expert: %s has extent %lld on axis %d, shared has %lld", name, (long long)t->shape[d], d,
                 (long long)like->shape[d]);
    AM_CHECK(am_numel(t) == 0 || t->shape[1] == 1 || t->stride[1] == 1, AM_ERR_SHAPE,
             "add_shared_expert: %s has stride %lld on its last axis, 1 is needed", name, (long long)t->stride[1]);
    return AM_OK;
}

static am_status check_gate(const char *name, const am_tensor *t, const am_tensor *shared)
{
    AM_CHECK(t->dtype == shared->dtype, AM_ERR_DTYPE, "add_shared_expert: %s is %s, shared is %s", name,
             am_dtype_name(t->dtype), am_dtype_name(shared->dtype));
    AM_CHECK(t->ndim == 1 || (t->ndim == 2 && t->shape[1] == 1), AM_ERR_SHAPE,
             "add_shared_expert: %s has %d axes, [T] or [T, 1] is needed", name, t->ndim);
    AM_CHECK(t->shape[0] == shared->shape[0], AM_ERR_SHAPE, "add_shared_expert: %s has %lld rows, shared has %lld",
             name, (long long)t->shape[0], (long long)shared->shape[0]);
    return AM_OK;
}

static am_status check(const am_shared_expert_args *a)
{
    AM_CHECK(a->shared.dtype == AM_F32 || a->shared.dtype == AM_BF16, AM_ERR_DTYPE,
             "add_shared_expert: shared is %s, float32 or bfloat16 is needed", am_dtype_name(a->shared.dtype));
    AM_TRY(check_like("shared", &a->shared, &a->shared));
    AM_TRY(check_gate("gate", &a->gate, &a->shared));
    if (!a->backward) {
        AM_TRY(check_like("out", &a->routed, &a->shared));
        return check_like("the result", &a->out, &a->shared);
    }
    AM_TRY(check_like("dout", &a->dout, &a->shared));
    AM_TRY(check_like("dshared", &a->dshared, &a->shared));
    return check_gate("dgate", &a->dgate, &a->shared);
}

static void *row_of(const am_tensor *t, int64_t row)
{
    return t->dtype == AM_NONE ? NULL : am_at(t, row * t->stride[0]);
}

static void rows(int64_t begin, int64_t end, void *ctx)
{
    const am_shared_expert_args *const a = ctx;
    const am_isa isa = am_cpu_isa();
    for (int64_t t = begin; t < end; t++) {
        const shared_row r = {.out = row_of(&a->out, t),
                              .dshared = row_of(&a->dshared, t),
                              .dgate = row_of(&a->dgate, t),
                              .routed = row_of(&a->routed, t),
                              .shared = row_of(&a->shared, t),
                              .gate = row_of(&a->gate, t),
                              .dout = row_of(&a->dout, t),
                              .n = a->shared.shape[1],
                              .bf16 = a->shared.dtype == AM_BF16};
        (a->backward ? backward_row : forward_row)[isa](&r);
    }
}

static am_status run(am_shared_expert_args *a, const am_exec *ex, bool backward)
{
    a->backward = backward;
    AM_TRY(check(a));
    if (ex->dev != AM_DEV_CPU)
        return am_cuda_shared_expert(a, ex);
    const int64_t n = a->shared.shape[1];
    am_parallel_for(a->shared.shape[0], n > 0 && n < GRAIN_ELEMENTS ? GRAIN_ELEMENTS / n : 1, rows, a);
    return AM_OK;
}

am_status am_shared_expert_forward(am_shared_expert_args *a, const am_exec *ex) { return run(a, ex, false); }
am_status am_shared_expert_backward(am_shared_expert_args *a, const am_exec *ex) { return run(a, ex, true); }
