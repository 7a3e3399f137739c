#include "comm.h"

#include <math.h>

#include "am_bf16.h"
#include "am_cpu.h"
#include "am_pool.h"

#ifndef AM_WITH_CUDA
#define am_cuda_comm_reduce_parts(a, ex) am_no_cuda("comm_reduce_parts")
#endif

enum { REDUCE_BLOCK = 256, REDUCE_GRAIN = 1 << 14 };

typedef void (*reduce_fn)(void *out, const void *parts, int64_t n, int64_t ranks, int64_t stride, float scale);

#define AS_F32(x) (x)

#define AM_TARGET AM_TARGET_SCALAR
#define AM_NAME(x) x##_scalar
#include "comm_cpu.inc"
#undef AM_TARGET
#undef AM_NAME

#define AM_TARGET AM_TARGET_AVX2
#define AM_NAME(x) x##_avx2
#include "comm_cpu.inc"
#undef AM_TARGET
#undef AM_NAME

#define AM_TARGET AM_TARGET_AVX512
#define AM_NAME(x) x##_avx512
#include "comm_cpu.inc"
#undef AM_TARGET
#undef AM_NAME

/* [parts are bf16][out is bf16]. avx512_bf16 adds nothing here: its conversions flush subnormals. */
typedef const reduce_fn (*reduce_rows)[2];
static const reduce_rows kernels[AM_ISA_COUNT] = {reduce_scalar, reduce_avx2, reduce_avx512, reduce_avx512};

typedef struct reduce_job {
    reduce_fn kernel;
    const am_comm_reduce_parts_args *args;
    int64_t stride;
} reduce_job;

am_status am_comm_check_parts(const char *fn, const char *name, const am_tensor *out, const am_tensor *parts,
                              double scale)
{
    AM_CHECK(out->dtype == AM_F32 || out->dtype == AM_BF16, AM_ERR_DTYPE,
             "%s: out is %s, float32 or bfloat16 is needed", fn, am_dtype_name(out->dtype));
    AM_CHECK(parts->dtype == AM_F32 || parts->dtype == AM_BF16, AM_ERR_DTYPE,
             "%s: %s is %s, float32 or bfloat16 is needed", fn, name, am_dtype_name(parts->dtype));
    AM_CHECK(out->ndim == 1, AM_ERR_SHAPE, "%s: out has %d axes, 1 is needed", fn, out->ndim);
    AM_CHECK(parts->ndim == 2, AM_ERR_SHAPE, "%s: %s has %d axes, 2 are needed", fn, name, parts->ndim);
    AM_CHECK(parts->shape[0] >= 1, AM_ERR_SHAPE, "%s: %s has %lld rows, at least 1 is needed", fn, name,
             (long long)parts->shape[0]);
    AM_CHECK(parts->shape[1] == out->shape[0], AM_ERR_SHAPE, "%s: a row of %s has %lld elements, out has %lld", fn,
             name, (long long)parts->shape[1], (long long)out->shape[0]);
    AM_CHECK(out->shape[0] <= 1 || out->stride[0] == 1, AM_ERR_ARG, "%s: out has stride %lld, 1 is needed", fn,
             (long long)out->stride[0]);
    AM_CHECK(out->shape[0] <= 1 || parts->stride[1] == 1, AM_ERR_ARG,
             "%s: the last axis of %s has stride %lld, 1 is needed", fn, name, (long long)parts->stride[1]);
    AM_CHECK(isfinite((float)scale), AM_ERR_ARG, "%s: scale is %g, a finite float32 is needed", fn, scale);
    AM_CHECK(!am_overlaps(out, parts), AM_ERR_ARG, "%s: out and %s share memory", fn, name);
    return AM_OK;
}

static void reduce_range(int64_t begin, int64_t end, void *ctx)
{
    const reduce_job *const job = ctx;
    const am_comm_reduce_parts_args *const a = job->args;
    char *const out = (char *)a->out.data + (size_t)begin * am_dtype_size(a->out.dtype);
    const char *const parts = (const char *)a->parts.data + (size_t)begin * am_dtype_size(a->parts.dtype);
    job->kernel(out, parts, end - begin, a->parts.shape[0], job->stride, (float)a->scale);
}

am_status am_comm_reduce_parts(const am_comm_reduce_parts_args *a, const am_exec *ex)
{
    AM_TRY(am_comm_check_parts("comm_reduce_parts", "parts", &a->out, &a->parts, a->scale));
    if (am_numel(&a->out) == 0)
        return AM_OK;
    if (ex->dev == AM_DEV_CUDA)
        return am_cuda_comm_reduce_parts(a, ex);
    const reduce_rows rows = kernels[am_cpu_isa()];
    reduce_job job = {rows[a->parts.dtype == AM_BF16][a->out.dtype == AM_BF16], a, a->parts.stride[0]};
    am_parallel_for(a->out.shape[0], REDUCE_GRAIN, reduce_range, &job);
    return AM_OK;
}
