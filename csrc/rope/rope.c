#include "rope_angles.h"

#include <math.h>
#include <string.h>

#include "am_cpu.h"
#include "am_pool.h"
#include "am_rows.h"

enum { GRAIN = 16 }; /* tokens of a parallel chunk */

#define AM_CPU_INC "rope_cpu.inc"
#include "am_each_isa.h"
#define KERNELS(isa) {cos_sin_##isa, turn_##isa}
#if defined(__x86_64__)
#define KERNELS_BY_ISA {KERNELS(scalar), KERNELS(avx2), KERNELS(avx512), KERNELS(avx512)}
#else
#define KERNELS_BY_ISA {KERNELS(scalar), KERNELS(scalar), KERNELS(scalar), KERNELS(scalar)}
#endif

static const struct {
    void (*cos_sin)(float *, float *, const double *, int64_t);
    void (*turn)(void *, const void *, const float *, const float *, int64_t, int64_t, bool);
} kernels[AM_ISA_COUNT] = KERNELS_BY_ISA;

typedef struct rope_job {
    const am_rope_args *args;
    am_rope_angles angles;
} rope_job;

#ifndef AM_WITH_CUDA
#define am_cuda_rope(a, ex) am_no_cuda((a)->name)
#endif

am_status am_rope_check_heads(const char *fn, const char *name, const am_tensor *t, const am_tensor *q)
{
    AM_CHECK(t->dtype == AM_F32 || t->dtype == AM_BF16, AM_ERR_DTYPE, "%s: %s is %s, float32 or bfloat16 is needed", fn,
             name, am_dtype_name(t->dtype));
    AM_CHECK(t->dtype == q->dtype, AM_ERR_DTYPE, "%s: %s is %s, q is %s", fn, name, am_dtype_name(t->dtype),
             am_dtype_name(q->dtype));
    AM_CHECK(t->ndim == 3, AM_ERR_SHAPE, "%s: %s has %d axes, 3 are needed (tokens, heads, head dim)", fn, name,
             t->ndim);
    AM_CHECK(t->shape[0] == q->shape[0], AM_ERR_SHAPE, "%s: %s has %lld tokens, q has %lld", fn, name,
             (long long)t->shape[0], (long long)q->shape[0]);
    AM_CHECK(t->shape[2] == q->shape[2], AM_ERR_SHAPE, "%s: %s has head dim %lld, q has %lld", fn, name,
             (long long)t->shape[2], (long long)q->shape[2]);
    AM_CHECK(am_numel(t) == 0 || t->shape[2] == 1 || t->stride[2] == 1, AM_ERR_SHAPE,
             "%s: %s has stride %lld on its last axis, 1 is needed", fn, name, (long long)t->stride[2]);
    return AM_OK;
}

am_status am_rope_check_output(const char *fn, const char *name, const am_tensor *out, const am_tensor *in)
{
    AM_CHECK(out->dtype == in->dtype && am_same_shape(out, in) && am_is_contiguous(out), AM_ERR_ARG,
             "%s: %s must be contiguous, of its input's shape and dtype", fn, name);
    AM_CHECK(!am_overlaps(out, in), AM_ERR_ARG, "%s: %s shares memory with its input", fn, name);
    return AM_OK;
}

static am_status check_positions(const am_rope_args *a)
{
    const char *const fn = a->name;
    const am_tensor *const p = &a->positions;
    const int64_t axes = a->vision ? 2 : 3;
    AM_CHECK(p->dtype == AM_I32 || p->dtype == AM_I64, AM_ERR_DTYPE, "%s: position_ids is %s, int64 or int32 is needed",
             fn, am_dtype_name(p->dtype));
    AM_CHECK(p->ndim == 1 || p->ndim == 2, AM_ERR_SHAPE, "%s: position_ids has %d axes, 1 or 2 are needed", fn,
             p->ndim);
    AM_CHECK(p->ndim == 1 || p->shape[0] == axes, AM_ERR_SHAPE, "%s: position_ids has %lld rows, %lld are needed", fn,
             (long long)p->shape[0], (long long)axes);
    AM_CHECK(p->shape[p->ndim - 1] == a->q.shape[0], AM_ERR_SHAPE, "%s: position_ids has %lld tokens, q has %lld", fn,
             (long long)p->shape[p->ndim - 1], (long long)a->q.shape[0]);
    return AM_OK;
}

static am_status check_section(const am_rope_args *a)
{
    AM_CHECK(a->section.n == 3, AM_ERR_SHAPE, "%s: section has %lld numbers, 3 are needed", a->name,
             (long long)a->section.n);
    for (int i = 0; i < 3; i++)
        AM_CHECK(a->section.data[i] >= 0 && a->section.data[i] <= AM_ROPE_MAX_PAIRS, AM_ERR_ARG,
                 "%s: section[%d] is %lld, it lies in [0, %d]", a->name, i, (long long)a->section.data[i],
                 AM_ROPE_MAX_PAIRS);
    return AM_OK;
}

