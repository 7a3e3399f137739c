/* gdn_prepare_sm90.cu -- what a chunk needs of its own tokens alone, for every value head: T = (I + A)^-1, P, decays.
 *
 *   block = chunk and key head, four warps; a place in shared memory of 64 x 64 floats for each
 *     rows of k and q -> shared, 1 / |k|, 1 / |q|       k k^T, q k^T: mma of bf16, 16 rows a warp -> shared
 *     a warp a value head: c by a scan in float64; A (shared) and P (out) from the products, the decays and beta
 *       inverses of the four 16 x 16 blocks of the diagonal by substitution, two columns a lane, float32
 *       below them -T22 (A21 T11) of 16 x 16, then of 32 x 32: mma of tf32, in place
 *       T beta (out), bf16
 *
 * A decay times a length is one exponential: 2^(c_i - c_j + log2(1 / |k_j|)).
 *
 * Bytes a chunk: k, q 32 KB a key head; T, P 16 KB and 1 KB of numbers a value head. With 16 and 64 heads, 32K tokens:
 * 0.27 GB read and 0.57 GB written, 0.2 ms. 4 MFLOP of bf16 a key head and 0.2 of tf32 a value head are nothing
 * beside it. Measured on an H200: 0.14 ms for 8K tokens, 0.57 for 32K. Eight warps a multiprocessor wait for shared
 * memory, exponentials and loads (an instruction of a warp every nine cycles when it took 0.19 ms).
 */
#include "gdn_sm90.cuh"

namespace
{

using namespace gdn_sm90;
using gdn::Range;

constexpr int kThreads = 128, kWarps = 4, kRow = kDim + 8, kLd = kChunk + 4;

struct Gates { /* of a value head: log2 of exp(c) and of exp(c) |k|, beta / |k|, beta */
    alignas(16) float c[kChunk], from[kChunk], left[kChunk], beta[kChunk];
};

struct Smem {
    union {
        __nv_bfloat16 rows[2][kChunk][kRow]; /* k and q */
        float inverse[kWarps][kChunk * kLd]; /* A, and then T */
    };
    float kk[kChunk * kLd], qk[kChunk * kLd];
    float key[kChunk], query[kChunk]; /* 1 / |k|, scale / |q| */
    Gates gates[kWarps];
};

/* A thread's pieces of a head's rows, zeros behind the document. */
struct Pieces {
    uint4 word[8];
};

__device__ __forceinline__ void load_rows(Pieces &to, const gdn::View &v, int64_t token, int n, int head)
{
    const int first = static_cast<int>(threadIdx.x / 16);
    const __nv_bfloat16 *const base =
        static_cast<const __nv_bfloat16 *>(v.data) + token * v.token + head * v.head + threadIdx.x % 16 * 8;
#pragma unroll
    for (int i = 0; i < 8; i++)
        to.word[i] =
            first + 8 * i < n ? __ldg(reinterpret_cast<const uint4 *>(base + (first + 8 * i) * v.token)) : uint4{};
}

/* They to shared memory; factor / |row| of each. */
__device__ __forceinline__ void store_rows(const Pieces &of, const Call &p, float factor, __nv_bfloat16 (*to)[kRow],
                                           float *lengths)
{
    const int piece = static_cast<int>(threadIdx.x % 16), first = static_cast<int>(threadIdx.x / 16);
    float sum[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint32_t part[4] = {of.word[i].x, of.word[i].y, of.word[i].z, of.word[i].w};
        sum[i] = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float low = __uint_as_float(part[j] << 16), high = __uint_as_float(part[j] & 0xffff0000u);
            sum[i] = fmaf(low, low, fmaf(high, high, sum[i]));
        }
        *reinterpret_cast<uint4 *>(&to[first + 8 * i][8 * piece]) = of.word[i];
    }
#pragma unroll
    for (int step = 1; step < 16; step *= 2)
#pragma unroll
        for (int i = 0; i < 8; i++)
            sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], step);
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (piece == i)
            lengths[first + 8 * i] = p.l2norm ? factor / sqrtf(sum[i] + 1e-6f) : factor;
}

