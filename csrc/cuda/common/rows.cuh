/* rows.cuh -- tensors [.., N] as rows of 16-byte words: the walk over the leading axes, float32 in and out of words.
 *
 * A call's tensors have one shape; `Axes` are their leading axes, those merged that all tensors lay end to end, and a
 * `Rows` says where one tensor's rows are. Words are read and written once: both carry the streaming hint.
 */
#ifndef ROWS_CUH
#define ROWS_CUH

#include <stdint.h>

#include <cuda_bf16.h>

#include "cuda_check.h"

namespace rows
{

/* Leading axes, merged: the first one's extent is never looked at. */
struct Axes {
    int n;
    int64_t extent[AM_MAX_DIMS];
};

struct Rows {
    char *data;                  /* null: not given */
    int64_t stride[AM_MAX_DIMS]; /* bytes */
};

/* Elements of T in a 16-byte word. */
template <typename T> constexpr int kPer = 16 / static_cast<int>(sizeof(T));

inline bool given(const am_tensor &t) { return t.dtype != AM_NONE; }

inline int64_t count(const am_tensor &t)
{
    int64_t n = 1;
    for (int d = 0; d + 1 < t.ndim; d++)
        n *= t.shape[d];
    return n;
}

/* The axes that `n` tensors share and where their rows are; a tensor that is not given is left out. */
inline Axes merge(const am_tensor *const *tensors, int n, Rows *out)
{
    Axes axes = {};
    const am_tensor &first = *tensors[0];
    for (int i = 0; i < n; i++) {
        out[i] = {};
        out[i].data = given(*tensors[i]) ? static_cast<char *>(tensors[i]->data) : nullptr;
    }
    for (int d = 0; d + 1 < first.ndim; d++) {
        if (first.shape[d] == 1)
            continue;
        bool joins = axes.n > 0;
        for (int i = 0; i < n && joins; i++)
            if (given(*tensors[i])) {
                const int64_t size = static_cast<int64_t>(am_dtype_size(tensors[i]->dtype));
                joins = out[i].stride[axes.n - 1] == tensors[i]->stride[d] * size * first.shape[d];
            }
        const int at = joins ? axes.n - 1 : axes.n++;
        axes.extent[at] = joins ? axes.extent[at] * first.shape[d] : first.shape[d];
        for (int i = 0; i < n; i++)
            if (given(*tensors[i]))
                out[i].stride[at] = tensors[i]->stride[d] * static_cast<int64_t>(am_dtype_size(tensors[i]->dtype));
    }
    return axes;
}

/* Every row of the tensor starts on `bytes` bytes. */
inline bool aligned(const Axes &axes, const Rows &r, int bytes)
{
    bool fine = reinterpret_cast<uintptr_t>(r.data) % bytes == 0;
    for (int d = 0; d < axes.n; d++)
        fine = fine && r.stride[d] % bytes == 0;
    return fine;
}

__device__ inline char *row_of(const Axes &axes, const Rows &r, int64_t row)
{
    if (axes.n <= 1)
        return r.data + row * r.stride[0];
    int64_t at = 0;
    for (int d = axes.n - 1; d > 0; d--) {
        at += row % axes.extent[d] * r.stride[d];
        row /= axes.extent[d];
    }
    return r.data + at + row * r.stride[0];
}

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline void from_float(float *to, float x) { *to = x; }
__device__ inline void from_float(__nv_bfloat16 *to, float x) { *to = __float2bfloat16_rn(x); }

/* What a value is after it was stored as T. */
template <typename T> __device__ float rounded(float x)
{
    T narrow;
    from_float(&narrow, x);
    return to_float(narrow);
}

template <typename T> __device__ void unpack(float (&to)[kPer<T>], const uint4 &word)
{
    const uint32_t part[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (sizeof(T) == 4) {
            to[i] = __uint_as_float(part[i]);
        } else {
            to[2 * i] = __uint_as_float(part[i] << 16);
            to[2 * i + 1] = __uint_as_float(part[i] & 0xffff0000u);
        }
    }
}

template <typename T> __device__ uint4 pack(const float (&from)[kPer<T>])
{
    uint32_t part[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (sizeof(T) == 4) {
            part[i] = __float_as_uint(from[i]);
        } else {
            const __nv_bfloat162 two = __floats2bfloat162_rn(from[2 * i], from[2 * i + 1]);
            part[i] = *reinterpret_cast<const uint32_t *>(&two);
        }
    }
    return make_uint4(part[0], part[1], part[2], part[3]);
}

__device__ inline uint4 load(const char *p) { return __ldcs(reinterpret_cast<const uint4 *>(p)); }
__device__ inline void store(char *p, const uint4 &word) { __stcs(reinterpret_cast<uint4 *>(p), word); }

/* Division of numerators below 2^31 by a fixed number in [1, 2^31). */
struct Divisor {
    uint32_t by, factor, shift;
};

inline Divisor divisor(uint32_t by)
{
    uint32_t log = 0;
    while ((1ull << log) < by)
        log++;
    const uint64_t power = 1ull << (31 + log);
    return {by, static_cast<uint32_t>(power / by + (power % by != 0)), 31 + log};
}

__device__ inline uint32_t divide(uint32_t n, const Divisor &d)
{
    return static_cast<uint32_t>((static_cast<uint64_t>(n) * d.factor) >> d.shift);
}

} // namespace rows

#endif
