/* attention_sm90.cuh -- what the Hopper kernels of both passes share: rings of stages, matrix descriptors, the products
 * of an element type, rows out of registers.
 */
#ifndef ATTENTION_SM90_CUH
#define ATTENTION_SM90_CUH

#include "attention_rows.h"
#include "on_device.h"
#include "ptx_sm90.cuh"
#include "tensor_map.h"
#include "wgmma_sm90.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace attention_sm90
{

template <int kStages> struct Ring {
    int slot = 0;
    uint32_t phase = 0;
    __device__ void advance()
    {
        if (++slot == kStages) {
            slot = 0;
            phase ^= 1;
        }
    }
};

/* The next place in the list of work, of which the launch took the first `started`. Taken when a tile's last
 * copies are due, not before: a block that has a long tile must not hold another one. */
__device__ __forceinline__ uint32_t next_place(int64_t *next, uint32_t started = gridDim.x)
{
    return started + static_cast<uint32_t>(atomicAdd(reinterpret_cast<unsigned long long *>(next), 1ull));
}

/* What the loading thread tells the others of a tile. */
struct Work {
    int token0;      /* in the tensors */
    int tokens;      /* from token0 to the document's end */
    int head0;       /* first query head */
    int nk;          /* keys of the document */
    int first_limit; /* keys that token0 sees, may be negative; the next token one more */
    int blocks;      /* of keys; -1: no more tiles */
};

/* Which tile of kM rows a place in the list of work is, and the blocks of kN keys that it sees; the last rows of a
 * document, which see most keys, come first. `a` has docs, first, key_heads, group_shift and causal. */
template <int kM, int kN, class Args>
__device__ Work work_at(const Args &a, uint32_t place, int *key_row, int *key_head)
{
    const AttentionTile<uint32_t> t = attention_tile(a.docs, a.first, a.key_heads, place);
    const int tokens = kM >> a.group_shift;
    const int64_t i0 = (t.tiles - 1 - static_cast<int64_t>(t.index)) * tokens;
    const int64_t last = i0 + tokens < t.nq ? i0 + tokens : t.nq;
    const int64_t keys = attention_limit(t, a.causal, last - 1);
    Work w;
    *key_row = static_cast<int>(t.k0);
    *key_head = static_cast<int>(t.head);
    w.token0 = static_cast<int>(t.q0 + i0);
    w.tokens = static_cast<int>(t.nq - i0);
    w.head0 = *key_head << a.group_shift;
    w.nk = static_cast<int>(t.nk);
    w.first_limit = static_cast<int>(a.causal ? i0 + 1 + t.nk - t.nq : t.nk);
    w.blocks = static_cast<int>((keys + kN - 1) / kN);
    return w;
}

/* Keys that a row of the tile sees. */
template <class Args> __device__ __forceinline__ int limit_of(const Args &a, const Work &w, int row)
{
    const int limit = w.first_limit + (a.causal ? row >> a.group_shift : 0);
    return limit < w.nk ? limit : w.nk;
}

/* x of lane 0, which all lanes hold: the compiler may then keep it, and sums with it, in uniform registers. */
template <class X> __device__ __forceinline__ X uniform(X x) { return __shfl_sync(0xffffffffu, x, 0); }

/* A matrix descriptor is an address, strides between boxes and between groups of 8 rows (1,024 bytes), and the 128-byte
 * swizzle. The low word holds the first two: steps through a tile are added to it. */
__device__ __forceinline__ uint32_t descriptor_low(const void *p, uint32_t box_bytes)
{
    return (ptx::smem_address(p) & 0x3ffff) >> 4 | (box_bytes >> 4) << 16;
}

__device__ __forceinline__ uint64_t descriptor(uint32_t low) { return 0x40000040ull << 32 | low; }

template <class E> struct Element;

template <> struct Element<__nv_bfloat16> {
    __device__ static uint32_t pack(float low, float high)
    {
        const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
        return *reinterpret_cast<const uint32_t *>(&both);
    }
    __device__ static void scores(float (&d)[32], uint64_t a, uint64_t b, bool keep)
    {
        ptx::wgmma_m64n64k16_bf16_ss(d, a, b, keep);
    }
    __device__ static void scores(float (&d)[40], uint64_t a, uint64_t b, bool keep)
    {
        ptx::wgmma_m64n80k16_bf16_ss(d, a, b, keep);
    }
    __device__ static void scores(float (&d)[64], uint64_t a, uint64_t b, bool keep)
    {
        ptx::wgmma_m64n128k16_bf16_ss(d, a, b, keep);
    }
    __device__ static void weigh(float (&d)[128], const uint32_t (&a)[4], uint64_t b, bool keep = true)
    {
        ptx::wgmma_m64n256k16_bf16_rs(d, a, b, keep);
    }
    __device__ static void weigh(float (&d)[64], const uint32_t (&a)[4], uint64_t b, bool keep = true)
    {
        ptx::wgmma_m64n128k16_bf16_rs(d, a, b, keep);
    }
    __device__ static void weigh(float (&d)[32], const uint32_t (&a)[4], uint64_t b, bool keep = true)
    {
        ptx::wgmma_m64n64k16_bf16_rs(d, a, b, keep);
    }
    __device__ static void weigh(float (&d)[40], const uint32_t (&a)[4], uint64_t b, bool keep = true)
    {
        ptx::wgmma_m64n80k16_bf16_rs(d, a, b, keep);
    }
    __device__ static void weigh(float (&d)[36], const uint32_t (&a)[4], uint64_t b, bool keep)
    {
        ptx::wgmma_m64n72k16_bf16_rs(d, a, b, keep);
    }
};

template <> struct Element<__half> {
    __device__ static uint32_t pack(float low, float high)
    {
        const __half2 both = __floats2half2_rn(low, high);
        return *reinterpret_cast<const uint32_t *>(&both);
    }
    __device__ static void scores(float (&d)[32], uint64_t a, uint64_t b, bool keep)
    {
        ptx::wgmma_m64n64k16_f16_ss(d, a, b, keep);
    }
    __device__ static void scores(float (&d)[40], uint64_t a, uint64_t b, bool keep)
    {
        ptx::wgmma_m64n80k16_f16_ss(d, a, b, keep);
    }
    __device__ static void scores(float (&d)[64], uint64_t a, uint64_t b, bool keep)
    {
        ptx::wgmma_m64n128k16_f16_ss(d, a, b, keep);
    }
    __device__ static void weigh(float (&d)[128], const uint32_t (&a)[4], uint64_t b, bool keep = true)
    {
        ptx::wgmma_m64n256k16_f16_rs(d, a, b, keep);
    }
    __device__ static void weigh(float (&d)[64], const uint32_t (&a)[4], uint64_t b, bool keep = true)
    {
        ptx::wgmma_m64n128k16_f16_rs(d, a, b, keep);
    }
    __device__ static void weigh(float (&d)[32], const uint32_t (&a)[4], uint64_t b, bool keep = true)
    {
        ptx::wgmma_m64n64k16_f16_rs(d, a, b, keep);
    }
    __device__ static void weigh(float (&d)[40], const uint32_t (&a)[4], uint64_t b, bool keep = true)
    {
        ptx::wgmma_m64n80k16_f16_rs(d, a, b, keep);
    }
};

/* Four words of each of a quad's lanes, turned: lane c gets everyone's word c. */
__device__ __forceinline__ uint4 turn(uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3)
{
    const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
    const uint32_t x = __shfl_xor_sync(0xffffffffu, odd ? a0 : a1, 1);
    const uint32_t y = __shfl_xor_sync(0xffffffffu, odd ? a2 : a3, 1);
    a0 = odd ? x : a0;
    a1 = odd ? a1 : x;
    a2 = odd ? y : a2;
    a3 = odd ? a3 : y;
    const uint32_t z = __shfl_xor_sync(0xffffffffu, upper ? a0 : a2, 2);
    const uint32_t w = __shfl_xor_sync(0xffffffffu, upper ? a1 : a3, 2);
    return upper ? make_uint4(z, w, a2, a3) : make_uint4(a0, a1, z, w);
}

/* S = A B^T of 64 rows of A; K-major operands of kRowsA and kRowsB rows a box: 16 elements on are 32 bytes on, 64 are a
 * box on. */
template <class E, int kD, int kRowsA, int kRowsB, int kCount>
__device__ __forceinline__ void issue_scores(float (&sc)[kCount], uint32_t a, uint32_t b)
{
#pragma unroll
    for (int d = 0; d < kD / 16; d++)
        Element<E>::scores(sc, descriptor(a + (d / 4) * (kRowsA * 128 >> 4) + (d % 4) * 2),
                           descriptor(b + (d / 4) * (kRowsB * 128 >> 4) + (d % 4) * 2), d != 0);
    ptx::wgmma_commit_group();
}

/* O = keep O + P B: 16 rows of B on are 2,048 bytes on. */
template <class E, int kCount, int kSteps>
__device__ __forceinline__ void issue_weigh(float (&o)[kCount], const uint32_t (&p)[kSteps][4], uint32_t b,
                                            bool keep = true)
{
#pragma unroll
    for (int j = 0; j < kSteps; j++)
        Element<E>::weigh(o, p[j], descriptor(b + j * (2048 >> 4)), j != 0 || keep);
    ptx::wgmma_commit_group();
}

/* Sums of 64 rows as the left operand of the next product. */
template <class E, int kSteps>
__device__ __forceinline__ void pack(uint32_t (&p)[kSteps][4], const float (&sc)[8 * kSteps])
{
#pragma unroll
    for (int j = 0; j < kSteps; j++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            p[j][i] = Element<E>::pack(sc[8 * j + 2 * i], sc[8 * j + 2 * i + 1]);
}

/* Zeros in rows [from, kRows) of a tile in shared memory, by the math threads: 0 times a neighbour's NaN is NaN. */
template <int kRows, int kBoxes, int kThreads = 256> __device__ void clear_rows(char *tile, int from)
{
    const int me = static_cast<int>(threadIdx.x) - 128;
    for (int i = me; i < (kRows - from) * kBoxes * 8; i += kThreads) {
        const int box = i % kBoxes, piece = i / kBoxes % 8, row = from + i / (8 * kBoxes);
        *reinterpret_cast<uint4 *>(tile + box * kRows * 128 + row * 128 + piece * 16) = make_uint4(0, 0, 0, 0);
    }
}

/* Row r of the thread's two (8 apart) times `factor`, in 16-byte stores of its first `dim` columns. */
template <class E, int kCount>
__device__ __forceinline__ void store_row(E *to, bool real, const float (&o)[kCount], int r, float factor, int dim)
{
    const int lane = static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int j = 0; j < (kCount + 15) / 16; j++) {
        uint32_t words[4] = {};
#pragma unroll
        for (int i = 0; i < 4 && 16 * j + 4 * i < kCount; i++)
            words[i] = Element<E>::pack(o[16 * j + 4 * i + 2 * r] * factor, o[16 * j + 4 * i + 2 * r + 1] * factor);
        const uint4 whole = turn(words[0], words[1], words[2], words[3]);
        if (real && 32 * j + 8 * lane < dim)
            *reinterpret_cast<uint4 *>(to + 32 * j + 8 * lane) = whole;
    }
}

/* Columns of a row: a tile that is deep as it is wide takes no other head dim. */
template <class T> __device__ __forceinline__ int columns(int dim) { return T::kDepth == T::kD ? T::kD : dim; }

inline bool copyable(const am_tensor &t)
{
    return reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && t.stride[0] % 8 == 0 && t.stride[1] % 8 == 0 &&
           t.stride[0] > 0 && t.stride[1] > 0 && t.shape[0] > 0 && t.shape[0] < (1ll << 31) - 1024;
}

} // namespace attention_sm90

#endif
