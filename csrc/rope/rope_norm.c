#include "rope_norm.h"

#include <math.h>
#include <string.h>

#include "am_cpu.h"
#include "am_pool.h"
#include "am_rows.h"
#include "rope_angles.h"

enum { GRAIN = 4 }; /* tokens of a parallel chunk */

typedef struct head {
    void *y;
    const void *x, *weight;
    const float *cosine, *sine;
    float *rstd;
    int64_t n, pairs;
    float eps, shift; /* shift: 1 where the weights are zero-centred */
    bool bf16, weight_bf16;
} head;

typedef struct grad_head { /* dweight: float64 sums, NULL where nobody asks */
    void *dx;
    double *dweight;
    const void *dy, *x, *weight;
    const float *cosine, *sine;
    int64_t n, pairs;
    float rstd, shift;
    bool bf16, weight_bf16;
} grad_head;

#define AM_CPU_INC "rope_norm_cpu.inc"
#include "am_each_isa.h"
#define KERNELS(isa) {norm_head_##isa, norm_head_grad_##isa}
#if defined(__x86_64__)
#define KERNELS_BY_ISA {KERNELS(scalar), KERNELS(avx2), KERNELS(avx512), KERNELS(avx512)}
#else
#define KERNELS_BY_ISA {KERNELS(scalar), KERNELS(scalar), KERNELS(scalar), KERNELS(scalar)}
#endif

static const struct {
    void (*forward)(const head *);
    void (*backward)(const grad_head *);
} kernels[AM_ISA_COUNT] = KERNELS_BY_ISA;

static const char name[] = "qk_norm_mrope";

#ifndef AM_WITH_CUDA
#define am_cuda_rope_norm_forward(a, ex) am_no_cuda(name)
#define am_cuda_rope_norm_backward(a, ex) am_no_cuda(name)
#endif

static bool given(const am_tensor *t) { return t->dtype != AM_NONE; }

static am_status check_weight(const char *which, const am_tensor *t, int64_t n)
{
    AM_CHECK(t->dtype == AM_F32 || t->dtype == AM_BF16, AM_ERR_DTYPE, "%s: %s is %s, float32 or bfloat16 is needed",
             name, which, am_dtype_name(t->dtype));
    AM_CHECK(t->ndim == 1, AM_ERR_SHAPE, "%s: %s has %d axes, 1 is needed", name, which, t->ndim);
    AM_CHECK(t->shape[0] == n, AM_ERR_SHAPE, "%s: %s has %lld elements, head dim is %lld", name, which,
             (long long)t->shape[0], (long long)n);
    AM_CHECK(n == 1 || t->stride[0] == 1, AM_ERR_SHAPE, "%s: %s has stride %lld, 1 is needed", name, which,
             (long long)t->stride[0]);
    return AM_OK;
}

static am_status check_rstd(const am_tensor *t, const am_rope_args *rope)
{
    const int64_t tokens = rope->q.shape[0], heads = rope->q.shape[1] + rope->k.shape[1];
    AM_CHECK(t->dtype == AM_F32 && t->ndim == 2 && t->shape[0] == tokens && t->shape[1] == heads && am_is_contiguous(t),
             AM_ERR_ARG, "%s: rstd must be contiguous float32 [%lld, %lld]", name, (long long)tokens, (long long)heads);
    return AM_OK;
}

static am_status check_common(am_rope_args *rope, const am_tensor *q_weight, const am_tensor *k_weight,
                              const am_tensor *rstd, const char *q_out, const char *k_out)
{
    rope->name = name;
    AM_TRY(am_rope_check(rope));
    AM_TRY(check_weight("q_weight", q_weight, rope->q.shape[2]));
    AM_TRY(check_weight("k_weight", k_weight, rope->q.shape[2]));
    AM_TRY(am_rope_check_output(name, q_out, &rope->q_out, &rope->q));
    AM_TRY(am_rope_check_output(name, k_out, &rope->k_out, &rope->k));
    return check_rstd(rstd, rope);
}