/* The warp's 16 rows of k k^T and q k^T. */
__device__ void multiply(Smem &s)
{
    const int lane = static_cast<int>(threadIdx.x % 32), row0 = static_cast<int>(threadIdx.x / 32) * 16;
    float sums[2][8][4] = {};
#pragma unroll
    for (int step = 0; step < kDim / 16; step++) {
        uint32_t left[2][4];
#pragma unroll
        for (int i = 0; i < 2; i++)
            ptx::ldmatrix_x4(left[i], &s.rows[i][row0 + lane % 16][16 * step + lane / 16 * 8]);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t right[4];
            ptx::ldmatrix_x4(right, &s.rows[0][16 * j + lane % 8 + lane / 16 * 8][16 * step + lane / 8 % 2 * 8]);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                ptx::mma_m16n8k16_bf16(sums[i][2 * j], left[i], right[0], right[1]);
                ptx::mma_m16n8k16_bf16(sums[i][2 * j + 1], left[i], right[2], right[3]);
            }
        }
    }
    const int at = (row0 + lane / 4) * kLd + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int r = 0; r < 2; r++)
                *reinterpret_cast<float2 *>((i == 0 ? s.kk : s.qk) + at + 8 * r * kLd + 8 * j) =
                    make_float2(sums[i][j][2 * r], sums[i][j][2 * r + 1]);
}

/* A lane's two numbers of a chunk, 0 behind the document. */
struct Two {
    float first, second;
};

__device__ __forceinline__ Two two_of(const gdn::View &v, int64_t token, int n, int head, bool wanted)
{
    const int i = 2 * static_cast<int>(threadIdx.x % 32);
    return {wanted && i < n ? v.number(token + i, head) : 0.0f,
            wanted && i + 1 < n ? v.number(token + i + 1, head) : 0.0f};
}

/* c, that of lengths and beta of a value head to shared memory, its numbers out. */
__device__ void load_gates(const Two &g, const Two &betas, const Prepared &to, const Smem &s, Gates &of, int64_t own,
                           int n, int head)
{
    constexpr double kLog2e = 1.4426950408889634;
    const int lane = static_cast<int>(threadIdx.x % 32), i = 2 * lane;
    const double first = static_cast<double>(g.first), both = first + static_cast<double>(g.second);
    double sum = both;
    for (int step = 1; step < 32; step *= 2) {
        const double left = __shfl_up_sync(0xffffffffu, sum, step);
        sum += lane >= step ? left : 0.0;
    }
    double before = __shfl_up_sync(0xffffffffu, sum, 1);
    before = lane == 0 ? 0.0 : before;
    const double running[2] = {before + first, before + both}, last = __shfl_sync(0xffffffffu, running[1], 31);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const float c = static_cast<float>(kLog2e * running[j]), key = s.key[i + j], query = s.query[i + j];
        const float e = exp2f(c), f = exp2f(static_cast<float>(kLog2e * (last - running[j])));
        const float beta = j == 0 ? betas.first : betas.second;
        of.c[i + j] = c;
        of.from[i + j] = c - __log2f(key);
        of.left[i + j] = beta * key;
        of.beta[i + j] = beta;
        if (i + j < n)
            __stwb(to.numbers + head * to.stride + own + i + j, make_float4(e * key, f * key, e * query, e));
        if (i + j < n && to.more != nullptr)
            __stwb(to.more + head * to.stride + own + i + j, make_float4(beta, query, of.from[i + j], c));
    }
    __syncwarp();
}

/* A into `a` (and zeros in squares of 16 that products read beside its diagonal), P out: a lane has eight columns of a
 * row of each square. */
