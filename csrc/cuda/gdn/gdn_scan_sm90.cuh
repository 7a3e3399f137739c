/* gdn_scan_sm90.cuh -- what the Hopper kernels share that walk through a document's chunks with a head's state in
 * registers: a pair of blocks has a document and head, a block 64 of the values, S^T [64, 128] in one warpgroup.
 */
#ifndef GDN_SCAN_SM90_CUH
#define GDN_SCAN_SM90_CUH

#include "gdn_sm90.cuh"

namespace gdn_sm90
{

using gdn::State;

constexpr int kStages = 2, kThreads = 256, kLoadRegs = 24, kMathRegs = 232, kPair = 2;
constexpr uint16_t kBoth = 3; /* blocks of a pair */

enum Barrier { kMath = 1 }; /* named barriers; 0 is __syncthreads' */

struct Work {
    int64_t doc, start, chunks;
    int64_t end;
    int head, key_head, half;
};

/* A warp's word that it is done with a place, to both blocks. */
__device__ __forceinline__ void release(uint64_t *empty)
{
    __syncwarp();
    if (threadIdx.x % 32 < kPair)
        ptx::mbarrier_arrive_at(empty, threadIdx.x % 32);
}

/* Element i of a thread's 64 sums of the state: its value and key. */
template <class Each> __device__ __forceinline__ void each_of_state(float (&state)[64], const Work &w, const Each &each)
{
    const int me = static_cast<int>(threadIdx.x % 128), lane = me % 32;
    const int value = 64 * w.half + me / 32 * 16 + lane / 4, key = lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 64; i++)
        each(state[i], key + i / 4 * 8 + i % 2, value + i / 2 % 2 * 8);
}

__device__ __forceinline__ void load_state(float (&state)[64], const Work &w, const State &from)
{
    each_of_state(state, w, [&](float &x, int key, int value) {
        x = from.data == nullptr ? 0.0f : from.data[key * from.row + value];
    });
}

__device__ __forceinline__ void store_state(float (&state)[64], const Work &w, const State &to)
{
    each_of_state(state, w, [&](float x, int key, int value) { to.data[key * to.row + value] = x; });
}

/* Where a lane's row of four 8 x 8 blocks of a tile of 64 values is: tokens 8 j to 8 j + 15, the warp's 16 values. */
__device__ __forceinline__ char *blocks_of(char *tile, int j)
{
    const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32 % 4);
    return piece_of(tile, 8 * (j + lane / 16) + lane % 8, 2 * warp + lane / 8 % 2);
}

/* x = v^T - x exp(c) / |k|. */
__device__ __forceinline__ void subtract_known(float (&x)[32], char *v, const float4 *numbers)
{
    const int column = static_cast<int>(threadIdx.x % 4) * 2;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        uint32_t words[4];
        ptx::ldmatrix_x4_trans(words, blocks_of(v, j));
#pragma unroll
        for (int m = 0; m < 4; m++) {
            const int at = 8 * (j + m / 2) + column, i = 4 * (j + m / 2) + m % 2 * 2;
            x[i] = fmaf(-numbers[at].x, x[i], __uint_as_float(words[m] << 16));
            x[i + 1] = fmaf(-numbers[at + 1].x, x[i + 1], __uint_as_float(words[m] & 0xffff0000u));
        }
    }
}

/* V' exp(c_last - c) / |k| as the left operand. */
__device__ __forceinline__ void pack_decayed(uint32_t (&to)[4][4], float (&x)[32], const float4 *numbers)
{
    const int column = static_cast<int>(threadIdx.x % 4) * 2;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float low = numbers[8 * j + column].y, high = numbers[8 * j + column + 1].y;
        x[4 * j] *= low;
        x[4 * j + 1] *= high;
        x[4 * j + 2] *= low;
        x[4 * j + 3] *= high;
    }
    pack(to, x);
}

/* 64 values of a head's row in [tokens, heads, 128]. */
__device__ __forceinline__ __nv_bfloat16 *rows_of(const gdn::View &v, const Work &w, int64_t token)
{
    return static_cast<__nv_bfloat16 *>(v.data) + token * v.token + w.head * v.head + 64 * w.half;
}

/* Packed sums of 64 values and tokens, turned through the tile, to their tokens' rows: a warp has 32 bytes of each. The
 * fence goes before the stores, which it would wait for. */
__device__ __forceinline__ void store_rows(__nv_bfloat16 *to, int64_t step, const uint32_t (&x)[4][4], char *tile,
                                           int n)
{
#pragma unroll
    for (int j = 0; j < 4; j++)
        ptx::stmatrix_x4_trans(blocks_of(tile, 2 * j), x[j]);
    __syncwarp();
    const int lane = static_cast<int>(threadIdx.x % 32), row = lane % 16;
    const int piece = static_cast<int>(threadIdx.x / 32 % 4) * 2 + lane / 16;
    uint4 words[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        words[i] = *reinterpret_cast<const uint4 *>(piece_of(tile, row, piece) + i * 16 * 128);
    ptx::fence_proxy_async();
    to += row * step + 8 * piece;
    if (n == kChunk) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            __stwb(reinterpret_cast<uint4 *>(to + 16 * i * step), words[i]);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (row + 16 * i < n)
            __stwb(reinterpret_cast<uint4 *>(to + 16 * i * step), words[i]);
}

/* What lies behind the document counts nothing: zeros in rows from n on of a tile, and of numbers. */
__device__ __forceinline__ void clear_tail(char *tile, int n)
{
    for (int i = n * 8 + static_cast<int>(threadIdx.x % 128); i < kChunk * 8; i += 128)
        *reinterpret_cast<uint4 *>(tile + i * 16) = uint4{};
}

__device__ __forceinline__ void clear_tail(float4 *numbers, int n)
{
    for (int i = n + static_cast<int>(threadIdx.x % 128); i < kChunk; i += 128)
        numbers[i] = float4{};
}

__device__ __forceinline__ void end_clearing()
{
    ptx::fence_proxy_async();
    ptx::bar_sync(kMath, 128);
}

/* The state before a chunk, as packed for its product, in bfloat16 [128 values, 128 keys]. */
__device__ __forceinline__ void store_packed(const uint32_t (&state)[8][4], const Work &w, __nv_bfloat16 *to)
{
    const int me = static_cast<int>(threadIdx.x % 128), lane = me % 32;
    to += (64 * w.half + me / 32 * 16 + lane / 4) * kDim + lane % 4 * 8;
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int m = 0; m < 4; m++)
            __stwb(reinterpret_cast<uint4 *>(to + 8 * r * kDim + 32 * m),
                   turn(state[2 * m][r], state[2 * m][2 + r], state[2 * m + 1][r], state[2 * m + 1][2 + r]));
}

} // namespace gdn_sm90

#endif