typedef struct forward_job {
    const am_rope_norm_args *args;
    am_rope_angles angles;
} forward_job;

static void norm_heads(const am_rope_norm_args *a, bool keys, int64_t token, head h)
{
    const am_rope_args *const rope = &a->rope;
    const am_tensor *const in = keys ? &rope->k : &rope->q, *const out = keys ? &rope->k_out : &rope->q_out;
    const am_tensor *const weight = keys ? &a->k_weight : &a->q_weight;
    float *const rstd = (float *)a->rstd.data + token * a->rstd.shape[1] + (keys ? rope->q.shape[1] : 0);
    h.weight = weight->data;
    h.weight_bf16 = weight->dtype == AM_BF16;
    for (int64_t i = 0; i < in->shape[1]; i++) {
        h.x = am_at(in, token * in->stride[0] + i * in->stride[1]);
        h.y = am_at(out, (token * in->shape[1] + i) * h.n);
        h.rstd = rstd + i;
        kernels[am_cpu_isa()].forward(&h);
    }
}

static void forward_tokens(int64_t begin, int64_t end, void *ctx)
{
    const forward_job *const job = ctx;
    const am_rope_norm_args *const a = job->args;
    float cosine[AM_ROPE_MAX_PAIRS], sine[AM_ROPE_MAX_PAIRS];
    const head h = {.cosine = cosine,
                    .sine = sine,
                    .n = a->rope.q.shape[2],
                    .pairs = job->angles.pairs,
                    .eps = (float)a->eps,
                    .shift = a->zero_centered ? 1.0f : 0.0f,
                    .bf16 = a->rope.q.dtype == AM_BF16};
    for (int64_t t = begin; t < end; t++) {
        am_rope_cos_sin(cosine, sine, &job->angles, &a->rope, t);
        norm_heads(a, false, t, h);
        norm_heads(a, true, t, h);
    }
}

am_status am_rope_norm_forward(am_rope_norm_args *a, const am_exec *ex)
{
    AM_TRY(check_common(&a->rope, &a->q_weight, &a->k_weight, &a->rstd, "q_out", "k_out"));
    AM_CHECK(a->eps >= 0.0 && isfinite(a->eps), AM_ERR_ARG, "%s: eps is %g, it lies in [0, inf)", name, a->eps);
    if (am_numel(&a->rope.q) == 0 && am_numel(&a->rope.k) == 0)
        return AM_OK;
    if (ex->dev != AM_DEV_CPU)
        return am_cuda_rope_norm_forward(a, ex);
    forward_job job = {a, am_rope_angles_of(&a->rope)};
    am_parallel_for(a->rope.q.shape[0], GRAIN, forward_tokens, &job);
    return AM_OK;
}

typedef struct backward_job {
    const am_rope_norm_grad_args *args;
    am_rope_angles angles;
} backward_job;

/* `partial` is where the token's run adds up: [2, D]. */
static void grad_heads(const am_rope_norm_grad_args *a, bool keys, int64_t token, double *partial, grad_head h)
{
    const am_rope_args *const rope = &a->rope;
    const am_tensor *const x = keys ? &rope->k : &rope->q, *const dx = keys ? &rope->k_out : &rope->q_out;
    const am_tensor *const dy = keys ? &a->dk_out : &a->dq_out, *const weight = keys ? &a->k_weight : &a->q_weight;
    const float *const rstd = (const float *)a->rstd.data + token * a->rstd.shape[1] + (keys ? rope->q.shape[1] : 0);
    h.weight = weight->data;
    h.weight_bf16 = weight->dtype == AM_BF16;
    h.dweight = given(keys ? &a->dk_weight : &a->dq_weight) ? partial + (keys ? h.n : 0) : NULL;
    for (int64_t i = 0; i < x->shape[1]; i++) {
        h.x = am_at(x, token * x->stride[0] + i * x->stride[1]);
        h.dy = am_at(dy, token * dy->stride[0] + i * dy->stride[1]);
        h.dx = am_at(dx, (token * x->shape[1] + i) * h.n);
        h.rstd = rstd[i];
        kernels[am_cpu_isa()].backward(&h);
    }
}

