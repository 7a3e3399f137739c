/* moe_route.cu -- softmax, the k largest, their weights and sums of p, and the gradient of the logits.
 *
 *   a warp takes a token, lane i the experts i, i + 32, ..; a block takes 64 tokens and leaves its sums of p
 *
 * A logit's bits, made to order like integers, find the largest in one reduction of the warp and the lowest of equal
 * experts in another: 2 k a token. Sums of p over tokens: a lane in float32 over 8 tokens, warps in order, blocks in
 * float64 in order.
 *
 * Floor: 2 E bytes of logits a token and 12 k bytes of results; 32K tokens, 256 experts, k 8 in bfloat16: 20 MB, which
 * L2 holds. It is bound by instructions: about 600 a token and warp, 32K tokens on 528 schedulers: 37K cycles, 22 us;
 * measured 62 us, and 50 for the gradient. The product before it, 51.5 GFLOP and 0.2 GB, takes 76 us.
 */
#include "moe_job.h"

#include "moe_device.cuh"

namespace
{

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr unsigned kAll = 0xffffffffu;

struct Route {
    void *logits;           /* [T, E] */
    const uint8_t *padding; /* may be null */
    int64_t padding_stride, tokens;
    int experts, top_k;
    int *chosen;
    float *weights, *partial;
    const float *dweights, *dprob_sum; /* the latter may be null */
    void *dlogits;
};

/* Integers in the order of x, above 0; -0 is 0. */
__device__ uint32_t key_of(float x)
{
    const uint32_t bits = __float_as_uint(x + 0.0f), key = bits >> 31 ? ~bits : bits | 0x80000000u;
    return key == 0 ? 1 : key;
}

__device__ float value_of(uint32_t key) { return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key); }

__device__ bool is_padding(const Route &r, int64_t token)
{
    return r.padding != nullptr && r.padding[token * r.padding_stride] != 0;
}

template <int kPer> __device__ uint32_t largest(const uint32_t (&key)[kPer])
{
    uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < kPer; i++)
        top = key[i] > top ? key[i] : top;
    return __reduce_max_sync(kAll, top);
}

/* The token's logits (behind the last expert: -inf) and their order (there: 0). */
template <typename T, int kPer>
__device__ void load(const Route &r, int64_t token, float (&l)[kPer], uint32_t (&key)[kPer])
{
    const T *const from = static_cast<const T *>(r.logits) + token * r.experts;
#pragma unroll
    for (int i = 0; i < kPer; i++) {
        const int e = static_cast<int>(threadIdx.x % 32) + 32 * i;
        l[i] = e < r.experts ? rows::to_float(from[e]) : -INFINITY;
        key[i] = e < r.experts ? key_of(l[i]) : 0;
    }
}

/* l becomes softmax(l). */
template <int kPer> __device__ void soften(float (&l)[kPer], float top)
{
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kPer; i++) {
        l[i] = expf(l[i] - top);
        total += l[i];
    }
    total = moe::warp_sum(total);
#pragma unroll
    for (int i = 0; i < kPer; i++)
        l[i] /= total;
}

template <typename T> __device__ void fill_padding(const Route &r, int64_t token)
{
    const int lane = threadIdx.x % 32;
    for (int e = lane; e < r.experts; e += 32)
        rows::from_float(static_cast<T *>(r.logits) + token * r.experts + e, 0.0f);
    for (int j = lane; j < r.top_k; j += 32) {
        r.chosen[token * r.top_k + j] = -1;
        r.weights[token * r.top_k + j] = 0.0f;
    }
}

/* The k largest of p, in order. Lane j % 32 writes the j-th. */
template <typename T, int kPer>
__device__ void choose(const Route &r, int64_t token, const float (&p)[kPer], uint32_t (&key)[kPer])
{
    const int lane = threadIdx.x % 32;
    int *const chosen = r.chosen + token * r.top_k;
    float *const weights = r.weights + token * r.top_k;
    float total = 0.0f;
    for (int j = 0; j < r.top_k; j++) {
        const uint32_t top = largest(key);
        uint32_t e = kAll;
#pragma unroll
        for (int i = kPer - 1; i >= 0; i--)
            e = key[i] == top ? lane + 32 * i : e;
        e = __reduce_min_sync(kAll, e);
        float mine = 0.0f;
#pragma unroll
        for (int i = 0; i < kPer; i++)
            if (e == lane + 32u * i) {
                mine = p[i];
                key[i] = 0;
            }
        const float picked = __shfl_sync(kAll, mine, e % 32);
        total += picked;
        if (lane == j % 32) {
            chosen[j] = static_cast<int>(e);
            weights[j] = picked;
        }
    }
    for (int j = lane; j < r.top_k; j += 32)
        weights[j] = rows::rounded<T>(weights[j] / total);
}

