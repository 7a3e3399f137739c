/* moe_product_simple.cu -- products over groups of rows, for any size, stride and alignment.
 *
 *   a block of 4 warps makes 64 x 64 of C, 32 of the depth at a time, from tiles in shared memory that are turned so
 *   that the depth is contiguous; float32: chains of 8 fused multiply-adds, then added up; bfloat16: mma.sync
 *
 * Slots of row blocks are counted so that each block finds its group without a list: group g begins at slot
 * offset[g] / 64 + g, which leaves at most one idle slot a group.
 *
 * Floor: 2 M N K flops, at 67 TFLOP/s in float32 and 990 in bfloat16; every element of a tile is loaded on its own, so
 * this kernel is bound by those loads. It is the row for sizes that others do not take; not timed.
 */
#include "mma.cuh"
#include "moe_job.h"

#include "moe_device.cuh"

namespace
{

constexpr int kTile = 64, kDepth = 32, kThreads = 128;
constexpr int kChain = 8; /* softmax makes a logit's absolute error a relative one: large logits ask for short chains */

/* One block's part: pointers of its operands' first rows, and how much of the tile is there. */
struct Part {
    int64_t a, b, c; /* elements from the tensors' starts */
    int64_t depth;
    int rows, columns; /* of C; rows 0: nothing to do */
};

__device__ int clamp_tile(int64_t n) { return static_cast<int>(n < 0 ? 0 : n < kTile ? n : kTile); }

__device__ Part part_of_rows(const MoeProduct &p, int64_t slot, int64_t column)
{
    int low = 0, high = p.groups - 1;
    while (low < high) { /* the last group that begins at or before the slot */
        const int middle = (low + high + 1) / 2;
        if (p.offset[middle] / kTile + middle <= slot)
            low = middle;
        else
            high = middle - 1;
    }
    const int64_t m = (slot - p.offset[low] / kTile - low) * kTile, row = p.offset[low] + m;
    Part part;
    part.rows = clamp_tile(p.offset[low + 1] - row);
    part.columns = clamp_tile(p.n - column);
    part.depth = p.k;
    part.a = row * p.lda;
    part.b = low * p.b_group + (p.kind == MOE_NT ? column * p.ldb : column);
    part.c = row * p.ldc + column;
    return part;
}

__device__ Part part_of_group(const MoeProduct &p, int64_t place, int64_t column)
{
    const int64_t tiles = (p.m + kTile - 1) / kTile, group = place / tiles, m = place % tiles * kTile;
    const int64_t row = p.offset[group];
    Part part;
    part.rows = clamp_tile(p.m - m);
    part.columns = clamp_tile(p.n - column);
    part.depth = p.offset[group + 1] - row;
    part.a = row * p.lda + m;
    part.b = row * p.ldb + column;
    part.c = group * p.c_group + m * p.ldc + column;
    return part;
}

template <typename T> constexpr int kRow = kDepth + (sizeof(T) == 4 ? 1 : 8); /* apart in banks */

/* 64 rows of 32 of the depth; kAlong: the depth is contiguous in memory. 0 where there is nothing. */
template <bool kAlong, typename T>
__device__ void load_tile(T (*to)[kRow<T>], const T *from, int64_t stride, int count, int64_t depth0, int64_t depth)
{
    T zero;
    rows::from_float(&zero, 0.0f);
#pragma unroll 8
    for (int i = threadIdx.x; i < kTile * kDepth; i += kThreads) {
        const int row = kAlong ? i / kDepth : i % kTile, k = kAlong ? i % kDepth : i / kTile;
        const int64_t at = kAlong ? row * stride + depth0 + k : (depth0 + k) * stride + row;
        to[row][k] = row < count && depth0 + k < depth ? from[at] : zero;
    }
}

/* Where sum i of a thread is in the tile. */
template <typename T> __device__ int row_of(int i)
{
    const int me = threadIdx.x, lane = me % 32, warp = me / 32;
    return sizeof(T) == 4 ? me / 16 + 8 * (i / 4) : warp / 2 * 32 + i / 16 * 16 + lane / 4 + i % 4 / 2 * 8;
}

template <typename T> __device__ int column_of(int i)
{
    const int me = threadIdx.x, lane = me % 32, warp = me / 32;
    return sizeof(T) == 4 ? me % 16 + 16 * (i % 4) : warp % 2 * 32 + i % 16 / 4 * 8 + lane % 4 * 2 + i % 2;
}

__device__ void multiply_chain(float (&chain)[32], const float (*a)[kRow<float>], const float (*b)[kRow<float>], int k0)
{
    for (int k = k0; k < k0 + kChain; k++) {
        float x[8], y[4];
#pragma unroll
        for (int i = 0; i < 8; i++)
            x[i] = a[threadIdx.x / 16 + 8 * i][k];
#pragma unroll
        for (int j = 0; j < 4; j++)
            y[j] = b[threadIdx.x % 16 + 16 * j][k];
#pragma unroll
        for (int i = 0; i < 32; i++)
            chain[i] = fmaf(x[i / 4], y[i % 4], chain[i]);
    }
}

__device__ void multiply(float (&sum)[32], const float (*a)[kRow<float>], const float (*b)[kRow<float>])
{
    for (int k = 0; k < kDepth; k += kChain) {
        float chain[32] = {};
        multiply_chain(chain, a, b, k);
#pragma unroll
        for (int i = 0; i < 32; i++)
            sum[i] += chain[i];
    }
}

using Bf16Row = __nv_bfloat16[kRow<__nv_bfloat16>];

__device__ uint32_t two(const Bf16Row &row, int k) { return *reinterpret_cast<const uint32_t *>(row + k); }

__device__ void multiply(float (&sum)[32], const Bf16Row *a, const Bf16Row *b)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4 * 2;
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
        uint32_t right[4][2];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const Bf16Row &row = b[warp % 2 * 32 + n * 8 + g];
            right[n][0] = two(row, k + c);
            right[n][1] = two(row, k + c + 8);
        }
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const Bf16Row &row = a[warp / 2 * 32 + m * 16 + g], &below = a[warp / 2 * 32 + m * 16 + g + 8];
            const uint32_t left[4] = {two(row, k + c), two(below, k + c), two(row, k + c + 8), two(below, k + c + 8)};
