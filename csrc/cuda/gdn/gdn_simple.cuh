/* gdn_simple.cuh -- float32 tiles of 64 x 64 in shared memory, for the kernels that take every dim.
 *
 * A block is 256 threads; thread (y, x) of 16 x 16 has the elements (4 y + r, x + 16 c) of a product, r and c < 4.
 */
#ifndef GDN_SIMPLE_CUH
#define GDN_SIMPLE_CUH

#include <math.h>

#include "gdn_call.cuh"

namespace gdn
{

constexpr int kThreads = 256, kLd = kChunk + 4, kTile = kChunk * kLd; /* floats */

using Sums = float[4][4];

__device__ inline int row_of(int r) { return static_cast<int>(threadIdx.x / 16) * 4 + r; }
__device__ inline int column_of(int c) { return static_cast<int>(threadIdx.x % 16) + 16 * c; }

/* `each(row, column, element)` of a thread's sums. */
template <typename Each> __device__ void for_each(Sums &sums, const Each &each)
{
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
        for (int c = 0; c < 4; c++)
            each(row_of(r), column_of(c), sums[r][c]);
}

__device__ inline void put(float *tile, Sums &sums)
{
    for_each(sums, [&](int i, int j, float x) { tile[i * kLd + j] = x; });
}

/* sums += A B over `depth` <= 64, a multiple of 4. kTurnedA: A lies as [depth][row]. kTurnedB: B as [column][depth]. */
template <bool kTurnedA, bool kTurnedB>
__device__ __forceinline__ void multiply(Sums &sums, const float *a, const float *b, int depth = kChunk)
{
#pragma unroll 1
    for (int k = 0; k < depth; k += 4) {
        float left[4][4], right[4][4]; /* [row or column][depth] */
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float4 x =
                *reinterpret_cast<const float4 *>(kTurnedA ? a + (k + i) * kLd + row_of(0) : a + row_of(i) * kLd + k);
            const float part[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int j = 0; j < 4; j++)
                left[kTurnedA ? j : i][kTurnedA ? i : j] = part[j];
        }
#pragma unroll
        for (int c = 0; c < 4; c++)
            if constexpr (kTurnedB) {
                const float4 x = *reinterpret_cast<const float4 *>(b + column_of(c) * kLd + k);
                right[c][0] = x.x;
                right[c][1] = x.y;
                right[c][2] = x.z;
                right[c][3] = x.w;
            } else {
#pragma unroll
                for (int i = 0; i < 4; i++)
                    right[c][i] = b[(k + i) * kLd + column_of(c)];
            }
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int r = 0; r < 4; r++)
#pragma unroll
                for (int c = 0; c < 4; c++)
                    sums[r][c] = fmaf(left[r][i], right[c][i], sums[r][c]);
    }
}

/* The same, summed apart and then added: a long chain of sums would round more often. */
template <bool kTurnedA, bool kTurnedB>
__device__ __forceinline__ void add_product(Sums &sums, const float *a, const float *b, int depth = kChunk)
{
    Sums part = {};
    multiply<kTurnedA, kTurnedB>(part, a, b, depth);
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
        for (int c = 0; c < 4; c++)
            sums[r][c] += part[r][c];
}

template <typename T> __device__ float element(const View &v, int64_t at)
{
    if constexpr (sizeof(T) == 4)
        return static_cast<const float *>(v.data)[at];
    else
        return __bfloat162float(static_cast<const __nv_bfloat16 *>(v.data)[at]);
}

template <typename T> __device__ void set_element(const View &v, int64_t at, float x)
{
    if constexpr (sizeof(T) == 4)
        static_cast<float *>(v.data)[at] = x;
    else
        static_cast<__nv_bfloat16 *>(v.data)[at] = __float2bfloat16_rn(x);
}

/* Rows [token, token + n) and columns [first, dim) of a head, row i times factor[i] (null: 1); else zeros. */
template <typename T>
__device__ void load(float *tile, const View &v, int64_t token, int n, int head, int first, int dim,
                     const float *factor = nullptr)
{
    for (int e = static_cast<int>(threadIdx.x); e < kChunk * kChunk; e += kThreads) {
        const int i = e / kChunk, j = e % kChunk;
        float x = 0.0f;
        if (i < n && first + j < dim)
            x = element<T>(v, (token + i) * v.token + head * v.head + first + j) * (factor ? factor[i] : 1.0f);
        tile[i * kLd + j] = x;
    }
}

/* Stores a thread's elements of rows below n and columns below dim. */
template <typename T>
__device__ void store(const View &v, int64_t token, int n, int head, int first, int dim, Sums &sums)
{
    for_each(sums, [&](int i, int j, float x) {
        if (i < n && first + j < dim)
            set_element<T>(v, (token + i) * v.token + head * v.head + first + j, x);
    });
}

/* Rows [row, row + 64) and columns [first, first + 64) of a state. */
__device__ inline void load_state(float *tile, const State &s, int row, int rows, int first, int columns)
{
    for (int e = static_cast<int>(threadIdx.x); e < kChunk * kChunk; e += kThreads) {
        const int i = e / kChunk, j = e % kChunk;
        const bool real = s.data != nullptr && row + i < rows && first + j < columns;
        tile[i * kLd + j] = real ? s.data[(row + i) * s.row + first + j] : 0.0f;
    }
}

__device__ inline void store_state(const float *tile, const State &s, int row, int rows, int first, int columns)
{
    for (int e = static_cast<int>(threadIdx.x); e < kChunk * kChunk; e += kThreads) {
        const int i = e / kChunk, j = e % kChunk;
        if (row + i < rows && first + j < columns)
            s.data[(row + i) * s.row + first + j] = tile[i * kLd + j];
    }
}

