#include "am_tensor.h"

static const struct {
    const char *name;
    size_t size;
} dtypes[AM_DTYPE_COUNT] = {
    [AM_NONE] = {"none", 0},     [AM_BOOL] = {"bool", 1},   [AM_U8] = {"uint8", 1},    [AM_I8] = {"int8", 1},
    [AM_I16] = {"int16", 2},     [AM_I32] = {"int32", 4},   [AM_I64] = {"int64", 8},   [AM_F16] = {"float16", 2},
    [AM_BF16] = {"bfloat16", 2}, [AM_F32] = {"float32", 4}, [AM_F64] = {"float64", 8},
};

size_t am_dtype_size(am_dtype dtype) { return dtypes[dtype].size; }
const char *am_dtype_name(am_dtype dtype) { return dtypes[dtype].name; }

int64_t am_numel(const am_tensor *t)
{
    int64_t n = 1;
    for (int i = 0; i < t->ndim; i++)
        n *= t->shape[i];
    return n;
}

void am_set_compact_strides(am_tensor *t)
{
    int64_t inner = 1;
    for (int i = t->ndim - 1; i >= 0; i--) {
        t->stride[i] = inner;
        inner *= t->shape[i] > 1 ? t->shape[i] : 1;
    }
}

bool am_is_contiguous(const am_tensor *t)
{
    if (am_numel(t) == 0)
        return true;
    int64_t expected = 1;
    for (int i = t->ndim - 1; i >= 0; i--) {
        if (t->shape[i] == 1)
            continue;
        if (t->stride[i] != expected)
            return false;
        expected *= t->shape[i];
    }
    return true;
}

bool am_is_dense(const am_tensor *t)
{
    if (am_numel(t) == 0)
        return true;
    bool used[AM_MAX_DIMS] = {false};
    int64_t expected = 1;
    for (int placed = 0; placed < t->ndim; placed++) {
        int next = -1;
        for (int i = 0; i < t->ndim; i++)
            if (!used[i] && (t->shape[i] == 1 || t->stride[i] == expected)) {
                next = i;
                break;
            }
        if (next < 0)
            return false;
        used[next] = true;
        expected *= t->shape[next];
    }
    return true;
}

bool am_same_shape(const am_tensor *a, const am_tensor *b)
{
    if (a->ndim != b->ndim)
        return false;
    for (int i = 0; i < a->ndim; i++)
        if (a->shape[i] != b->shape[i])
            return false;
    return true;
}

bool am_same_strides(const am_tensor *a, const am_tensor *b)
{
    for (int i = 0; i < a->ndim; i++)
        if (a->shape[i] > 1 && a->stride[i] != b->stride[i])
            return false;
    return true;
}

static size_t span_bytes(const am_tensor *t)
{
    int64_t last = 0;
    for (int i = 0; i < t->ndim; i++)
        last += (t->shape[i] - 1) * t->stride[i];
    return (size_t)(last + 1) * am_dtype_size(t->dtype);
}

bool am_overlaps(const am_tensor *a, const am_tensor *b)
{
    if (am_numel(a) == 0 || am_numel(b) == 0)
        return false;
    const uintptr_t a0 = (uintptr_t)a->data, b0 = (uintptr_t)b->data;
    return a0 < b0 + span_bytes(b) && b0 < a0 + span_bytes(a);
}
