/* attention_simple.cuh -- what the simple kernels of both passes share: float32 tiles in shared memory and products of
 * 16 x 16 threads, thread (y, x) making rows y + 16 i and columns x + 16 j.
 */
#ifndef ATTENTION_SIMPLE_CUH
#define ATTENTION_SIMPLE_CUH

#include "attention_rows.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

constexpr int kThreads = 256;

struct AttentionProblem {
    AttentionView q, k, v, out, lse, low, dout, dq, dk, dv; /* low.data may be null */
    AttentionDocs docs;
    const int64_t *first;
    float *delta;
    int64_t tokens, heads, key_heads, group;
    int dim;
    am_dtype dtype;
    float scale;
    bool causal;
};

__device__ inline float attention_load(const AttentionProblem &p, const void *data, int64_t at)
{
    if (p.dtype == AM_F32)
        return static_cast<const float *>(data)[at];
    if (p.dtype == AM_BF16)
        return __bfloat162float(static_cast<const __nv_bfloat16 *>(data)[at]);
    return __half2float(static_cast<const __half *>(data)[at]);
}

__device__ inline void attention_store(const AttentionProblem &p, void *data, int64_t at, float x)
{
    if (p.dtype == AM_F32)
        static_cast<float *>(data)[at] = x;
    else if (p.dtype == AM_BF16)
        static_cast<__nv_bfloat16 *>(data)[at] = __float2bfloat16_rn(x);
    else
        static_cast<__half *>(data)[at] = __float2half_rn(x);
}

/* Rows of a view into a tile of kRows x kWide (pitch kWide + 1); zeros below the last row and beyond dim, so that what
 * a neighbour or the padding holds never meets a product. */
template <int kRows, int kWide>
__device__ void attention_load_tile(const AttentionProblem &p, const AttentionView &view, int64_t token, int64_t head,
                                    int64_t rows, float *tile)
{
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kWide; i += kThreads) {
        const int r = i / kWide, d = i % kWide;
        const bool real = r < rows && d < p.dim;
        tile[r * (kWide + 1) + d] =
            real ? attention_load(p, view.data, (token + r) * view.token + head * view.head + d) : 0.0f;
    }
}

/* s[i][j] = a[y + 16 i] . b[x + 16 j], over tiles of pitch kWide + 1. Sixteen products are summed from 0 and added
 * once: short chains keep float32's error; delta is summed in this order too, so that dp - delta of one key is 0. */
template <int kWide, int kM, int kN> __device__ void attention_dot(const float *a, const float *b, float (&s)[kM][kN])
{
    const int x = static_cast<int>(threadIdx.x % 16), y = static_cast<int>(threadIdx.x / 16);
    for (int i = 0; i < kM; i++)
        for (int j = 0; j < kN; j++)
            s[i][j] = 0.0f;
    for (int d0 = 0; d0 < kWide; d0 += 16) {
        float part[kM][kN] = {};
        for (int d = d0; d < d0 + 16; d++) {
            float left[kM], right[kN];
            for (int i = 0; i < kM; i++)
                left[i] = a[(y + 16 * i) * (kWide + 1) + d];
            for (int j = 0; j < kN; j++)
                right[j] = b[(x + 16 * j) * (kWide + 1) + d];
            for (int i = 0; i < kM; i++)
                for (int j = 0; j < kN; j++)
                    part[i][j] = fmaf(left[i], right[j], part[i][j]);
        }
        for (int i = 0; i < kM; i++)
            for (int j = 0; j < kN; j++)
                s[i][j] += part[i][j];
    }
}

/* sum[i][c] = factor[i] * sum[i][c] + sum over r of w(y + 16 i, r) * b[r][x + 16 c]; w is w[row][r] of pitch kRows + 1,
 * or w[r][row] when kTurned. A tile's part is summed from 0 and added once. */
template <int kWide, int kRows, bool kTurned, int kM>
__device__ void attention_weigh(const float *w, const float *b, const float (&factor)[kM], float (&sum)[kM][kWide / 16])
{
    constexpr int kChunks = kWide / 16, kGroup = kChunks % 4 == 0 ? 4 : kChunks;
    const int x = static_cast<int>(threadIdx.x % 16), y = static_cast<int>(threadIdx.x / 16);
#pragma unroll
    for (int c0 = 0; c0 < kChunks; c0 += kGroup) {
        float part[kM][kGroup] = {};
        for (int r = 0; r < kRows; r++) {
            float weight[kM], value[kGroup];
            for (int i = 0; i < kM; i++)
                weight[i] = kTurned ? w[r * (kRows + 1) + y + 16 * i] : w[(y + 16 * i) * (kRows + 1) + r];
            for (int c = 0; c < kGroup; c++)
                value[c] = b[r * (kWide + 1) + x + 16 * (c0 + c)];
            for (int i = 0; i < kM; i++)
                for (int c = 0; c < kGroup; c++)
                    part[i][c] = fmaf(weight[i], value[c], part[i][c]);
        }
        for (int i = 0; i < kM; i++)
            for (int c = 0; c < kGroup; c++)
                sum[i][c0 + c] = fmaf(sum[i][c0 + c], factor[i], part[i][c]);
    }
}

/* Writes rows y + 16 i of a sum as rows of a view. */
template <int kWide, int kM>
__device__ void attention_store_rows(const AttentionProblem &p, const AttentionView &view, int64_t token, int64_t head,
                                     int64_t rows, const float (&sum)[kM][kWide / 16], float scale)
{
    const int x = static_cast<int>(threadIdx.x % 16), y = static_cast<int>(threadIdx.x / 16);
#pragma unroll
    for (int i = 0; i < kM; i++)
#pragma unroll
        for (int c = 0; c < kWide / 16; c++)
            if (y + 16 * i < rows && x + 16 * c < p.dim)
                attention_store(p, view.data, (token + y + 16 * i) * view.token + head * view.head + x + 16 * c,
                                sum[i][c] * scale);
}

AttentionProblem attention_problem(const am_attention_args *a, const AttentionScratch &s);

/* Blocks for at most `tiles` tiles of some heads. */
unsigned attention_blocks(int64_t tiles, int64_t heads);

#endif