static void backward_runs(int64_t begin, int64_t end, void *ctx)
{
    const backward_job *const job = ctx;
    const am_rope_norm_grad_args *const a = job->args;
    const int64_t tokens = a->rope.q.shape[0], runs = a->partials.shape[0], n = a->rope.q.shape[2];
    float cosine[AM_ROPE_MAX_PAIRS], sine[AM_ROPE_MAX_PAIRS];
    const grad_head h = {.cosine = cosine,
                         .sine = sine,
                         .n = n,
                         .pairs = job->angles.pairs,
                         .shift = a->zero_centered ? 1.0f : 0.0f,
                         .bf16 = a->rope.q.dtype == AM_BF16};
    for (int64_t run = begin; run < end; run++) {
        double *const partial = (double *)a->partials.data + run * 2 * n;
        memset(partial, 0, (size_t)(2 * n) * sizeof *partial);
        for (int64_t t = run * tokens / runs; t < (run + 1) * tokens / runs; t++) {
            am_rope_cos_sin(cosine, sine, &job->angles, &a->rope, t);
            grad_heads(a, false, t, partial, h);
            grad_heads(a, true, t, partial, h);
        }
    }
}

/* All runs of one weight, one run after another. */
static void add_up(const am_tensor *out, const am_tensor *partials, int64_t which)
{
    const int64_t n = partials->shape[2];
    for (int64_t i = 0; i < n && given(out); i++) {
        double total = 0.0;
        for (int64_t run = 0; run < partials->shape[0]; run++)
            total += ((const double *)partials->data)[(2 * run + which) * n + i];
        if (out->dtype == AM_BF16)
            ((am_bf16 *)out->data)[i] = am_f32_to_bf16((float)total);
        else
            ((float *)out->data)[i] = (float)total;
    }
}

static am_status check_backward(am_rope_norm_grad_args *a)
{
    AM_TRY(check_common(&a->rope, &a->q_weight, &a->k_weight, &a->rstd, "dq", "dk"));
    const am_rope_args *const rope = &a->rope;
    const int64_t n = rope->q.shape[2];
    AM_TRY(am_rope_check_heads(name, "dq_out", &a->dq_out, &rope->q));
    AM_TRY(am_rope_check_heads(name, "dk_out", &a->dk_out, &rope->q));
    AM_CHECK(a->dq_out.shape[1] == rope->q.shape[1] && a->dk_out.shape[1] == rope->k.shape[1], AM_ERR_SHAPE,
             "%s: dq_out and dk_out have %lld and %lld heads, q and k %lld and %lld", name,
             (long long)a->dq_out.shape[1], (long long)a->dk_out.shape[1], (long long)rope->q.shape[1],
             (long long)rope->k.shape[1]);
    if (given(&a->dq_weight))
        AM_TRY(check_weight("dq_weight", &a->dq_weight, n));
    if (given(&a->dk_weight))
        AM_TRY(check_weight("dk_weight", &a->dk_weight, n));
    AM_CHECK(a->partials.dtype == AM_F64 && a->partials.ndim == 3 && a->partials.shape[0] >= 1 &&
                 a->partials.shape[1] == 2 && a->partials.shape[2] == n && am_is_contiguous(&a->partials),
             AM_ERR_ARG, "%s: partials must be contiguous float64 [k, 2, %lld]", name, (long long)n);
    return AM_OK;
}

am_status am_rope_norm_backward(am_rope_norm_grad_args *a, const am_exec *ex)
{
    AM_TRY(check_backward(a));
    if (ex->dev != AM_DEV_CPU)
        return am_cuda_rope_norm_backward(a, ex);
    backward_job job = {a, am_rope_angles_of(&a->rope)};
    am_parallel_for(a->partials.shape[0], 1, backward_runs, &job);
    add_up(&a->dq_weight, &a->partials, 0);
    add_up(&a->dk_weight, &a->partials, 1);
    return AM_OK;
}