/* Numbers of a chunk's tokens; those behind the document have a gate and everything else of 0. */
struct Tokens {
    float hi[kChunk], lo[kChunk];                   /* c in two floats */
    float e[kChunk], f[kChunk], r[kChunk];          /* exp(c), exp(c_last - c), exp(c - c_first) */
    float beta[kChunk], key[kChunk], query[kChunk]; /* key, query: what their rows are times: 1 / |k|, scale / |q| */
    float more[2][kChunk];                          /* between barriers */
    float dots[3][kChunk];                          /* backward: of dbeta, and of c in exp(c) and in exp(c_last - c) */
};

/* One warp: sums in double, so that a gate of -90 costs the small ones after it no digits. */
__device__ inline void load_gates(const Call &p, Tokens &t, int64_t token, int n, int head)
{
    const int lane = static_cast<int>(threadIdx.x % 32), i = 2 * lane;
    const double first = i < n ? static_cast<double>(p.g.number(token + i, head)) : 0.0;
    const double both = first + (i + 1 < n ? static_cast<double>(p.g.number(token + i + 1, head)) : 0.0);
    double sum = both;
    for (int step = 1; step < 32; step *= 2) {
        const double left = __shfl_up_sync(0xffffffffu, sum, step);
        sum += lane >= step ? left : 0.0;
    }
    double before = __shfl_up_sync(0xffffffffu, sum, 1);
    before = lane == 0 ? 0.0 : before;
    const double c[2] = {before + first, before + both};
    const double last = __shfl_sync(0xffffffffu, c[1], 31), least_c = __shfl_sync(0xffffffffu, c[0], 0);
    for (int j = 0; j < 2; j++) {
        const float hi = static_cast<float>(c[j]), lo = static_cast<float>(c[j] - hi), e = expf(hi);
        t.hi[i + j] = hi;
        t.lo[i + j] = lo;
        t.e[i + j] = fmaf(e, lo, e);
        t.f[i + j] = expf(static_cast<float>(last - c[j]));
        t.r[i + j] = expf(static_cast<float>(c[j] - least_c));
        t.beta[i + j] = i + j < n ? p.beta.number(token + i + j, head) : 0.0f;
    }
}

/* 1 / |x| of a row, by a warp. */
template <typename T> __device__ float inverse_length(const Call &p, const View &v, int64_t token, int head)
{
    if (!p.l2norm)
        return 1.0f;
    float sum = 0.0f;
    for (int j = static_cast<int>(threadIdx.x % 32); j < p.key_dim; j += 32) {
        const float x = element<T>(v, token * v.token + head * v.head + j);
        sum = fmaf(x, x, sum);
    }
    for (int step = 16; step > 0; step /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, step);
    return 1.0f / sqrtf(sum + 1e-6f);
}

template <typename T>
__device__ void load_lengths(const Call &p, Tokens &t, int64_t token, int n, int head, bool queries)
{
    for (int i = static_cast<int>(threadIdx.x / 32); i < kChunk; i += kThreads / 32) {
        const float key = i < n ? inverse_length<T>(p, p.k, token + i, head) : 0.0f;
        const float query = i < n && queries ? p.scale * inverse_length<T>(p, p.q, token + i, head) : 0.0f;
        if (threadIdx.x % 32 == 0) {
            t.key[i] = key;
            t.query[i] = query;
        }
    }
}

__device__ inline float decay(const Tokens &t, int i, int j)
{
    return j <= i ? expf((t.hi[i] - t.hi[j]) + (t.lo[i] - t.lo[j])) : 0.0f;
}

/* k k^T becomes -A, q k^T becomes P. */
__device__ inline void make_triangles(const Tokens &t, Sums &kk, Sums &qk)
{
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int i = row_of(r), j = column_of(c);
            const float d = decay(t, i, j);
            kk[r][c] = j < i ? -t.beta[i] * kk[r][c] * d : 0.0f;
            qk[r][c] *= d;
        }
}

/* x = (I + A)^-1 x, or (I + A)^-T x, of the first `rows` rows (a multiple of 4); a is -A. Four threads have a column: a
 * row each of a block of four, first less the blocks that are known, then less each other. */
template <bool kTurned> __device__ void solve(const float *a, float *x, int rows)
{
    const int column = static_cast<int>(threadIdx.x / 4), own = static_cast<int>(threadIdx.x % 4);
    const int base = static_cast<int>(threadIdx.x % 32) & ~3;
    for (int step = 0; step < rows; step += 4) {
        const int block = kTurned ? rows - 4 - step : step, row = block + own;
        const int from = kTurned ? block + 4 : 0, to = kTurned ? rows : block;
        float sum[4] = {x[row * kLd + column], 0.0f, 0.0f, 0.0f};
        for (int j = from; j < to; j += 4)
#pragma unroll
            for (int i = 0; i < 4; i++)
                sum[i] =
                    fmaf(kTurned ? a[(j + i) * kLd + row] : a[row * kLd + j + i], x[(j + i) * kLd + column], sum[i]);
        float value = (sum[0] + sum[1]) + (sum[2] + sum[3]);
#pragma unroll
        for (int s = 0; s < 3; s++) {
            const int other = kTurned ? 3 - s : s;
            const float known = __shfl_sync(0xffffffffu, value, base + other);
            if (kTurned ? own < other : own > other)
                value = fmaf(kTurned ? a[(block + other) * kLd + row] : a[row * kLd + block + other], known, value);
        }
        x[row * kLd + column] = value;
        __syncwarp();
    }
}

} // namespace gdn

#endif
