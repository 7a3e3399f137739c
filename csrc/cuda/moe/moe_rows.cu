/* moe_rows.cu -- rows to their places and back, the gated activation and its gradient, for any size and alignment.
 *
 *   permute      a block takes a token: its row is read once and written to the k places of its pairs
 *   unpermute    a block takes a token: its k rows, weighted, are added in the order of choice, with one row more where
 *                the router has a part, and rounded once
 *   swiglu       act = silu(g) u of every row; rows behind the last become 0 in the products
 *   swiglu grad  a block takes a row: dact, g, u -> dg, du, the routing weight's gradient, act times that weight
 *
 * Floor: T H (1 + k) elements of traffic to permute, and back: 32K tokens of 3,072 bf16, k 8: 1.81 GB, 0.42 ms at
 * 4,277 GB/s; measured 0.48 and 0.42. swiglu grad moves 6 I elements a row: 262,144 rows of 1,024: 3.2 GB, 0.75 ms;
 * measured 0.87. With k 2 back at 0.75 of a copy, two words in flight a thread: now six, not timed.
 */
#include "moe_job.h"

#include "moe_device.cuh"

namespace
{

using moe::Word;

constexpr int kThreads = 128;
constexpr int kAhead = 3; /* words that a thread asks for together */

struct Permute {
    const char *from;
    int64_t from_row; /* bytes */
    char *to;
    const int *place;       /* null: rows stay where they are, and those of padding become 0 */
    const uint8_t *padding; /* may be null */
    int64_t padding_stride;
    int64_t words; /* of a row */
    int top_k;
};

template <typename W> __global__ void __launch_bounds__(kThreads) moe_permute_kernel(const __grid_constant__ Permute p)
{
    const int64_t token = blockIdx.x;
    const bool real = p.padding == nullptr || p.padding[token * p.padding_stride] == 0;
    if (!real && p.place != nullptr)
        return;
    const W *const from = reinterpret_cast<const W *>(p.from + token * p.from_row);
    W *const to = reinterpret_cast<W *>(p.to);
    for (int64_t at = threadIdx.x; at < p.words; at += kAhead * kThreads) {
        W word[kAhead] = {};
#pragma unroll
        for (int i = 0; i < kAhead; i++)
            if (real && at + i * kThreads < p.words)
                word[i] = from[at + i * kThreads];
        for (int j = 0; j < p.top_k; j++) {
            const int64_t row = p.place == nullptr ? token : p.place[token * p.top_k + j];
#pragma unroll
            for (int i = 0; i < kAhead; i++)
                if (row >= 0 && at + i * kThreads < p.words)
                    to[row * p.words + at + i * kThreads] = word[i];
        }
    }
}

struct Unpermute {
    const char *rows;
    const float *weights; /* [T, k]; null: 1 */
    const char *more;     /* [T, H] or null */
    char *to;
    const int *place;
    int64_t words;
    int top_k;
};

template <typename T, int kPer> __device__ void add(float (&sum)[kPer], const Word<T, kPer> &word, float weight)
{
    float value[kPer];
    word.get(value);
#pragma unroll
    for (int i = 0; i < kPer; i++)
        sum[i] = fmaf(weight, value[i], sum[i]);
}

/* kRows rows of kWords words are asked for together. */
template <typename T, int kPer, int kRows, int kWords>
__global__ void __launch_bounds__(kThreads) moe_unpermute_kernel(const __grid_constant__ Unpermute p)
{
    using W = Word<T, kPer>;
    const int64_t token = blockIdx.x;
    const W *const rows = reinterpret_cast<const W *>(p.rows);
    for (int64_t at = threadIdx.x; at < p.words; at += kWords * kThreads) {
        float sum[kWords][kPer] = {};
        for (int j0 = 0; j0 < p.top_k; j0 += kRows) {
            W word[kRows][kWords];
            float weight[kRows];
#pragma unroll
            for (int j = 0; j < kRows; j++) {
                const int64_t pair = token * p.top_k + j0 + j;
                const int64_t row = j0 + j < p.top_k ? p.place[pair] : -1;
                weight[j] = row < 0 ? 0.0f : p.weights == nullptr ? 1.0f : p.weights[pair];
#pragma unroll
                for (int w = 0; w < kWords; w++) {
                    const int64_t column = at + w * kThreads;
                    word[j][w] = row < 0 || column >= p.words ? W{} : rows[row * p.words + column];
                }
            }
#pragma unroll
            for (int j = 0; j < kRows; j++)
#pragma unroll
                for (int w = 0; w < kWords; w++)
                    add<T, kPer>(sum[w], word[j][w], weight[j]);
        }
#pragma unroll
        for (int w = 0; w < kWords; w++) {
            const int64_t column = token * p.words + at + w * kThreads;
            if (at + w * kThreads >= p.words)
                break;
            W word;
            if (p.more != nullptr)
                add<T, kPer>(sum[w], reinterpret_cast<const W *>(p.more)[column], 1.0f);
            word.set(sum[w]);
            reinterpret_cast<W *>(p.to)[column] = word;
        }
    }
}

struct Gate {
    const char *products; /* [rows, 2I] */
    char *clear;          /* the same where rows behind the last are to become 0 */
    char *act;            /* [rows, I]; of the gradient: dact in, weighted activation out */
    char *dproducts;      /* [rows, 2I] */
    const float *weights;
    float *dweights;  /* may be null */
    const int *total; /* rows */
    const int *pair;
    int64_t words, rows; /* of I; at most */
};

template <typename T, int kPer>
__global__ void __launch_bounds__(kThreads) moe_swiglu_kernel(const __grid_constant__ Gate p)
{
    using W = Word<T, kPer>;
    const int64_t total = *p.total;
    const W *const products = reinterpret_cast<const W *>(p.products);
    for (int64_t row = blockIdx.x; row < total; row += gridDim.x)
        for (int64_t at = threadIdx.x; at < p.words; at += kThreads) {
            float gate[kPer], up[kPer];
            products[row * 2 * p.words + at].get(gate);
            products[(row * 2 + 1) * p.words + at].get(up);
#pragma unroll
            for (int i = 0; i < kPer; i++)
                gate[i] = gate[i] * moe::sigmoid<T>(gate[i]) * up[i];
            W word;
            word.set(gate);
            reinterpret_cast<W *>(p.act)[row * p.words + at] = word;
        }
}

template <typename W> __global__ void __launch_bounds__(kThreads) moe_clear_kernel(const __grid_constant__ Gate p)
{
    for (int64_t row = *p.total + blockIdx.x; row < p.rows; row += gridDim.x)
        for (int64_t at = threadIdx.x; at < 2 * p.words; at += kThreads)
            reinterpret_cast<W *>(p.clear)[row * 2 * p.words + at] = W{};
}

template <typename T, int kPer>
__global__ void __launch_bounds__(kThreads) moe_swiglu_grad_kernel(const __grid_constant__ Gate p)
{
    using W = Word<T, kPer>;
    const int64_t total = *p.total;
    const W *const products = reinterpret_cast<const W *>(p.products);
    W *const acts = reinterpret_cast<W *>(p.act), *const dproducts = reinterpret_cast<W *>(p.dproducts);
    for (int64_t row = blockIdx.x; row < total; row += gridDim.x) {
        const int pair = p.pair[row];
        const float weight = p.weights[pair];
        float sum = 0.0f;
        for (int64_t at = threadIdx.x; at < p.words; at += kThreads) {
            float gate[kPer], up[kPer], dact[kPer];
            products[row * 2 * p.words + at].get(gate);
            products[(row * 2 + 1) * p.words + at].get(up);
            acts[row * p.words + at].get(dact);
#pragma unroll
            for (int i = 0; i < kPer; i++) {
                const float sigma = moe::sigmoid<T>(gate[i]), silu = gate[i] * sigma, act = silu * up[i];
                const float d = weight * dact[i];
                sum = fmaf(dact[i], act, sum);
                dact[i] = weight * act;
                gate[i] = d * up[i] * (sigma + silu * (1.0f - sigma));
                up[i] = d * silu;
            }
            W word;
            word.set(dact);
            acts[row * p.words + at] = word;
            word.set(gate);
            dproducts[row * 2 * p.words + at] = word;
            word.set(up);
            dproducts[(row * 2 + 1) * p.words + at] = word;
        }
        sum = moe::block_sum<kThreads>(sum);
        if (threadIdx.x == 0 && p.dweights != nullptr)
            p.dweights[pair] = sum;
    }
}

/* The splits' parts of the router's gradient, in order. */
template <typename T>
__global__ void __launch_bounds__(kThreads) moe_add_parts_kernel(T *to, const float *parts, int64_t n, int splits)
{
    const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (at >= n)
        return;
    float sum = 0.0f;
    for (int i = 0; i < splits; i++)
        sum += parts[i * n + at];
    rows::from_float(to + at, sum);
}

unsigned few(int64_t blocks)
{
    constexpr int64_t kMost = 132 * 16;
    return static_cast<unsigned>(blocks < kMost ? blocks : kMost);
}

template <typename T, int kPer> am_status unpermute(Unpermute p, int64_t tokens, cudaStream_t stream)
{
    const unsigned blocks = static_cast<unsigned>(tokens);
    if (p.top_k > 2)
        moe_unpermute_kernel<T, kPer, 8, 1><<<blocks, kThreads, 0, stream>>>(p);
    else
        moe_unpermute_kernel<T, kPer, 2, 3><<<blocks, kThreads, 0, stream>>>(p);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

template <typename T, int kPer> am_status swiglu(const Gate &p, cudaStream_t stream)
{
    moe_swiglu_kernel<T, kPer><<<few(p.rows), kThreads, 0, stream>>>(p);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

template <typename T, int kPer> am_status swiglu_grad(const Gate &p, cudaStream_t stream)
{
    moe_swiglu_grad_kernel<T, kPer><<<few(p.rows), kThreads, 0, stream>>>(p);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

/* Calls f<T, words of 16 bytes or elements> of the arguments, setting p.words. */
#define BY_LAYOUT(f, dtype, wide, n, p, ...)                                                                           \
    do {                                                                                                               \
        const bool wide_ = (wide);                                                                                     \
        (p).words = wide_ ? (n) * static_cast<int64_t>(am_dtype_size(dtype)) / 16 : (n);                               \
        if ((dtype) == AM_BF16)                                                                                        \
            return wide_ ? f<__nv_bfloat16, 8>((p), __VA_ARGS__) : f<__nv_bfloat16, 1>((p), __VA_ARGS__);              \
        return wide_ ? f<float, 4>((p), __VA_ARGS__) : f<float, 1>((p), __VA_ARGS__);                                  \
    } while (0)

am_status permute(const MoeJob &job, Permute p, const am_tensor &from, cudaStream_t stream)
{
    const int64_t n = job.hidden, size = static_cast<int64_t>(am_dtype_size(from.dtype));
    if (job.tokens == 0 || n == 0)
        return AM_OK;
    const bool wide = n * size % 16 == 0 && moe::aligned(from.data, from.stride[0], from.dtype);
    const unsigned blocks = static_cast<unsigned>(job.tokens);
    p.from = static_cast<const char *>(from.data);
    p.from_row = from.stride[0] * size;
    p.words = wide ? n * size / 16 : n;
    if (job.a->padding.dtype != AM_NONE) {
        p.padding = static_cast<const uint8_t *>(job.a->padding.data);
        p.padding_stride = job.a->padding.stride[0];
    }
    if (wide)
        moe_permute_kernel<uint4><<<blocks, kThreads, 0, stream>>>(p);
    else if (size == 2)
        moe_permute_kernel<unsigned short><<<blocks, kThreads, 0, stream>>>(p);
    else
        moe_permute_kernel<unsigned><<<blocks, kThreads, 0, stream>>>(p);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

} // namespace

am_status moe_permute(const MoeJob &job, const am_tensor &from, char *to, cudaStream_t stream)
{
    Permute p = {};
    p.to = to;
    p.place = job.place;
    p.top_k = static_cast<int>(job.top_k);
    return permute(job, p, from, stream);
}

am_status moe_without_padding(const MoeJob &job, const am_tensor &from, char *to, cudaStream_t stream)
{
    Permute p = {};
    p.to = to;
    p.top_k = 1;
    return permute(job, p, from, stream);
}

am_status moe_unpermute(const MoeJob &job, const char *rows, const float *weights, const char *more,
                        const am_tensor &to, cudaStream_t stream)
{
    if (job.tokens == 0 || job.hidden == 0)
        return AM_OK;
    Unpermute p = {};
    p.rows = rows;
    p.weights = weights;
    p.more = more;
    p.to = static_cast<char *>(to.data);
    p.place = job.place;
    p.top_k = rows == nullptr ? 0 : static_cast<int>(job.top_k);
    BY_LAYOUT(unpermute, to.dtype, moe::aligned(to.data, job.hidden, to.dtype), job.hidden, p, job.tokens, stream);
}

am_status moe_clear_products(const MoeJob &job, cudaStream_t stream)
{
    Gate p = {};
    p.clear = static_cast<char *>(job.a->products.data);
    p.total = job.offset + job.experts;
    p.words = job.inner;
    p.rows = job.pairs;
    if (job.pairs == 0 || job.inner == 0)
        return AM_OK;
    if (job.a->products.dtype == AM_BF16)
        moe_clear_kernel<unsigned short><<<few(p.rows), kThreads, 0, stream>>>(p);
    else
        moe_clear_kernel<unsigned><<<few(p.rows), kThreads, 0, stream>>>(p);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

am_status moe_swiglu(const MoeProduct *product, cudaStream_t stream)
{
    const int64_t inner = product->n / 2;
    if (product->rows == 0 || inner == 0)
        return AM_OK;
    Gate p = {};
    p.products = static_cast<const char *>(product->c);
    p.act = static_cast<char *>(product->act);
    p.total = product->offset + product->groups;
    p.rows = product->rows;
    BY_LAYOUT(swiglu, product->dtype, moe::aligned(product->c, inner, product->dtype), inner, p, stream);
}

am_status moe_swiglu_grad(const MoeJob &job, float *dweights, cudaStream_t stream)
{
    if (job.pairs == 0 || job.inner == 0)
        return AM_OK;
    const am_tensor &products = job.a->products;
    Gate p = {};
    p.products = static_cast<const char *>(products.data);
    p.act = job.act;
    p.dproducts = job.dproducts;
    p.weights = static_cast<const float *>(job.a->weights.data);
    p.dweights = dweights;
    p.total = job.offset + job.experts;
    p.pair = job.pair;
    p.rows = job.pairs;
    BY_LAYOUT(swiglu_grad, products.dtype, moe::aligned(products.data, job.inner, products.dtype), job.inner, p,
              stream);
}

am_status moe_add_parts(const MoeJob &job, cudaStream_t stream)
{
    const int64_t n = job.experts * job.hidden;
    const am_tensor &to = job.a->drouter;
    const unsigned blocks = static_cast<unsigned>((n + kThreads - 1) / kThreads);
    if (n == 0)
        return AM_OK;
    if (to.dtype == AM_BF16)
        moe_add_parts_kernel<<<blocks, kThreads, 0, stream>>>(static_cast<__nv_bfloat16 *>(to.data), job.parts, n,
                                                              job.splits);
    else
        moe_add_parts_kernel<<<blocks, kThreads, 0, stream>>>(static_cast<float *>(to.data), job.parts, n, job.splits);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}
