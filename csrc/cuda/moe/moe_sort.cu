/* moe_sort.cu -- chosen pairs by expert, then token, without the host: counts of (block of 128 tokens, expert), their
 * sums, places.
 *
 * A block holds, for every expert, a bit a token: a pair's rank in its block is the number of bits below its own, so
 * the order needs no atomics that race. Pairs whose choice is no expert have no row. Reads and writes 20 bytes a pair
 * and 8 bytes an expert and block: a few microseconds.
 */
#include "moe_job.h"

#include "moe_device.cuh"

namespace
{

constexpr int kThreads = 256, kWords = kMoeTokens / 32;
constexpr int kWindow = 2048; /* experts whose bits are held at one time */
constexpr int kSegments = 32; /* of blocks, summed side by side */

struct Sort {
    const int *chosen;
    const uint8_t *padding; /* may be null */
    int64_t padding_stride, tokens;
    int experts, top_k, blocks;
    int *counts, *offset, *by_size, *token, *pair, *place;
};

/* The expert of a pair, -1 for none. */
__device__ int expert_of(const Sort &s, int64_t pair)
{
    const int e = s.chosen[pair];
    if (e < 0 || e >= s.experts)
        return -1;
    return s.padding != nullptr && s.padding[pair / s.top_k * s.padding_stride] != 0 ? -1 : e;
}

/* Bits of the block's tokens for experts [first, first + kWindow). */
__device__ void set_bits(const Sort &s, uint32_t (*bits)[kWords], int first)
{
    const int64_t token0 = static_cast<int64_t>(blockIdx.x) * kMoeTokens;
    const int64_t tokens = s.tokens - token0 < kMoeTokens ? s.tokens - token0 : kMoeTokens;
    const int n = s.experts - first < kWindow ? s.experts - first : kWindow;
    __syncthreads();
    for (int i = threadIdx.x; i < n * kWords; i += kThreads)
        bits[i / kWords][i % kWords] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < tokens * s.top_k; i += kThreads) {
        const int e = expert_of(s, token0 * s.top_k + i) - first, t = i / s.top_k;
        if (e >= 0 && e < kWindow)
            atomicOr(&bits[e][t / 32], 1u << t % 32);
    }
    __syncthreads();
}

__global__ void __launch_bounds__(kThreads) moe_count_kernel(const __grid_constant__ Sort s)
{
    __shared__ uint32_t bits[kWindow][kWords];
    for (int first = 0; first < s.experts; first += kWindow) {
        set_bits(s, bits, first);
        for (int e = threadIdx.x; e < kWindow && first + e < s.experts; e += kThreads) {
            int n = 0;
            for (int i = 0; i < kWords; i++)
                n += __popc(bits[e][i]);
            s.counts[static_cast<int64_t>(blockIdx.x) * s.experts + first + e] = n;
        }
    }
}

/* Counts of 32 experts become the rows before each block; an expert's rows go to offset[expert + 1]. */
__global__ void __launch_bounds__(32 * kSegments) moe_prefix_kernel(const __grid_constant__ Sort s)
{
    __shared__ int sums[kSegments][33];
    const int lane = threadIdx.x % 32, segment = threadIdx.x / 32, e = blockIdx.x * 32 + lane;
    const int length = (s.blocks + kSegments - 1) / kSegments, first = segment * length;
    const int last = first + length < s.blocks ? first + length : s.blocks;
    int total = 0;
    if (e < s.experts)
        for (int b = first; b < last; b++)
            total += s.counts[static_cast<int64_t>(b) * s.experts + e];
    sums[segment][lane] = total;
    __syncthreads();
    int before = 0;
    for (int i = 0; i < segment; i++)
        before += sums[i][lane];
    if (e >= s.experts)
        return;
    for (int b = first; b < last; b++) {
        int *const at = s.counts + static_cast<int64_t>(b) * s.experts + e;
        const int n = *at;
        *at = before;
        before += n;
    }
    if (segment == kSegments - 1)
        s.offset[e + 1] = before;
}

