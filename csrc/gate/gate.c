#include "gate.h"

#include <string.h>

#include "am_cpu.h"
#include "am_math.h"
#include "am_pool.h"
#include "am_rows.h"

enum { GRAIN_ELEMENTS = 1 << 13 }; /* elements of a parallel chunk of forward, at least one row */

typedef struct gate_block { /* rows [row, stop), columns [first, first + m), `step` rows at a time */
    const am_gate_args *a;
    int64_t row, stop, first, m, step, heads;
    double *sums; /* [2, heads]: dA_log and ddt_bias of the run */
} gate_block;

#define AM_CPU_INC "gate_cpu.inc"
#include "am_each_isa.h"
#define KERNELS(isa) {gate_##isa, gate_grad_##isa}
#if defined(__x86_64__)
#define KERNELS_BY_ISA {KERNELS(scalar), KERNELS(avx2), KERNELS(avx512), KERNELS(avx512)}
#else
#define KERNELS_BY_ISA {KERNELS(scalar), KERNELS(scalar), KERNELS(scalar), KERNELS(scalar)}
#endif

static void (*const kernels[AM_ISA_COUNT][2])(const gate_block *) = KERNELS_BY_ISA; /* forward, backward */

static const char *const fn = "gdn_gate";

#ifndef AM_WITH_CUDA
#define am_cuda_gdn_gate(a, ex) am_no_cuda(fn)
#endif

/* Of a's shape, of this dtype, last axis contiguous. */
static am_status check_rows(const char *name, const am_tensor *t, am_dtype dtype, const am_tensor *a)
{
    AM_CHECK(t->dtype == dtype, AM_ERR_DTYPE, "%s: %s is %s, %s is needed", fn, name, am_dtype_name(t->dtype),
             am_dtype_name(dtype));
    AM_CHECK(t->ndim == 2, AM_ERR_SHAPE, "%s: %s has %d axes, 2 are needed (tokens, heads)", fn, name, t->ndim);
    for (int d = 0; d < 2; d++)
        AM_CHECK(t->shape[d] == a->shape[d], AM_ERR_SHAPE, "%s: %s has extent %lld on axis %d, a has %lld", fn, name,
                 (long long)t->shape[d], d, (long long)a->shape[d]);
    AM_CHECK(am_numel(t) == 0 || t->shape[1] == 1 || t->stride[1] == 1, AM_ERR_SHAPE,
             "%s: %s has stride %lld on its last axis, 1 is needed", fn, name, (long long)t->stride[1]);
    return AM_OK;
}

static am_status check_output(const char *name, const am_tensor *t, am_dtype dtype, const am_tensor *a)
{
    AM_TRY(check_rows(name, t, dtype, a));
    AM_CHECK(am_is_contiguous(t), AM_ERR_SHAPE, "%s: %s must be contiguous", fn, name);
    return AM_OK;
}

static am_status check_heads(const char *name, const am_tensor *t, const am_tensor *a)
{
    AM_CHECK(t->dtype == AM_F32, AM_ERR_DTYPE, "%s: %s is %s, float32 is needed", fn, name, am_dtype_name(t->dtype));
    AM_CHECK(t->ndim == 1, AM_ERR_SHAPE, "%s: %s has %d axes, 1 is needed", fn, name, t->ndim);
    AM_CHECK(t->shape[0] == a->shape[1], AM_ERR_SHAPE, "%s: %s has %lld heads, a has %lld", fn, name,
             (long long)t->shape[0], (long long)a->shape[1]);
    AM_CHECK(am_is_contiguous(t), AM_ERR_SHAPE, "%s: %s has stride %lld, 1 is needed", fn, name,
             (long long)t->stride[0]);
    return AM_OK;
}

