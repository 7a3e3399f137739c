#include "clip.h"

#include <stdlib.h>

#include "am_bf16.h"
#include "am_cpu.h"
#include "am_pool.h"
#include "flat.h"

/* LANES: independent sums of a run. WIDE: elements widened at once. LEAST_PART: elements of a part, at least. */
enum { LANES = 32, WIDE = 1024, LEAST_PART = 1 << 14, SCALE_GRAIN = 1 << 15 };

static double add_lanes(const double *lane)
{
    double sum = 0.0;
    for (int j = 0; j < LANES; j++)
        sum += lane[j];
    return sum;
}

#define AM_CPU_INC "clip_cpu.inc"
#include "am_each_isa.h"
#if defined(__x86_64__)
#define AM_ROW(isa) {sumsq_f32_##isa, sumsq_bf16_##isa, scale_f32_##isa, scale_bf16_##isa}
#else
#define AM_ROW(isa) {sumsq_f32_scalar, sumsq_bf16_scalar, scale_f32_scalar, scale_bf16_scalar}
#endif

static const struct {
    double (*sumsq_f32)(const float *, int64_t);
    double (*sumsq_bf16)(const am_bf16 *, int64_t);
    void (*scale_f32)(float *, int64_t, double);
    void (*scale_bf16)(am_bf16 *, int64_t, double);
} rows[AM_ISA_COUNT] = {
    [AM_ISA_SCALAR] = {sumsq_f32_scalar, sumsq_bf16_scalar, scale_f32_scalar, scale_bf16_scalar},
    [AM_ISA_AVX2] = AM_ROW(avx2),
    [AM_ISA_AVX512] = AM_ROW(avx512),
    [AM_ISA_AVX512_BF16] = AM_ROW(avx512),
};

static am_status check_list(const char *fname, const char *name, const am_tensor_list *list)
{
    for (int64_t i = 0; i < list->n; i++) {
        const am_tensor *const t = &list->items[i];
        AM_CHECK(t->dtype == AM_F32 || t->dtype == AM_BF16, AM_ERR_DTYPE,
                 "%s: %s[%lld] is %s, float32 or bfloat16 is needed", fname, name, (long long)i,
                 am_dtype_name(t->dtype));
        AM_CHECK(am_is_dense(t), AM_ERR_SHAPE,
                 "%s: %s[%lld] of %lld elements has gaps or repeats in memory: a dense tensor is needed", fname, name,
                 (long long)i, (long long)am_numel(t));
    }
    return AM_OK;
}

static am_status check_f64(const char *fname, const char *name, const am_tensor *t, int64_t numel)
{
    AM_CHECK(t->dtype == AM_F64, AM_ERR_DTYPE, "%s: %s is %s, float64 is needed", fname, name, am_dtype_name(t->dtype));
    AM_CHECK(am_numel(t) == numel && am_is_contiguous(t), AM_ERR_SHAPE,
             "%s: %s has %lld elements, %lld contiguous ones are needed", fname, name, (long long)am_numel(t),
             (long long)numel);
    return AM_OK;
}

/* What both walks share: the line of elements of a list. */
typedef struct line {
    const am_tensor_list *list;
    int64_t *begin; /* [n + 1] */
    int64_t part;   /* elements of a part of the sum */
    double *parts, factor;
} line;

static am_status line_open(line *l, const char *fname)
{
    l->begin = malloc((size_t)(l->list->n + 1) * sizeof *l->begin);
    AM_CHECK(l->begin != NULL, AM_ERR_NOMEM, "%s: no memory for a table of %lld tensors", fname, (long long)l->list->n);
    am_flat_begin(l->list, l->begin);
    return AM_OK;
}

/* The run of one tensor that starts at `at` and ends before `end`: its address and length. */
static const am_tensor *next_run(const line *l, int64_t i, int64_t at, int64_t end, void **data, int64_t *n)
{
    const am_tensor *const t = &l->list->items[i];
    *data = t->data ? (char *)t->data + (size_t)(at - l->begin[i]) * am_dtype_size(t->dtype) : NULL;
    *n = (l->begin[i + 1] < end ? l->begin[i + 1] : end) - at;
    return t;
}