/* One block: offsets, experts by size, load, real_rows. load and real_rows may be null. */
__global__ void __launch_bounds__(1024) moe_offset_kernel(const __grid_constant__ Sort s, int64_t *load, int64_t *real)
{
    __shared__ int sums[1024];
    const int me = threadIdx.x, length = (s.experts + 1023) / 1024, first = me * length;
    const int last = first + length < s.experts ? first + length : s.experts;
    int total = 0;
    for (int e = first; e < last; e++)
        total += s.offset[e + 1];
    sums[me] = total;
    __syncthreads();
    for (int far = 1; far < 1024; far *= 2) {
        const int before = me >= far ? sums[me - far] : 0;
        __syncthreads();
        sums[me] += before;
        __syncthreads();
    }
    if (me == 1023 && real != nullptr)
        *real = sums[me] / s.top_k;
    for (int e = first; e < last; e++) {
        const int n = s.offset[e + 1];
        int rank = 0;
        for (int other = 0; other < s.experts && s.by_size != nullptr; other++) {
            const int size = s.offset[other + 1];
            rank += size > n || (size == n && other < e);
        }
        if (s.by_size != nullptr)
            s.by_size[rank] = e;
        if (load != nullptr)
            load[e] = n;
    }
    __syncthreads();
    int at = sums[me] - total;
    for (int e = first; e < last; e++) {
        at += s.offset[e + 1];
        s.offset[e + 1] = at;
    }
    if (me == 0)
        s.offset[0] = 0;
}

__global__ void __launch_bounds__(kThreads) moe_place_kernel(const __grid_constant__ Sort s)
{
    __shared__ uint32_t bits[kWindow][kWords];
    const int64_t token0 = static_cast<int64_t>(blockIdx.x) * kMoeTokens;
    const int64_t tokens = s.tokens - token0 < kMoeTokens ? s.tokens - token0 : kMoeTokens;
    for (int first = 0; first < s.experts; first += kWindow) {
        set_bits(s, bits, first);
        for (int i = threadIdx.x; i < tokens * s.top_k; i += kThreads) {
            const int64_t pair = token0 * s.top_k + i;
            const int e = expert_of(s, pair), t = i / s.top_k;
            if (e < 0 && first == 0)
                s.place[pair] = -1;
            if (e < first || e >= first + kWindow)
                continue;
            int row = s.offset[e] + s.counts[static_cast<int64_t>(blockIdx.x) * s.experts + e];
            for (int w = 0; w < t / 32; w++)
                row += __popc(bits[e - first][w]);
            row += __popc(bits[e - first][t / 32] & ((1u << t % 32) - 1));
            s.place[pair] = row;
            s.token[row] = static_cast<int>(token0 + t);
            s.pair[row] = static_cast<int>(pair);
        }
    }
}

__global__ void moe_groups_kernel(int *whole, int *split, int *order, unsigned long long *next, int tokens, int splits)
{
    const int i = threadIdx.x;
    if (i < kMoeNext)
        next[i] = 0;
    if (i < 2)
        whole[i] = i * tokens;
    if (i <= splits)
        split[i] = static_cast<int>(static_cast<int64_t>(tokens) * i / splits);
    if (i < splits)
        order[i] = i;
}

} // namespace

am_status moe_sort_rows(const MoeJob &job, bool counts_wanted, cudaStream_t stream)
{
    const am_moe_args *const a = job.a;
    Sort s = {};
    s.chosen = static_cast<const int *>(a->chosen.data);
    if (a->padding.dtype != AM_NONE) {
        s.padding = static_cast<const uint8_t *>(a->padding.data);
        s.padding_stride = a->padding.stride[0];
    }
    s.tokens = job.tokens;
    s.experts = static_cast<int>(job.experts);
    s.top_k = static_cast<int>(job.top_k);
    s.blocks = job.blocks;
    s.counts = job.counts;
    s.offset = job.offset;
    s.by_size = job.by_size;
    s.token = job.token;
    s.pair = job.pair;
    s.place = job.place;
    if (job.blocks > 0) {
        moe_count_kernel<<<job.blocks, kThreads, 0, stream>>>(s);
        AM_CUDA_LAUNCHED();
    }
    if (job.experts > 0) {
        moe_prefix_kernel<<<static_cast<unsigned>((job.experts + 31) / 32), 32 * kSegments, 0, stream>>>(s);
        AM_CUDA_LAUNCHED();
    }
    moe_offset_kernel<<<1, 1024, 0, stream>>>(s, counts_wanted ? static_cast<int64_t *>(a->load.data) : nullptr,
                                              counts_wanted ? static_cast<int64_t *>(a->real_rows.data) : nullptr);
    AM_CUDA_LAUNCHED();
    if (job.blocks > 0) {
        moe_place_kernel<<<job.blocks, kThreads, 0, stream>>>(s);
        AM_CUDA_LAUNCHED();
    }
    return AM_OK;
}

am_status moe_groups(const MoeJob &job, cudaStream_t stream)
{
    moe_groups_kernel<<<1, 64, 0, stream>>>(job.whole, job.split, job.order, job.next, static_cast<int>(job.tokens),
                                            job.splits);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}