__device__ void make_triangles(const Prepared &to, const Smem &s, const Gates &of, float *a, int64_t row0, int64_t step,
                               int n)
{
    const int row = static_cast<int>(threadIdx.x % 16), column = static_cast<int>(threadIdx.x / 16 % 2) * 8;
#pragma unroll
    for (int top = 0; top < kChunk; top += 16) {
        const int i = top + row;
        const float own = of.c[i], left = of.left[i], query = s.query[i];
        __nv_bfloat16 *const out = to.p + row0 + i * step + column;
#pragma unroll
        for (int j = 0; j < kChunk; j += 16) {
            const int at = i * kLd + j + column;
            float x[8] = {}, y[8] = {};
#pragma unroll
            for (int half = 0; half < 8 && j <= top; half += 4) {
                const float4 from = *reinterpret_cast<const float4 *>(of.from + j + column + half);
                const float4 kk = *reinterpret_cast<const float4 *>(s.kk + at + half);
                const float4 qk = *reinterpret_cast<const float4 *>(s.qk + at + half);
                const float d[4] = {ptx::ex2_approx(own - from.x), ptx::ex2_approx(own - from.y),
                                    ptx::ex2_approx(own - from.z), ptx::ex2_approx(own - from.w)};
                const float keys[4] = {kk.x, kk.y, kk.z, kk.w}, queries[4] = {qk.x, qk.y, qk.z, qk.w};
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const bool below = j < top || column + half + e < row, seen = j < top || column + half + e <= row;
                    const float key = left * keys[e] * d[e], read = query * queries[e] * d[e];
                    x[half + e] = below ? key : 0.0f;
                    y[half + e] = seen ? read : 0.0f;
                }
            }
            if (j <= top || (j == top + 16 && top % 32 == 0)) {
                *reinterpret_cast<float4 *>(a + at) = make_float4(x[0], x[1], x[2], x[3]);
                *reinterpret_cast<float4 *>(a + at + 4) = make_float4(x[4], x[5], x[6], x[7]);
            }
            if (i < n)
                __stwb(reinterpret_cast<uint4 *>(out + j),
                       make_uint4(pack(y[0], y[1]), pack(y[2], y[3]), pack(y[4], y[5]), pack(y[6], y[7])));
        }
    }
    __syncwarp();
}

/* T out, times beta of the column for forward; above its diagonal of squares of 16 lies anything. */
__device__ void store_inverse(const Prepared &to, const Gates &of, const float *a, int64_t row0, int64_t step, int n)
{
    const int column = static_cast<int>(threadIdx.x % 8) * 8, first = static_cast<int>(threadIdx.x / 8 % 4);
    float factor[8];
#pragma unroll
    for (int e = 0; e < 8; e++)
        factor[e] = to.more != nullptr ? 1.0f : of.beta[column + e];
#pragma unroll
    for (int top = 0; top < kChunk; top += 4) {
        const int i = top + first;
        const bool above = column > (top | 15);
        const float4 zero = {};
        const float4 low = above ? zero : *reinterpret_cast<const float4 *>(a + i * kLd + column);
        const float4 high = above ? zero : *reinterpret_cast<const float4 *>(a + i * kLd + column + 4);
        if (i < n)
            __stwb(reinterpret_cast<uint4 *>(to.t + row0 + i * step + column),
                   make_uint4(pack(low.x * factor[0], low.y * factor[1]), pack(low.z * factor[2], low.w * factor[3]),
                              pack(high.x * factor[4], high.y * factor[5]),
                              pack(high.z * factor[6], high.w * factor[7])));
    }
    __syncwarp();
}

/* The inverses of I plus the blocks of the diagonal, in their places: a lane has two columns of one. */
__device__ void invert_diagonal(float *a)
{
    const int lane = static_cast<int>(threadIdx.x % 32), column = lane % 8 * 2;
    float *const block = a + lane / 8 * 16 * (kLd + 1);
    float x[2][16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        x[0][i] = i == column ? 1.0f : 0.0f;
        x[1][i] = i == column + 1 ? 1.0f : 0.0f;
#pragma unroll
        for (int j = 0; j < i; j += 4) {
            const float4 four = *reinterpret_cast<const float4 *>(block + i * kLd + j);
            const float part[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int k = 0; k < 4 && j + k < i; k++) {
                x[0][i] = fmaf(-part[k], x[0][j + k], x[0][i]);
                x[1][i] = fmaf(-part[k], x[1][j + k], x[1][i]);
            }
        }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16; i++)
        *reinterpret_cast<float2 *>(block + i * kLd + column) = make_float2(x[0][i], x[1][i]);
    __syncwarp();
}

/* Rounded to nearest: the product takes the upper 19 bits. */
__device__ __forceinline__ uint32_t tf32(float x) { return __float_as_uint(x) + 0x1000u; }