template <typename T, int kPer>
__global__ void __launch_bounds__(kThreads, kPer <= 8 ? 4 : 1) moe_choose_kernel(const __grid_constant__ Route r)
{
    __shared__ float sums[kWarps][32 * kPer];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * kMoeRouteTokens;
    float sum[kPer] = {};
    for (int64_t t = first + warp; t < first + kMoeRouteTokens && t < r.tokens; t += kWarps) {
        if (is_padding(r, t)) {
            fill_padding<T>(r, t);
            continue;
        }
        float p[kPer];
        uint32_t key[kPer];
        load<T>(r, t, p, key);
        soften(p, value_of(largest(key)));
#pragma unroll
        for (int i = 0; i < kPer; i++)
            sum[i] += p[i];
        choose<T>(r, t, p, key);
    }
#pragma unroll
    for (int i = 0; i < kPer; i++)
        sums[warp][lane + 32 * i] = sum[i];
    __syncthreads();
    for (int e = threadIdx.x; e < r.experts; e += kThreads) {
        float total = 0.0f;
        for (int w = 0; w < kWarps; w++)
            total += sums[w][e];
        r.partial[static_cast<int64_t>(blockIdx.x) * r.experts + e] = total;
    }
}

constexpr int kSegments = 32;

__global__ void __launch_bounds__(32 * kSegments)
    moe_prob_sum_kernel(float *prob_sum, const float *partial, int experts, int blocks)
{
    __shared__ double sums[kSegments][33];
    const int lane = threadIdx.x % 32, segment = threadIdx.x / 32, e = blockIdx.x * 32 + lane;
    const int length = (blocks + kSegments - 1) / kSegments, first = segment * length;
    double total = 0.0;
    for (int b = first; b < first + length && b < blocks && e < experts; b++)
        total += static_cast<double>(partial[static_cast<int64_t>(b) * experts + e]);
    sums[segment][lane] = total;
    __syncthreads();
    if (segment != 0 || e >= experts)
        return;
    for (int i = 1; i < kSegments; i++)
        total += sums[i][lane];
    prob_sum[e] = static_cast<float>(total);
}

/* A token's j-th choice with its share of the chosen probabilities and that share's gradient; 0 behind the last. */
struct Pick {
    int expert;
    float weight, dweight;
};

template <typename T> __device__ Pick pick_of(const Route &r, int64_t token, int j, float top)
{
    Pick pick = {-1, 0.0f, 0.0f};
    if (j >= r.top_k)
        return pick;
    const int e = r.chosen[token * r.top_k + j];
    if (e < 0 || e >= r.experts)
        return pick;
    pick.expert = e;
    pick.weight = expf(rows::to_float(static_cast<const T *>(r.logits)[token * r.experts + e]) - top);
    pick.dweight = r.dweights[token * r.top_k + j];
    return pick;
}

/* What comes through the routing weights: w_j (dw_j less the mean of dw by w, without its cancellation), added to dl.
 */
template <typename T, int kPer> __device__ void add_picks(const Route &r, int64_t token, float top, float (&dl)[kPer])
{
    const int lane = threadIdx.x % 32;
    float total = 0.0f;
    for (int j = lane; j < (r.top_k + 31) / 32 * 32; j += 32)
        total += pick_of<T>(r, token, j, top).weight;
    total = moe::warp_sum(total);
    for (int j0 = 0; j0 < r.top_k; j0 += 32) {
        const Pick mine = pick_of<T>(r, token, j0 + lane, top);
        float above = 0.0f;
        for (int i0 = 0; i0 < r.top_k; i0 += 32) {
            const Pick other = pick_of<T>(r, token, i0 + lane, top);
            for (int i = 0; i < 32 && i0 + i < r.top_k; i++) {
                const float w = __shfl_sync(kAll, other.weight, i) / total, dw = __shfl_sync(kAll, other.dweight, i);
                above += w * (mine.dweight - dw);
            }
        }
        const float add = mine.weight / total * above;
        for (int i = 0; i < 32 && j0 + i < r.top_k; i++) {
            const int e = __shfl_sync(kAll, mine.expert, i);
            const float value = __shfl_sync(kAll, add, i);
#pragma unroll
            for (int n = 0; n < kPer; n++)
                dl[n] += e == lane + 32 * n ? value : 0.0f;
        }
    }
}

