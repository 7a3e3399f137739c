#include "mlp.h"

#include <math.h>

#include "am_cpu.h"
#include "am_math.h"
#include "am_pool.h"
#include "am_rows.h"
#include "gelu.h"

enum { GRAIN_ELEMENTS = 1 << 14 }; /* elements of a parallel chunk, at least one row */

typedef void (*mlp_forward)(float *y, const float *a, const float *b, int64_t n);
typedef void (*mlp_backward)(float *da, float *db, const float *dy, const float *a, const float *b, int64_t n);

typedef struct mlp_row {
    void *y, *da, *db; /* db and b: NULL for gelu */
    const void *dy, *a, *b;
    mlp_forward forward;
    mlp_backward backward;
    int64_t n;
    bool bf16;
} mlp_row;

#define AM_CPU_INC "mlp_cpu.inc"
#include "am_each_isa.h"
#if defined(__x86_64__)
#define BY_ISA(table) {table(scalar), table(avx2), table(avx512), table(avx512)}
#else
#define BY_ISA(table) {table(scalar), table(scalar), table(scalar), table(scalar)}
#endif

/* The functions follow am_mlp_kind; those of gelu by erf do whole rows. */
#define KERNELS(isa)                                                                                                   \
    {                                                                                                                  \
        forward_row_##isa, backward_row_##isa, {swiglu_##isa, sigmoid_gate_##isa, NULL, gelu_tanh_##isa},              \
        {                                                                                                              \
            swiglu_grad_##isa, sigmoid_gate_grad_##isa, NULL, gelu_tanh_grad_##isa                                     \
        }                                                                                                              \
    }

static const struct {
    void (*forward_row)(const mlp_row *);
    void (*backward_row)(const mlp_row *);
    mlp_forward forward[4];
    mlp_backward backward[4];
} kernels[AM_ISA_COUNT] = BY_ISA(KERNELS);

#define GELU(isa) &am_gelu_##isa
static const gelu_kernels *const gelus[AM_ISA_COUNT] = BY_ISA(GELU);

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
    const am_isa isa = am_cpu_isa();
    mlp_row r = {.forward = kernels[isa].forward[a->kind],
                 .backward = kernels[isa].backward[a->kind],
                 .n = a->a.shape[a->a.ndim - 1],
                 .bf16 = a->a.dtype == AM_BF16};
    for (int64_t row = begin; row < end; row++) {
        r.y = row_of(&a->y, row);
        r.da = row_of(&a->da, row);
        r.db = row_of(&a->db, row);
        r.dy = row_of(&a->dy, row);
        r.a = row_of(&a->a, row);
        r.b = row_of(&a->b, row);
        if (a->kind == AM_MLP_GELU && a->backward)
            gelus[isa]->backward(r.da, r.dy, r.a, r.n, r.bf16);
        else if (a->kind == AM_MLP_GELU)
            gelus[isa]->forward(r.y, r.a, r.n, r.bf16);
        else
            (a->backward ? kernels[isa].backward_row : kernels[isa].forward_row)(&r);
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