/* out = +-A B of squares of 16 kTiles; `out` may be A or B. */
template <int kTiles> __device__ void multiply_blocks(float *out, const float *a, const float *b, float sign)
{
    const int lane = static_cast<int>(threadIdx.x % 32), row = lane / 4, k = lane % 4;
    float sums[kTiles][2 * kTiles][4] = {};
#pragma unroll
    for (int step = 0; step < 2 * kTiles; step++) {
        uint32_t left[kTiles][4];
#pragma unroll
        for (int i = 0; i < kTiles; i++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                left[i][e] = tf32(sign * a[(16 * i + row + e % 2 * 8) * kLd + 8 * step + k + e / 2 * 4]);
#pragma unroll
        for (int j = 0; j < 2 * kTiles; j++) {
            const float *const at = b + (8 * step + k) * kLd + 8 * j + row;
            const uint32_t right[2] = {tf32(at[0]), tf32(at[4 * kLd])};
#pragma unroll
            for (int i = 0; i < kTiles; i++)
                ptx::mma_m16n8k8_tf32(sums[i][j], left[i], right[0], right[1]);
        }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kTiles; i++)
#pragma unroll
        for (int j = 0; j < 2 * kTiles; j++)
#pragma unroll
            for (int r = 0; r < 2; r++)
                *reinterpret_cast<float2 *>(out + (16 * i + row + 8 * r) * kLd + 8 * j + 2 * k) =
                    make_float2(sums[i][j][2 * r], sums[i][j][2 * r + 1]);
    __syncwarp();
}

__device__ void invert(float *a)
{
    invert_diagonal(a);
#pragma unroll 1
    for (int i = 0; i < kChunk; i += 32) {
        float *const corner = a + i * (kLd + 1), *const below = corner + 16 * kLd;
        multiply_blocks<1>(below, below, corner, 1.0f);
        multiply_blocks<1>(below, below + 16, below, -1.0f);
    }
    multiply_blocks<2>(a + 32 * kLd, a + 32 * kLd, a, 1.0f);
    multiply_blocks<2>(a + 32 * kLd, a + 32 * kLd + 32, a + 32 * kLd, -1.0f);
}

__global__ void __launch_bounds__(kThreads, 2)
    gdn_prepare_sm90_kernel(const __grid_constant__ Call p, const __grid_constant__ Prepared to)
{
    extern __shared__ float4 raw[];
    Smem &s = *reinterpret_cast<Smem *>(raw);
    const Range docs = gdn::documents_of(p), places = gdn::places_of<kChunk>(p, docs);
    const int warp = static_cast<int>(threadIdx.x / 32);
    const int64_t step = int64_t{p.value_heads} * kChunk;
    for (int64_t item = blockIdx.x; item < (places.last - places.first) * p.key_heads; item += gridDim.x) {
        const gdn::Place at = gdn::find<kChunk>(p, docs, places.first + item / p.key_heads);
        if (at.doc < 0)
            continue;
        const int key_head = static_cast<int>(item % p.key_heads);
        const int64_t token = p.start(at.doc) + at.index * kChunk;
        const int n = static_cast<int>(gdn::least(p.end(at.doc) - token, kChunk));
        Pieces k, q;
        load_rows(k, p.k, token, n, key_head);
        load_rows(q, p.q, token, n, key_head);
        Two g = two_of(p.g, token, n, key_head * p.group + warp, warp < p.group);
        Two beta = two_of(p.beta, token, n, key_head * p.group + warp, warp < p.group);
        store_rows(k, p, 1.0f, s.rows[0], s.key);
        store_rows(q, p, p.scale, s.rows[1], s.query);
        __syncthreads();
        multiply(s);
        __syncthreads();
        for (int h = warp; h < p.group; h += kWarps) {
            const int head = key_head * p.group + h;
            const int64_t row0 = (token - p.low) * step + head * kChunk;
            float *const a = s.inverse[warp];
            Gates &of = s.gates[warp];
            load_gates(g, beta, to, s, of, token - p.low, n, head);
            g = two_of(p.g, token, n, head + kWarps, h + kWarps < p.group);
            beta = two_of(p.beta, token, n, head + kWarps, h + kWarps < p.group);
            make_triangles(to, s, of, a, row0, step, n);
            invert(a);
            store_inverse(to, of, a, row0, step, n);
        }
        __syncthreads();
    }
}

} // namespace

am_status gdn_sm90::prepare(const Call &p, const Prepared &to, int64_t tokens, cudaStream_t stream)
{
    int sms = 0;
    AM_TRY(multiprocessors(&sms));
    AM_CUDA(cudaFuncSetAttribute(gdn_prepare_sm90_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Smem)));
    const int64_t items = (tokens / kChunk + p.n_docs) * p.key_heads, blocks = items < 2 * sms ? items : 2 * sms;
    gdn_prepare_sm90_kernel<<<static_cast<unsigned>(blocks), kThreads, sizeof(Smem), stream>>>(p, to);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}
