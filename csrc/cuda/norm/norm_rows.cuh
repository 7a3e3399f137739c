/* norm_rows.cuh -- what the norm kernels share: a call as the device sees it, sums over the lanes of a row, weights. */
#ifndef NORM_ROWS_CUH
#define NORM_ROWS_CUH

#include "ptx_sm90.cuh"
#include "rows.cuh"

extern "C" {
#include "norm.h"
}

namespace norms
{

/* What a kernel computes: RMS with a residual forward, with a gradient of the sum backward, has one more input. */
enum Kind { kRms, kRmsSum, kGated, kLayer };

struct Forward {
    rows::Axes axes;
    rows::Rows y, sum, x, residual, z;
    const void *weight, *bias;
    float *rstd, *mean;
    int64_t rows;
    int n;
    float eps, shift;
    bool weight_bf16, bias_bf16;
};

struct Backward {
    rows::Axes axes;
    rows::Rows dx, dz, dy, dsum, x, z;
    const void *weight;
    const float *rstd, *mean;
    double *partials; /* [blocks, sums, n] */
    int64_t rows;
    int n, sums;
    float shift;
    bool weight_bf16;
};

/* Any sizes, strides and alignments. */
am_status forward_plain(const Forward &p, Kind kind, bool bf16, cudaStream_t stream);
am_status backward_plain(const Backward &p, Kind kind, bool bf16, int runs, cudaStream_t stream);

constexpr int kMostWarps = 16;

/* Sums over the kLanes neighbouring threads of a row, the same bits on each of them. `shared` is [2][kMostWarps][kSums]
 * and `turn` alternates, so that one barrier a sum is enough; groups of more than a warp wait for their own lanes. */
template <int kLanes, int kSums>
__device__ void sum_lanes(float (&value)[kSums], float (*shared)[kMostWarps][kSums], int turn)
{
#pragma unroll
    for (int s = 0; s < kSums; s++)
#pragma unroll
        for (int away = (kLanes < 32 ? kLanes : 32) / 2; away > 0; away /= 2)
            value[s] += __shfl_xor_sync(0xffffffffu, value[s], away);
    if constexpr (kLanes > 32) {
        constexpr int kWarps = kLanes / 32;
        const int warp = threadIdx.x / 32, group = threadIdx.x / kLanes;
        if (threadIdx.x % 32 == 0)
#pragma unroll
            for (int s = 0; s < kSums; s++)
                shared[turn][warp][s] = value[s];
        ptx::bar_sync(1 + group, kLanes);
#pragma unroll
        for (int s = 0; s < kSums; s++) {
            value[s] = shared[turn][group * kWarps][s];
#pragma unroll
            for (int w = 1; w < kWarps; w++)
                value[s] += shared[turn][group * kWarps + w][s];
        }
    }
}

__device__ inline float element(const void *v, int i, bool bf16)
{
    return bf16 ? __bfloat162float(static_cast<const __nv_bfloat16 *>(v)[i]) : static_cast<const float *>(v)[i];
}

/* The part of a vector of weights that meets word `word` of a row of T; 16-byte aligned. */
template <typename T> __device__ void weights(float (&to)[rows::kPer<T>], const void *v, int word, bool bf16)
{
    constexpr int kPer = rows::kPer<T>;
    if (bf16) {
        const uint2 *const at = static_cast<const uint2 *>(v) + word * (kPer / 4);
#pragma unroll
        for (int i = 0; i < kPer / 4; i++) {
            const uint2 two = __ldg(at + i);
            to[4 * i] = __uint_as_float(two.x << 16);
            to[4 * i + 1] = __uint_as_float(two.x & 0xffff0000u);
            to[4 * i + 2] = __uint_as_float(two.y << 16);
            to[4 * i + 3] = __uint_as_float(two.y & 0xffff0000u);
        }
    } else {
        const float4 *const at = static_cast<const float4 *>(v) + word * (kPer / 4);
#pragma unroll
        for (int i = 0; i < kPer / 4; i++) {
            const float4 four = __ldg(at + i);
            to[4 * i] = four.x;
            to[4 * i + 1] = four.y;
            to[4 * i + 2] = four.z;
            to[4 * i + 3] = four.w;
        }
    }
}

/* Float32 rows take the exact exponential; of bfloat16 rows the fast one's error is far below a rounding. */
template <typename T> __device__ float sigmoid(float x)
{
    return __fdividef(1.0f, 1.0f + (sizeof(T) == 4 ? expf(-x) : __expf(-x)));
}

/* w c(x rstd), rounded where transformers' eager code rounds. */
template <typename T> __device__ float scaled(float x, float rstd, float w, bool weight_bf16)
{
    const float product = rows::rounded<T>(x * rstd) * w;
    return weight_bf16 ? rows::rounded<T>(product) : product;
}

} // namespace norms

#endif
