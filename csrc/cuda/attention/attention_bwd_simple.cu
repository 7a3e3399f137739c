/* attention_bwd_simple.cu -- the gradients of attention.h in float32, any row of the table: the oracle on the GPU.
 *
 *   delta   a thread a row: rowsum(dout * out)
 *   dk dv   block = 32 keys of one document and key head; runs through the heads of the group and the queries that see
 *           them, in order: the same bits every time
 *   dq      block = 32 queries of one document and head; runs through the keys that they see
 *
 * Both recompute s and dp: 7 products of 2 D flops a score where 5 would do. Floor: that at the rate of float32.
 */
#include "attention_simple.cuh"

#include <math.h>

namespace
{

using Tile = AttentionTile<uint64_t>;

constexpr int kTile = 32, kM = 2, kPitch = kTile + 1;

template <int kWide> constexpr size_t smem_bytes()
{
    return (4 * kTile * (kWide + 1) + 2 * kTile * kPitch) * sizeof(float);
}

__global__ void __launch_bounds__(kThreads) attention_delta_simple_kernel(const __grid_constant__ AttentionProblem p)
{
    const int64_t rows = p.tokens * p.heads, step = static_cast<int64_t>(gridDim.x) * kThreads;
    for (int64_t r = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; r < rows; r += step) {
        const int64_t token = r / p.heads, head = r % p.heads;
        const int64_t dout = token * p.dout.token + head * p.dout.head, out = token * p.out.token + head * p.out.head;
        float sum = 0.0f;
        for (int d0 = 0; d0 < p.dim; d0 += 16) { /* as attention_dot sums */
            float part = 0.0f;
            for (int d = d0; d < d0 + 16 && d < p.dim; d++)
                part = fmaf(attention_load(p, p.dout.data, dout + d), attention_load(p, p.out.data, out + d), part);
            sum += part;
        }
        p.delta[r] = sum;
    }
}

struct Tiles { /* in shared memory */
    float *q, *dout, *k, *v, *weights, *ds;
};

template <int kWide> __device__ Tiles tiles_at(float *smem)
{
    constexpr int kSize = kTile * (kWide + 1);
    return {
        smem, smem + kSize, smem + 2 * kSize, smem + 3 * kSize, smem + 4 * kSize, smem + 4 * kSize + kTile * kPitch};
}

/* weights = exp(s - lse) and ds = weights * (dp - delta), both [query][key], of queries from row0 and keys from key0.
 */
template <int kWide>
__device__ void differentiate(const AttentionProblem &p, const Tile &t, int64_t head, int64_t row0, int64_t key0,
                              const Tiles &tile)
{
    const int x = static_cast<int>(threadIdx.x % 16), y = static_cast<int>(threadIdx.x / 16);
    float s[kM][kM], dp[kM][kM];
    attention_dot<kWide>(tile.q, tile.k, s);
    attention_dot<kWide>(tile.dout, tile.v, dp);
#pragma unroll
    for (int i = 0; i < kM; i++) {
        const int64_t row = row0 + y + 16 * i, token = t.q0 + row;
        const int64_t seen = row < t.nq ? attention_limit(t, p.causal, row) - key0 : 0;
        const bool any = seen > 0;
        const float lse = any ? static_cast<float *>(p.lse.data)[token * p.lse.token + head * p.lse.head] : 0.0f;
        const float low = any && p.low.data != nullptr
                              ? static_cast<float *>(p.low.data)[token * p.low.token + head * p.low.head]
                              : 0.0f;
        const float delta = any ? p.delta[token * p.heads + head] : 0.0f;
        for (int j = 0; j < kM; j++) {
            const bool sees = x + 16 * j < seen;
            const float weight = sees ? expf(__fmul_rn(s[i][j], p.scale) - lse - low) : 0.0f;
            tile.weights[(y + 16 * i) * kPitch + x + 16 * j] = weight;
            tile.ds[(y + 16 * i) * kPitch + x + 16 * j] = sees ? weight * (dp[i][j] - delta) : 0.0f;
        }
    }
}

template <int kWide>
__global__ void __launch_bounds__(kThreads, 1) attention_dkdv_simple_kernel(const __grid_constant__ AttentionProblem p)
{
    extern __shared__ float smem[];
    const Tiles tile = tiles_at<kWide>(smem);
    const float one[kM] = {1.0f, 1.0f};
    const uint64_t heads = static_cast<uint64_t>(p.key_heads);
    const uint64_t work = static_cast<uint64_t>(p.first[p.docs.n]) * heads;
    for (uint64_t w = blockIdx.x; w < work; w += gridDim.x) {
        const Tile t = attention_tile(p.docs, p.first, heads, w);
        const int64_t key_head = static_cast<int64_t>(t.head), key0 = static_cast<int64_t>(t.index) * kTile;
        const int64_t sees = p.causal ? key0 - (t.nk - t.nq) : 0; /* the first query that sees key0 */
        const int64_t begin = sees > 0 ? sees / kTile * kTile : 0;
        float dk[kM][kWide / 16] = {}, dv[kM][kWide / 16] = {};
        __syncthreads();
        attention_load_tile<kTile, kWide>(p, p.k, t.k0 + key0, key_head, t.nk - key0, tile.k);
        attention_load_tile<kTile, kWide>(p, p.v, t.k0 + key0, key_head, t.nk - key0, tile.v);
        for (int64_t head = key_head * p.group; head < (key_head + 1) * p.group; head++) {
            float dk_part[kM][kWide / 16] = {}, dv_part[kM][kWide / 16] = {}; /* short chains keep float32's error */
            for (int64_t row0 = begin; row0 < t.nq; row0 += kTile) {
                __syncthreads();
                attention_load_tile<kTile, kWide>(p, p.q, t.q0 + row0, head, t.nq - row0, tile.q);
                attention_load_tile<kTile, kWide>(p, p.dout, t.q0 + row0, head, t.nq - row0, tile.dout);
                __syncthreads();
                differentiate<kWide>(p, t, head, row0, key0, tile);
                __syncthreads();
                attention_weigh<kWide, kTile, true>(tile.weights, tile.dout, one, dv_part);
                attention_weigh<kWide, kTile, true>(tile.ds, tile.q, one, dk_part);
            }
#pragma unroll
            for (int i = 0; i < kM; i++)
                for (int c = 0; c < kWide / 16; c++) {
                    dk[i][c] += dk_part[i][c];
                    dv[i][c] += dv_part[i][c];
                }
        }
        attention_store_rows<kWide>(p, p.dk, t.k0 + key0, key_head, t.nk - key0, dk, p.scale);
        attention_store_rows<kWide>(p, p.dv, t.k0 + key0, key_head, t.nk - key0, dv, 1.0f);
    }
}

template <int kWide>
__global__ void __launch_bounds__(kThreads, 1) attention_dq_simple_kernel(const __grid_constant__ AttentionProblem p)
{
    extern __shared__ float smem[];
    const Tiles tile = tiles_at<kWide>(smem);
    const float one[kM] = {1.0f, 1.0f};
    const uint64_t heads = static_cast<uint64_t>(p.heads), work = static_cast<uint64_t>(p.first[p.docs.n]) * heads;
    for (uint64_t w = blockIdx.x; w < work; w += gridDim.x) {
        const Tile t = attention_tile(p.docs, p.first, heads, w);
        const int64_t head = static_cast<int64_t>(t.head), row0 = static_cast<int64_t>(t.tiles - 1 - t.index) * kTile;
        const int64_t last = row0 + kTile < t.nq ? row0 + kTile : t.nq, limit = attention_limit(t, p.causal, last - 1);
        float dq[kM][kWide / 16] = {};
        __syncthreads();
        attention_load_tile<kTile, kWide>(p, p.q, t.q0 + row0, head, t.nq - row0, tile.q);
        attention_load_tile<kTile, kWide>(p, p.dout, t.q0 + row0, head, t.nq - row0, tile.dout);
        for (int64_t key0 = 0; key0 < limit; key0 += kTile) {
            __syncthreads();
            attention_load_tile<kTile, kWide>(p, p.k, t.k0 + key0, head / p.group, t.nk - key0, tile.k);
            attention_load_tile<kTile, kWide>(p, p.v, t.k0 + key0, head / p.group, t.nk - key0, tile.v);
            __syncthreads();
            differentiate<kWide>(p, t, head, row0, key0, tile);
            __syncthreads();
            attention_weigh<kWide, kTile, false>(tile.ds, tile.k, one, dq);
        }
        attention_store_rows<kWide>(p, p.dq, t.q0 + row0, head, t.nq - row0, dq, p.scale);
    }
}

/* `first` holds the places of tiles of queries, `first_k` of keys. */
template <int kWide> am_status launch(AttentionProblem p, const AttentionScratch &s, int64_t keys, cudaStream_t stream)
{
    AM_CUDA(cudaFuncSetAttribute(attention_dkdv_simple_kernel<kWide>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 smem_bytes<kWide>()));
    AM_CUDA(cudaFuncSetAttribute(attention_dq_simple_kernel<kWide>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 smem_bytes<kWide>()));
    if (p.tokens > 0) {
        const unsigned blocks_of_rows = attention_blocks((p.tokens + kThreads - 1) / kThreads, p.heads);
        attention_delta_simple_kernel<<<blocks_of_rows, kThreads, 0, stream>>>(p);
        AM_CUDA_LAUNCHED();
        p.first = s.first;
        const unsigned blocks = attention_blocks(p.tokens / kTile + p.docs.n, p.heads);
        attention_dq_simple_kernel<kWide><<<blocks, kThreads, smem_bytes<kWide>(), stream>>>(p);
        AM_CUDA_LAUNCHED();
    }
    p.first = s.first_k;
    const unsigned blocks = attention_blocks(keys / kTile + p.docs.n, p.key_heads);
    attention_dkdv_simple_kernel<kWide><<<blocks, kThreads, smem_bytes<kWide>(), stream>>>(p);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

} // namespace

am_status attention_bwd_simple(const am_attention_args *a, cudaStream_t stream)
{
    const AttentionScratch s = attention_scratch(a, true);
    const AttentionProblem p = attention_problem(a, s);
    const int64_t keys = a->k.shape[0];
    AM_TRY(attention_fill_gaps(a, true, stream));
    AM_TRY(attention_place_tiles(a, false, kTile, s.first, s.next, stream));
    AM_TRY(attention_place_tiles(a, true, kTile, s.first_k, s.next, stream));
    if (p.dim <= 32)
        return launch<32>(p, s, keys, stream);
    if (p.dim <= 80)
        return launch<80>(p, s, keys, stream);
    return p.dim <= 128 ? launch<128>(p, s, keys, stream) : launch<256>(p, s, keys, stream);
}
