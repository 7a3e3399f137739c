/* attention_fwd_simple.cu -- the formula of attention.h in float32, any row of the table: the oracle on the GPU.
 *
 *   block = 64 queries of one document and head       q tile (shared) . k tile (shared) -> scores (registers)
 *   for each 64 keys that the last query sees:        scores -> running max and sum, weights (shared)
 *                                                     weights . v tile (over k's) -> sums (registers)
 *
 * Floor: 4 D flops a score at the rate of float32, 67 TFLOP/s on an H200; two shared reads for one multiply-add of four
 * rows keep it below a third of that.
 */
#include "attention_simple.cuh"

#include <math.h>

namespace
{

using Tile = AttentionTile<uint64_t>;

constexpr int kTile = 64, kM = 4;

template <int kWide> constexpr size_t smem_bytes()
{
    return (2 * kTile * (kWide + 1) + kTile * (kTile + 1)) * sizeof(float);
}

/* Over the 16 threads of a row. */
__device__ float row_max(float x)
{
    for (int step = 1; step < 16; step *= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

__device__ float row_sum(float x)
{
    for (int step = 1; step < 16; step *= 2)
        x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

/* Scores become weights relative to the running maximum, in shared memory; factor is what the sums shrink by. */
__device__ void soften(const AttentionProblem &p, const Tile &t, int64_t row0, int64_t key0, const float (&s)[kM][kM],
                       float *weights, float (&top)[kM], float (&total)[kM], float (&factor)[kM])
{
    const int x = static_cast<int>(threadIdx.x % 16), y = static_cast<int>(threadIdx.x / 16);
#pragma unroll
    for (int i = 0; i < kM; i++) {
        const int64_t seen = attention_limit(t, p.causal, row0 + y + 16 * i) - key0;
        float now = top[i];
        for (int j = 0; j < kM; j++)
            now = x + 16 * j < seen ? fmaxf(now, __fmul_rn(s[i][j], p.scale)) : now;
        now = row_max(now);
        const float base = now == -INFINITY ? 0.0f : now;
        float sum = 0.0f;
        for (int j = 0; j < kM; j++) {
            const float weight = x + 16 * j < seen ? expf(__fmul_rn(s[i][j], p.scale) - base) : 0.0f;
            weights[(y + 16 * i) * (kTile + 1) + x + 16 * j] = weight;
            sum += weight;
        }
        factor[i] = expf(top[i] - base);
        total[i] = fmaf(total[i], factor[i], row_sum(sum));
        top[i] = now;
    }
}

template <int kWide>
__device__ void finish(const AttentionProblem &p, const Tile &t, int64_t row0, int64_t head,
                       float (&sum)[kM][kWide / 16], const float (&top)[kM], const float (&total)[kM])
{
    const int x = static_cast<int>(threadIdx.x % 16), y = static_cast<int>(threadIdx.x / 16);
#pragma unroll
    for (int i = 0; i < kM; i++) {
        for (int c = 0; c < kWide / 16; c++)
            sum[i][c] = total[i] == 0.0f ? 0.0f : sum[i][c] / total[i];
        const int64_t token = t.q0 + row0 + y + 16 * i;
        if (x != 0 || row0 + y + 16 * i >= t.nq)
            continue;
        const float log_total = logf(total[i]), both = top[i] + log_total;
        static_cast<float *>(p.lse.data)[token * p.lse.token + head * p.lse.head] = total[i] == 0.0f ? -INFINITY : both;
        if (p.low.data != nullptr)
            static_cast<float *>(p.low.data)[token * p.low.token + head * p.low.head] =
                total[i] == 0.0f ? 0.0f : log_total - (both - top[i]);
    }
    attention_store_rows<kWide>(p, p.out, t.q0 + row0, head, t.nq - row0, sum, 1.0f);
}

template <int kWide>
__global__ void __launch_bounds__(kThreads, 1) attention_fwd_simple_kernel(const __grid_constant__ AttentionProblem p)
{
    extern __shared__ float smem[];
    float *const q = smem, *const kv = q + kTile * (kWide + 1), *const weights = kv + kTile * (kWide + 1);
    const uint64_t heads = static_cast<uint64_t>(p.heads), work = static_cast<uint64_t>(p.first[p.docs.n]) * heads;
    for (uint64_t w = blockIdx.x; w < work; w += gridDim.x) {
        const Tile t = attention_tile(p.docs, p.first, heads, w);
        const int64_t head = static_cast<int64_t>(t.head),
                      row0 = static_cast<int64_t>(t.tiles - 1 - t.index) * kTile; /* the longest rows first */
        const int64_t last = row0 + kTile < t.nq ? row0 + kTile : t.nq, limit = attention_limit(t, p.causal, last - 1);
        float sum[kM][kWide / 16] = {}, top[kM], total[kM] = {}, factor[kM], s[kM][kM];
        for (int i = 0; i < kM; i++)
            top[i] = -INFINITY;
        __syncthreads();
        attention_load_tile<kTile, kWide>(p, p.q, t.q0 + row0, head, t.nq - row0, q);
        for (int64_t key0 = 0; key0 < limit; key0 += kTile) {
            __syncthreads();
            attention_load_tile<kTile, kWide>(p, p.k, t.k0 + key0, head / p.group, t.nk - key0, kv);
            __syncthreads();
            attention_dot<kWide>(q, kv, s);
            soften(p, t, row0, key0, s, weights, top, total, factor);
            __syncthreads();
            attention_load_tile<kTile, kWide>(p, p.v, t.k0 + key0, head / p.group, t.nk - key0, kv);
            __syncthreads();
            attention_weigh<kWide, kTile, false>(weights, kv, factor, sum);
        }
        finish<kWide>(p, t, row0, head, sum, top, total);
    }
}

template <int kWide> am_status launch(const AttentionProblem &p, cudaStream_t stream)
{
    AM_CUDA(cudaFuncSetAttribute(attention_fwd_simple_kernel<kWide>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 smem_bytes<kWide>()));
    const unsigned blocks = attention_blocks(p.tokens / kTile + p.docs.n, p.heads);
    attention_fwd_simple_kernel<kWide><<<blocks, kThreads, smem_bytes<kWide>(), stream>>>(p);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

} // namespace

AttentionProblem attention_problem(const am_attention_args *a, const AttentionScratch &s)
{
    AttentionProblem p = {};
    p.q = attention_view(a->q);
    p.k = attention_view(a->k);
    p.v = attention_view(a->v);
    p.out = attention_view(a->out);
    p.lse = attention_view(a->lse);
    p.low = attention_view(a->lse_low);
    p.dout = attention_view(a->dout);
    p.dq = attention_view(a->dq);
    p.dk = attention_view(a->dk);
    p.dv = attention_view(a->dv);
    p.docs = attention_docs(a);
    p.first = s.first;
    p.delta = s.delta;
    p.tokens = a->q.shape[0];
    p.heads = a->q.shape[1];
    p.key_heads = a->k.shape[1];
    p.group = p.heads / p.key_heads;
    p.dim = static_cast<int>(a->q.shape[2]);
    p.dtype = a->q.dtype;
    p.scale = static_cast<float>(a->scale);
    p.causal = a->causal;
    return p;
}

unsigned attention_blocks(int64_t tiles, int64_t heads)
{
    const int64_t blocks = tiles * heads;
    return static_cast<unsigned>(blocks < 1 ? 1 : blocks < INT32_MAX ? blocks : INT32_MAX);
}

am_status attention_fwd_simple(const am_attention_args *a, cudaStream_t stream)
{
    const AttentionScratch s = attention_scratch(a, false);
    const AttentionProblem p = attention_problem(a, s);
    AM_TRY(attention_fill_gaps(a, false, stream));
    AM_TRY(attention_place_tiles(a, false, kTile, s.first, s.next, stream));
    if (p.dim <= 32)
        return launch<32>(p, stream);
    if (p.dim <= 80)
        return launch<80>(p, stream);
    return p.dim <= 128 ? launch<128>(p, stream) : launch<256>(p, stream);
}
