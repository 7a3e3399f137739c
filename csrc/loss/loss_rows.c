#include "loss_rows.h"

#include <math.h>

#include "am_cpu.h"
#include "am_math.h"

#define AM_CPU_INC "loss_cpu.inc"
#include "am_each_isa.h"
#define KERNELS(isa) {join_##isa, grad_##isa, narrow_##isa}
#if defined(__x86_64__)
#define KERNELS_BY_ISA {KERNELS(scalar), KERNELS(avx2), KERNELS(avx512), KERNELS(avx512)}
#else
#define KERNELS_BY_ISA {KERNELS(scalar), KERNELS(scalar), KERNELS(scalar), KERNELS(scalar)}
#endif

static const loss_kernels kernels[AM_ISA_COUNT] = KERNELS_BY_ISA;

const loss_kernels *am_loss_kernels(void) { return &kernels[am_cpu_isa()]; }

static bool is_float(const am_tensor *t) { return t->dtype == AM_F32 || t->dtype == AM_BF16; }

int64_t am_loss_int_at(const am_tensor *t, int64_t i)
{
    i *= t->ndim ? t->stride[0] : 0;
    return t->dtype == AM_I32 ? ((const int32_t *)t->data)[i] : ((const int64_t *)t->data)[i];
}

am_status am_loss_check_count(const char *fn, const am_tensor *count, const am_exec *ex)
{
    if (count->dtype == AM_NONE)
        return AM_OK;
    AM_CHECK(count->dtype == AM_I32 || count->dtype == AM_I64, AM_ERR_DTYPE,
             "%s: num_label_tokens is %s, an integer (int32, int64) is needed", fn, am_dtype_name(count->dtype));
    AM_CHECK(am_numel(count) == 1, AM_ERR_SHAPE, "%s: num_label_tokens has %lld elements, 1 is needed", fn,
             (long long)am_numel(count));
    if (ex->dev != AM_DEV_CPU)
        return AM_OK;
    const am_tensor flat = {.data = count->data, .dtype = count->dtype};
    AM_CHECK(am_loss_int_at(&flat, 0) >= 0, AM_ERR_ARG, "%s: num_label_tokens is %lld, it must not be negative", fn,
             (long long)am_loss_int_at(&flat, 0));
    return AM_OK;
}

am_status am_loss_check_own_count(const char *fn, const am_tensor *count)
{
    AM_CHECK(count->dtype == AM_NONE || (count->dtype == AM_I64 && am_numel(count) == 1), AM_ERR_ARG,
             "%s: count must be int64 of 1 element", fn);
    return AM_OK;
}

am_status am_loss_check_labels(const char *fn, const am_tensor *labels, int64_t tokens, int64_t vocab, int64_t ignored,
                               int64_t *n, const am_exec *ex)
{
    AM_CHECK(labels->dtype == AM_I32 || labels->dtype == AM_I64, AM_ERR_DTYPE,
             "%s: labels is %s, int64 or int32 is needed", fn, am_dtype_name(labels->dtype));
    AM_CHECK(labels->ndim == 1, AM_ERR_SHAPE, "%s: labels has %d axes, 1 is needed", fn, labels->ndim);
    AM_CHECK(labels->shape[0] == tokens, AM_ERR_SHAPE, "%s: labels has %lld elements for %lld rows", fn,
             (long long)labels->shape[0], (long long)tokens);
    *n = 0;
    for (int64_t t = 0; t < tokens && ex->dev == AM_DEV_CPU; t++) {
        const int64_t y = am_loss_int_at(labels, t);
        if (y == ignored)
            continue;
        AM_CHECK(y >= 0 && y < vocab, AM_ERR_ARG,
                 "%s: labels[%lld] is %lld, neither in [0, %lld) nor ignore_index %lld", fn, (long long)t, (long long)y,
                 (long long)vocab, (long long)ignored);
        ++*n;
    }
    return AM_OK;
}

am_status am_loss_check_scalar(const char *fn, const char *name, const am_tensor *t)
{
    AM_CHECK(t->dtype == AM_F32, AM_ERR_DTYPE, "%s: %s is %s, float32 is needed", fn, name, am_dtype_name(t->dtype));
    AM_CHECK(am_numel(t) == 1, AM_ERR_SHAPE, "%s: %s has %lld elements, 1 is needed", fn, name, (long long)am_numel(t));
    return AM_OK;
}

am_status am_loss_check_matrix(const char *fn, const char *name, const am_tensor *t)
{
    AM_CHECK(is_float(t), AM_ERR_DTYPE, "%s: %s is %s, float32 or bfloat16 is needed", fn, name,
             am_dtype_name(t->dtype));
    AM_CHECK(t->ndim == 2, AM_ERR_SHAPE, "%s: %s has %d axes, 2 are needed", fn, name, t->ndim);
    return AM_OK;
}

am_status am_loss_check_rows(const char *fn, const char *name, const am_tensor *t)
{
    AM_TRY(am_loss_check_matrix(fn, name, t));
    AM_CHECK(am_numel(t) == 0 || t->shape[1] == 1 || t->stride[1] == 1, AM_ERR_SHAPE,
             "%s: %s has stride %lld on its last axis, 1 is needed", fn, name, (long long)t->stride[1]);
    return AM_OK;
}

am_status am_loss_check_cpu(const char *fn, const am_exec *ex)
{
    AM_CHECK(ex->dev == AM_DEV_CPU, AM_ERR_UNSUPPORTED, "%s: there is a CPU kernel only, the tensors are on CUDA", fn);
    return AM_OK;
}

double am_loss_inverse_count(const am_tensor *given, int64_t labelled)
{
    const am_tensor flat = {.data = given->data, .dtype = given->dtype};
    const int64_t count = given->dtype == AM_NONE ? labelled : am_loss_int_at(&flat, 0);
    return count ? 1.0 / (double)count : 0.0;
}

double am_loss_of(row_stats s, float label_logit) { return log((double)s.sum) + ((double)s.top - label_logit); }

float am_loss_logit_at(const am_tensor *logits, int64_t row, int64_t column)
{
    const void *const x = am_at(logits, row * logits->stride[0] + column);
    return logits->dtype == AM_BF16 ? am_bf16_to_f32(*(const am_bf16 *)x) : *(const float *)x;
}