static am_status check(const am_gate_args *a)
{
    const am_tensor *const inputs[] = {&a->a, &a->b}, *const parts = &a->partials;
    for (int i = 0; i < 2; i++) {
        const char *const name = i ? "b" : "a";
        AM_CHECK(inputs[i]->dtype == AM_F32 || inputs[i]->dtype == AM_BF16, AM_ERR_DTYPE,
                 "%s: %s is %s, float32 or bfloat16 is needed", fn, name, am_dtype_name(inputs[i]->dtype));
        AM_TRY(check_rows(name, inputs[i], inputs[i]->dtype, &a->a));
    }
    AM_TRY(check_heads("A_log", &a->A_log, &a->a));
    AM_TRY(check_heads("dt_bias", &a->dt_bias, &a->a));
    if (!a->backward) {
        AM_TRY(check_output("g", &a->g, AM_F32, &a->a));
        return check_output("beta", &a->beta, a->b.dtype, &a->a);
    }
    AM_TRY(check_rows("dg", &a->dg, AM_F32, &a->a));
    AM_TRY(check_rows("dbeta", &a->dbeta, a->b.dtype, &a->a));
    AM_TRY(check_output("da", &a->da, a->a.dtype, &a->a));
    AM_TRY(check_output("db", &a->db, a->b.dtype, &a->a));
    AM_TRY(check_heads("dA_log", &a->dA_log, &a->a));
    AM_TRY(check_heads("ddt_bias", &a->ddt_bias, &a->a));
    AM_CHECK(parts->dtype == AM_F64 && parts->ndim == 3 && parts->shape[0] >= 1 && parts->shape[1] == 2 &&
                 parts->shape[2] == a->a.shape[1] && am_is_contiguous(parts),
             AM_ERR_ARG, "%s: partials must be contiguous float64 [k, 2, %lld]", fn, (long long)a->a.shape[1]);
    return AM_OK;
}

/* Few heads: several rows fill a tile. Many: a row is cut into tiles. */
static void columns(gate_block *k, int64_t row, int64_t stop)
{
    k->row = row;
    k->stop = stop;
    k->heads = k->a->a.shape[1];
    for (k->first = 0; k->first < k->heads; k->first += AM_TILE) {
        k->m = k->heads - k->first < AM_TILE ? k->heads - k->first : AM_TILE;
        k->step = k->heads < AM_TILE ? AM_TILE / k->heads : 1;
        kernels[am_cpu_isa()][k->a->backward](k);
    }
}

static void forward_rows(int64_t begin, int64_t end, void *ctx)
{
    gate_block k = {.a = ctx};
    columns(&k, begin, end);
}

static void backward_runs(int64_t begin, int64_t end, void *ctx)
{
    gate_block k = {.a = ctx};
    const int64_t rows = k.a->a.shape[0], heads = k.a->a.shape[1], runs = k.a->partials.shape[0];
    for (int64_t run = begin; run < end; run++) {
        k.sums = (double *)k.a->partials.data + run * 2 * heads;
        memset(k.sums, 0, (size_t)(2 * heads) * sizeof *k.sums);
        columns(&k, run * rows / runs, (run + 1) * rows / runs);
    }
}

static void add_runs(const am_tensor *out, const am_tensor *partials, int64_t which)
{
    const int64_t n = partials->shape[2];
    const double *const first = (const double *)partials->data + which * n;
    for (int64_t i = 0; i < n; i++) {
        double total = 0.0;
        for (int64_t run = 0; run < partials->shape[0]; run++)
            total += first[run * 2 * n + i];
        ((float *)out->data)[i] = (float)total;
    }
}

am_status am_gdn_gate_forward(am_gate_args *a, const am_exec *ex)
{
    a->backward = false;
    AM_TRY(check(a));
    const int64_t n = a->a.shape[1];
    if (n > 0 && ex->dev != AM_DEV_CPU)
        return am_cuda_gdn_gate(a, ex);
    if (n > 0)
        am_parallel_for(a->a.shape[0], n < GRAIN_ELEMENTS ? GRAIN_ELEMENTS / n : 1, forward_rows, a);
    return AM_OK;
}

am_status am_gdn_gate_backward(am_gate_args *a, const am_exec *ex)
{
    a->backward = true;
    AM_TRY(check(a));
    if (a->a.shape[1] == 0)
        return AM_OK;
    if (ex->dev != AM_DEV_CPU)
        return am_cuda_gdn_gate(a, ex);
    am_parallel_for(a->partials.shape[0], 1, backward_runs, a);
    add_runs(&a->dA_log, &a->partials, 0);
    add_runs(&a->ddt_bias, &a->partials, 1);
    return AM_OK;
}