static double sum_part(const line *l, int64_t at, int64_t end)
{
    double sum = 0.0;
    void *data;
    int64_t n;
    for (int64_t i = am_flat_find(l->begin, l->list->n, at); at < end; i++, at += n) {
        const am_tensor *const t = next_run(l, i, at, end, &data, &n);
        sum += t->dtype == AM_F32 ? rows[am_cpu_isa()].sumsq_f32(data, n) : rows[am_cpu_isa()].sumsq_bf16(data, n);
    }
    return sum;
}

static void run_parts(int64_t part, int64_t end, void *ctx)
{
    const line *const l = ctx;
    const int64_t total = l->begin[l->list->n];
    for (; part < end; part++) {
        const int64_t at = part * l->part;
        l->parts[part] = at < total ? sum_part(l, at, total - at > l->part ? at + l->part : total) : 0.0;
    }
}

static void run_scale(int64_t at, int64_t end, void *ctx)
{
    const line *const l = ctx;
    void *data;
    int64_t n;
    for (int64_t i = am_flat_find(l->begin, l->list->n, at); at < end; i++, at += n) {
        const am_tensor *const t = next_run(l, i, at, end, &data, &n);
        if (t->dtype == AM_F32)
            rows[am_cpu_isa()].scale_f32(data, n, l->factor);
        else
            rows[am_cpu_isa()].scale_bf16(data, n, l->factor);
    }
}

static am_status cpu_sumsq(const am_grad_sumsq_args *a)
{
    line l = {.list = &a->grads, .parts = a->parts.data};
    AM_TRY(line_open(&l, "grad_sumsq"));
    const int64_t total = l.begin[a->grads.n];
    l.part = total / AM_SUMSQ_PARTS + 1;
    l.part = l.part < LEAST_PART ? LEAST_PART : (l.part + LANES - 1) / LANES * LANES;
    am_parallel_for(AM_SUMSQ_PARTS, 1, run_parts, &l);
    double sum = 0.0;
    for (int part = 0; part < AM_SUMSQ_PARTS; part++)
        sum += l.parts[part];
    *(double *)a->sumsq.data = sum;
    free(l.begin);
    return AM_OK;
}

static am_status cpu_scale(const am_scale_args *a)
{
    line l = {.list = &a->tensors, .factor = *(const double *)a->factor.data};
    if (l.factor == 1.0)
        return AM_OK;
    AM_TRY(line_open(&l, "scale_"));
    am_parallel_for(l.begin[a->tensors.n], SCALE_GRAIN, run_scale, &l);
    free(l.begin);
    return AM_OK;
}

#ifndef AM_WITH_CUDA
#define am_cuda_grad_sumsq(a, ex) am_no_cuda("grad_sumsq")
#define am_cuda_scale(a, ex) am_no_cuda("scale_")
#endif

am_status am_grad_sumsq(const am_grad_sumsq_args *a, const am_exec *ex)
{
    AM_TRY(check_f64("grad_sumsq", "sumsq", &a->sumsq, 1));
    AM_TRY(check_f64("grad_sumsq", "parts", &a->parts, AM_SUMSQ_PARTS));
    AM_TRY(check_list("grad_sumsq", "grads", &a->grads));
    const am_named_list lists[] = {{"sumsq", &(am_tensor_list){(am_tensor *)(uintptr_t)&a->sumsq, 1}, true},
                                   {"parts", &(am_tensor_list){(am_tensor *)(uintptr_t)&a->parts, 1}, true},
                                   {"grads", &a->grads, false}};
    AM_TRY(am_check_disjoint("grad_sumsq", lists, 3));
    return ex->dev == AM_DEV_CPU ? cpu_sumsq(a) : am_cuda_grad_sumsq(a, ex);
}

am_status am_scale(const am_scale_args *a, const am_exec *ex)
{
    AM_TRY(check_f64("scale_", "factor", &a->factor, 1));
    AM_TRY(check_list("scale_", "tensors", &a->tensors));
    const am_named_list lists[] = {{"tensors", &a->tensors, true},
                                   {"factor", &(am_tensor_list){(am_tensor *)(uintptr_t)&a->factor, 1}, false}};
    AM_TRY(am_check_disjoint("scale_", lists, 2));
    return ex->dev == AM_DEV_CPU ? cpu_scale(a) : am_cuda_scale(a, ex);
}
