/* rope_norm_plain.cu -- heads of any dim, stride and alignment normed and turned: a block a token, head after head.
 *
 * Backward: block b does the tokens b, b + runs, .. and adds their weight gradients to its run in memory, in float64; a
 * thread owns its columns.
 */
#include "rope_norm.cuh"

namespace
{

using namespace rope_norms;

constexpr int kThreads = 128;

/* The same bits on every thread. */
__device__ float block_sum(float value)
{
    __shared__ float shared[kThreads];
    __syncthreads();
    shared[threadIdx.x] = value;
    for (int half = kThreads / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half)
            shared[threadIdx.x] += shared[threadIdx.x + half];
    }
    __syncthreads();
    return shared[0];
}

/* Element i of a head turned by its token's table, forth or back; `at` gives an element before that. */
template <class At> __device__ float turned(const At &at, const float2 *table, int pairs, int i, float forth)
{
    if (i >= 2 * pairs)
        return at(i);
    const bool low = i < pairs;
    const float2 cs = table[low ? i : i - pairs];
    const float other = at(low ? i + pairs : i - pairs) * cs.y * forth;
    return at(i) * cs.x + (low ? -other : other);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) rope_norm_plain_kernel(const __grid_constant__ Forward p)
{
    __shared__ float2 table[AM_ROPE_MAX_PAIRS];
    const int pairs = static_cast<int>(p.angles.pairs.by);
    for (int64_t token = blockIdx.x; token < p.tokens; token += gridDim.x) {
        __syncthreads();
        ropes::fill_table(p.angles, token, 1, table);
        for (uint32_t head = 0; head < p.heads.by; head++) {
            const bool keys = head >= p.q_heads;
            const Heads &h = keys ? p.k : p.q;
            const int64_t which = keys ? head - p.q_heads : head;
            const T *const x = reinterpret_cast<const T *>(h.in + token * h.in_token + which * h.in_head);
            T *const y = reinterpret_cast<T *>(h.out + token * h.out_token) + which * p.n;
            float squares = 0.0f;
            for (int i = threadIdx.x; i < p.n; i += kThreads)
                squares += rows::to_float(x[i]) * rows::to_float(x[i]);
            const float rstd = __frsqrt_rn(block_sum(squares) / static_cast<float>(p.n) + p.eps);
            if (threadIdx.x == 0)
                p.rstd[token * p.heads.by + head] = rstd;
            const auto normed = [&](int i) {
                const float w =
                    keys ? element(p.k_weight, i, p.k_weight_bf16) : element(p.q_weight, i, p.q_weight_bf16);
                return rows::to_float(x[i]) * rstd * (w + p.shift);
            };
            for (int i = threadIdx.x; i < p.n; i += kThreads)
                rows::from_float(y + i, turned(normed, table, pairs, i, 1.0f));
        }
    }
}

template <typename T>
__device__ void grad_of_head(const Backward &p, int64_t token, uint32_t head, const float2 *table, double *run)
{
    const bool keys = head >= p.q_heads;
    const Heads &h = keys ? p.k : p.q;
    const int64_t which = keys ? head - p.q_heads : head;
    const int pairs = static_cast<int>(p.angles.pairs.by);
    const T *const x = reinterpret_cast<const T *>(h.in + token * h.in_token + which * h.in_head);
    const T *const dy = reinterpret_cast<const T *>(keys ? p.dk + token * p.dk_token + which * p.dk_head
                                                         : p.dq + token * p.dq_token + which * p.dq_head);
    T *const dx = reinterpret_cast<T *>(h.out + token * h.out_token) + which * p.n;
    const float rstd = p.rstd[token * p.heads.by + head];
    const auto before = [&](int i) { return rows::to_float(dy[i]); };
    const auto weight = [&](int i) {
        return (keys ? element(p.k_weight, i, p.k_weight_bf16) : element(p.q_weight, i, p.q_weight_bf16)) + p.shift;
    };
    float sum = 0.0f;
    for (int i = threadIdx.x; i < p.n; i += kThreads)
        sum += turned(before, table, pairs, i, -1.0f) * weight(i) * rows::to_float(x[i]);
    const float slope = block_sum(sum) * rstd / static_cast<float>(p.n);
    for (int i = threadIdx.x; i < p.n; i += kThreads) {
        const float g = turned(before, table, pairs, i, -1.0f), normed = rows::to_float(x[i]) * rstd;
        rows::from_float(dx + i, rstd * (g * weight(i) - normed * slope));
        run[(keys ? p.n : 0) + int64_t{i}] += static_cast<double>(g * normed);
    }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) rope_norm_grad_plain_kernel(const __grid_constant__ Backward p)
{
    __shared__ float2 table[AM_ROPE_MAX_PAIRS];
    double *const run = p.partials + static_cast<int64_t>(blockIdx.x) * 2 * p.n;
    for (int i = threadIdx.x; i < p.n; i += kThreads) /* the columns that the thread adds to */
        run[i] = run[p.n + int64_t{i}] = 0.0;
    for (int64_t token = blockIdx.x; token < p.tokens; token += gridDim.x) {
        __syncthreads();
        ropes::fill_table(p.angles, token, 1, table);
        __syncthreads();
        for (uint32_t head = 0; head < p.heads.by; head++)
            grad_of_head<T>(p, token, head, table, run);
    }
}

} // namespace

am_status rope_norms::forward_plain(const Forward &p, bool bf16, cudaStream_t stream)
{
    const unsigned blocks = static_cast<unsigned>(p.tokens < INT32_MAX ? p.tokens : INT32_MAX);
    if (bf16)
        rope_norm_plain_kernel<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(p);
    else
        rope_norm_plain_kernel<float><<<blocks, kThreads, 0, stream>>>(p);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

am_status rope_norms::backward_plain(const Backward &p, int runs, bool bf16, cudaStream_t stream)
{
    if (bf16)
        rope_norm_grad_plain_kernel<__nv_bfloat16><<<static_cast<unsigned>(runs), kThreads, 0, stream>>>(p);
    else
        rope_norm_grad_plain_kernel<float><<<static_cast<unsigned>(runs), kThreads, 0, stream>>>(p);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}