am_status am_rope_check(const am_rope_args *a)
{
    const char *const fn = a->name;
    AM_TRY(am_rope_check_heads(fn, "q", &a->q, &a->q));
    AM_TRY(am_rope_check_heads(fn, "k", &a->k, &a->q));
    AM_TRY(check_positions(a));
    const int64_t d = a->q.shape[2], step = a->vision ? 4 : 2;
    AM_CHECK(a->rotary_dim >= step && a->rotary_dim <= d && a->rotary_dim % step == 0, AM_ERR_ARG,
             "%s: rotary_dim is %lld, a multiple of %lld in [%lld, head dim %lld] is needed", fn,
             (long long)a->rotary_dim, (long long)step, (long long)step, (long long)d);
    AM_CHECK(a->rotary_dim <= 2 * AM_ROPE_MAX_PAIRS, AM_ERR_UNSUPPORTED, "%s: rotary_dim is %lld, at most %d is there",
             fn, (long long)a->rotary_dim, 2 * AM_ROPE_MAX_PAIRS);
    AM_CHECK(a->theta > 0.0 && isfinite(a->theta), AM_ERR_ARG, "%s: theta is %g, it lies in (0, inf)", fn, a->theta);
    return a->vision ? AM_OK : check_section(a);
}

am_rope_angles am_rope_angles_of(const am_rope_args *a)
{
    am_rope_angles of = {.pairs = a->rotary_dim / 2};
    for (int64_t i = 0; i < of.pairs; i++) {
        const int64_t half = of.pairs / 2;
        const double exponent =
            a->vision ? 2.0 * (double)(i % half) / (double)of.pairs : 2.0 * (double)i / (double)a->rotary_dim;
        of.frequency[i] = pow(a->theta, -exponent);
        if (a->vision)
            of.axis[i] = i >= half;
        else
            of.axis[i] = i % 3 != 0 && i < 3 * a->section.data[i % 3] ? (int)(i % 3) : 0;
    }
    return of;
}

static int64_t position(const am_tensor *p, int axis, int64_t token)
{
    const int64_t at = p->ndim == 1 ? token * p->stride[0] : axis * p->stride[0] + token * p->stride[1];
    return p->dtype == AM_I32 ? ((const int32_t *)p->data)[at] : ((const int64_t *)p->data)[at];
}

void am_rope_cos_sin(float *cosine, float *sine, const am_rope_angles *of, const am_rope_args *a, int64_t token)
{
    double at[3], angle[AM_ROPE_MAX_PAIRS];
    for (int axis = 0; axis < (a->vision ? 2 : 3); axis++)
        at[axis] = (a->inverse ? -1.0 : 1.0) * (double)position(&a->positions, axis, token);
    for (int64_t i = 0; i < of->pairs; i++)
        angle[i] = at[of->axis[i]] * of->frequency[i];
    kernels[am_cpu_isa()].cos_sin(cosine, sine, angle, of->pairs);
}

static void turn_heads(const am_tensor *out, const am_tensor *in, int64_t token, const float *cosine, const float *sine,
                       int64_t pairs)
{
    const int64_t heads = in->shape[1], d = in->shape[2];
    for (int64_t head = 0; head < heads; head++)
        kernels[am_cpu_isa()].turn(am_at(out, (token * heads + head) * d),
                                   am_at(in, token * in->stride[0] + head * in->stride[1]), cosine, sine, pairs, d,
                                   in->dtype == AM_BF16);
}

static void tokens(int64_t begin, int64_t end, void *ctx)
{
    const rope_job *const job = ctx;
    const am_rope_args *const a = job->args;
    float cosine[AM_ROPE_MAX_PAIRS], sine[AM_ROPE_MAX_PAIRS];
    for (int64_t t = begin; t < end; t++) {
        am_rope_cos_sin(cosine, sine, &job->angles, a, t);
        turn_heads(&a->q_out, &a->q, t, cosine, sine, job->angles.pairs);
        turn_heads(&a->k_out, &a->k, t, cosine, sine, job->angles.pairs);
    }
}

static am_status rotate(const am_rope_args *a, const am_exec *ex)
{
    AM_TRY(am_rope_check(a));
    AM_TRY(am_rope_check_output(a->name, "q_out", &a->q_out, &a->q));
    AM_TRY(am_rope_check_output(a->name, "k_out", &a->k_out, &a->k));
    if (am_numel(&a->q) == 0 && am_numel(&a->k) == 0)
        return AM_OK;
    if (ex->dev != AM_DEV_CPU)
        return am_cuda_rope(a, ex);
    rope_job job = {a, am_rope_angles_of(a)};
    am_parallel_for(a->q.shape[0], GRAIN, tokens, &job);
    return AM_OK;
}

am_status am_mrope(am_rope_args *a, const am_exec *ex)
{
    a->name = "mrope";
    return rotate(a, ex);
}

am_status am_vision_rope(am_rope_args *a, const am_exec *ex)
{
    a->name = "vision_rope";
    a->vision = true;
    a->rotary_dim = a->q.ndim == 3 ? a->q.shape[2] : 0;
    return rotate(a, ex);
}