#pragma unroll
            for (int n = 0; n < 4; n++)
                ptx::mma_m16n8k16_bf16(reinterpret_cast<float (&)[4]>(sum[m * 16 + n * 4]), left, right[n]);
        }
    }
}

template <typename To> __device__ void put(To *to, float sum, bool add)
{
    rows::from_float(to, add ? rows::to_float(*to) + sum : sum);
}

template <typename T, typename To, MoeKind kKind>
__global__ void __launch_bounds__(kThreads) moe_product_kernel(const __grid_constant__ MoeProduct p)
{
    __shared__ T a[kTile][kRow<T>], b[kTile][kRow<T>];
    const int64_t columns = (p.n + kTile - 1) / kTile, place = blockIdx.x / columns;
    const int64_t column = blockIdx.x % columns * kTile;
    const Part part = kKind == MOE_TN ? part_of_group(p, place, column) : part_of_rows(p, place, column);
    if (part.rows == 0 || (kKind == MOE_TN && p.add && part.depth == 0))
        return;
    float sum[32] = {};
    for (int64_t k = 0; k < part.depth; k += kDepth) {
        load_tile<kKind != MOE_TN>(a, static_cast<const T *>(p.a) + part.a, p.lda, part.rows, k, part.depth);
        load_tile<kKind == MOE_NT>(b, static_cast<const T *>(p.b) + part.b, p.ldb, part.columns, k, part.depth);
        __syncthreads();
        multiply(sum, a, b);
        __syncthreads();
    }
    To *const to = static_cast<To *>(p.c) + part.c;
#pragma unroll
    for (int i = 0; i < 32; i++)
        if (row_of<T>(i) < part.rows && column_of<T>(i) < part.columns)
            put(to + row_of<T>(i) * p.ldc + column_of<T>(i), sum[i], kKind == MOE_TN && p.add);
}

template <typename T, typename To, MoeKind kKind> am_status launch(const MoeProduct *p, cudaStream_t stream)
{
    const int64_t columns = (p->n + kTile - 1) / kTile;
    const int64_t slots = kKind == MOE_TN ? (p->m + kTile - 1) / kTile * p->groups : p->rows / kTile + p->groups;
    if (columns == 0 || slots == 0 || p->groups == 0 || (kKind != MOE_TN && p->rows == 0))
        return AM_OK;
    AM_CHECK(columns * slots <= moe::kMostBlocks, AM_ERR_UNSUPPORTED,
             "moe: a product has %lld tiles, at most 2^31 - 1 are possible on CUDA", (long long)(columns * slots));
    moe_product_kernel<T, To, kKind><<<static_cast<unsigned>(columns * slots), kThreads, 0, stream>>>(*p);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

template <MoeKind kKind> am_status launch_by_dtype(const MoeProduct *p, cudaStream_t stream)
{
    if (p->dtype == AM_F32)
        return launch<float, float, kKind>(p, stream);
    if (p->to == AM_BF16)
        return launch<__nv_bfloat16, __nv_bfloat16, kKind>(p, stream);
    return launch<__nv_bfloat16, float, kKind>(p, stream);
}

} // namespace

am_status moe_product_simple(const MoeProduct *p, cudaStream_t stream)
{
    switch (p->kind) {
    case MOE_NT: AM_TRY(launch_by_dtype<MOE_NT>(p, stream)); break;
    case MOE_NN: AM_TRY(launch_by_dtype<MOE_NN>(p, stream)); break;
    default: AM_TRY(launch_by_dtype<MOE_TN>(p, stream)); break;
    }
    return p->gate ? moe_swiglu(p, stream) : AM_OK;
}