template <typename T, int kPer>
__global__ void __launch_bounds__(kThreads) moe_route_grad_kernel(const __grid_constant__ Route r)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * kMoeRouteTokens;
    for (int64_t t = first + warp; t < first + kMoeRouteTokens && t < r.tokens; t += kWarps) {
        float dl[kPer] = {};
        if (!is_padding(r, t)) {
            float p[kPer];
            uint32_t key[kPer];
            load<T>(r, t, p, key);
            const float top = value_of(largest(key));
            if (r.dprob_sum != nullptr) {
                float mean = 0.0f;
                soften(p, top);
#pragma unroll
                for (int i = 0; i < kPer; i++) {
                    dl[i] = lane + 32 * i < r.experts ? r.dprob_sum[lane + 32 * i] : 0.0f;
                    mean += p[i] * dl[i];
                }
                mean = moe::warp_sum(mean);
#pragma unroll
                for (int i = 0; i < kPer; i++)
                    dl[i] = p[i] * (dl[i] - mean);
            }
            add_picks<T>(r, t, top, dl);
        }
#pragma unroll
        for (int i = 0; i < kPer; i++)
            if (lane + 32 * i < r.experts)
                rows::from_float(static_cast<T *>(r.dlogits) + t * r.experts + lane + 32 * i, dl[i]);
    }
}

Route route_of(const MoeJob &job)
{
    const am_moe_args *const a = job.a;
    Route r = {};
    r.logits = a->logits.data;
    if (a->padding.dtype != AM_NONE) {
        r.padding = static_cast<const uint8_t *>(a->padding.data);
        r.padding_stride = a->padding.stride[0];
    }
    r.tokens = job.tokens;
    r.experts = static_cast<int>(job.experts);
    r.top_k = static_cast<int>(job.top_k);
    r.chosen = static_cast<int *>(a->chosen.data);
    r.weights = static_cast<float *>(a->weights.data);
    r.partial = job.partial;
    return r;
}

unsigned blocks_of(const MoeJob &job)
{
    return static_cast<unsigned>((job.tokens + kMoeRouteTokens - 1) / kMoeRouteTokens);
}

template <typename T, int kPer> am_status launch(const Route &r, bool backward, unsigned blocks, cudaStream_t stream)
{
    if (backward)
        moe_route_grad_kernel<T, kPer><<<blocks, kThreads, 0, stream>>>(r);
    else
        moe_choose_kernel<T, kPer><<<blocks, kThreads, 0, stream>>>(r);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

template <typename T> am_status launch_by_experts(const Route &r, bool backward, unsigned blocks, cudaStream_t stream)
{
    if (blocks == 0)
        return AM_OK;
    if (r.experts <= 32)
        return launch<T, 1>(r, backward, blocks, stream);
    if (r.experts <= 64)
        return launch<T, 2>(r, backward, blocks, stream);
    if (r.experts <= 128)
        return launch<T, 4>(r, backward, blocks, stream);
    if (r.experts <= 256)
        return launch<T, 8>(r, backward, blocks, stream);
    return r.experts <= 512 ? launch<T, 16>(r, backward, blocks, stream) : launch<T, 32>(r, backward, blocks, stream);
}

am_status launch_by_dtype(const MoeJob &job, const Route &r, bool backward, cudaStream_t stream)
{
    return job.a->hidden.dtype == AM_BF16 ? launch_by_experts<__nv_bfloat16>(r, backward, blocks_of(job), stream)
                                          : launch_by_experts<float>(r, backward, blocks_of(job), stream);
}

} // namespace

am_status moe_route_choose(const MoeJob &job, cudaStream_t stream)
{
    return launch_by_dtype(job, route_of(job), false, stream);
}

am_status moe_route_sums(const MoeJob &job, cudaStream_t stream)
{
    const unsigned blocks = static_cast<unsigned>((job.experts + 31) / 32);
    moe_prob_sum_kernel<<<blocks, 32 * kSegments, 0, stream>>>(static_cast<float *>(job.a->prob_sum.data), job.partial,
                                                               static_cast<int>(job.experts),
                                                               static_cast<int>(blocks_of(job)));
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

am_status moe_route_grad(const MoeJob &job, const float *dweights, cudaStream_t stream)
{
    Route r = route_of(job);
    r.dweights = dweights;
    r.dprob_sum = static_cast<const float *>(job.a->dprob_sum.data);
    r.dlogits = job.dlogits;
    return launch_by_dtype(job, r, true, stream);
}
