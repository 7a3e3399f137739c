/* gdn_sm90.cuh -- what the Hopper kernels of the gated delta rule share: their scratch, and products of a warpgroup
 * with chunks of 64 tokens in shared memory.
 *
 * Keys and queries stay as they are in memory; their lengths, the decays and beta are numbers of a token that rows and
 * columns of the small matrices are times, so that nothing is rounded but what enters a product.
 */
#ifndef GDN_SM90_CUH
#define GDN_SM90_CUH

#include "gdn_rows.h"
#include "on_device.h"
#include "ptx_sm90.cuh"
#include "tensor_map.h"
#include "wgmma_sm90.cuh"

namespace gdn_sm90
{

using gdn::Call;
using gdn::kChunk;

constexpr int kDim = 128, kTileBytes = kChunk * 128; /* a tile: 64 tokens of 64 elements, 128 bytes a token, swizzled */

/* Of chunks, with scale and lengths of q and k; token: from the segment's first one on. */
struct Prepared {
    __nv_bfloat16 *t, *p; /* [tokens, Hv, 64]: (I + A)^-1, without `more` times beta of the column; P */
    float4 *numbers;      /* [Hv, tokens + 64]: exp(c) / |k|, exp(c_last - c) / |k|, scale exp(c) / |q|, exp(c) */
    float4 *more;         /* null, or the same of beta, scale / |q|, log2(exp(c) |k|), log2(exp(c)) */
    int64_t stride;       /* tokens + 64 */
};

/* Hands out parts of the workspace from `base`, which may be null. */
struct Place {
    char *base;
    size_t at;

    template <class X> X *take(int64_t n)
    {
        X *const place = reinterpret_cast<X *>(base + at);
        at = (at + static_cast<size_t>(n) * sizeof(X) + 127) / 128 * 128;
        return place;
    }
};

inline Prepared place_prepared(Place *place, int64_t tokens, int64_t heads, bool more)
{
    Prepared to;
    to.stride = tokens + kChunk;
    to.numbers = place->take<float4>(heads * to.stride);
    to.more = more ? place->take<float4>(heads * to.stride) : nullptr;
    to.t = place->take<__nv_bfloat16>(tokens * heads * kChunk);
    to.p = place->take<__nv_bfloat16>(tokens * heads * kChunk);
    return to;
}

inline char *aligned(const am_tensor &workspace)
{
    return reinterpret_cast<char *>((reinterpret_cast<uintptr_t>(workspace.data) + 127) / 128 * 128);
}

/* A dense [n, heads, dim] of the workspace as a tensor. */
inline am_tensor dense(__nv_bfloat16 *data, int64_t n, int64_t heads, int64_t dim)
{
    am_tensor t = {};
    t.data = data;
    t.dtype = AM_BF16;
    t.ndim = 3;
    t.shape[0] = n;
    t.shape[1] = heads;
    t.shape[2] = t.stride[1] = dim;
    t.stride[0] = heads * dim;
    t.stride[2] = 1;
    return t;
}

/* Of the call's segment; `tokens` bounds it. */
am_status prepare(const Call &p, const Prepared &to, int64_t tokens, cudaStream_t stream);

__device__ __forceinline__ uint32_t pack(float low, float high)
{
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&both);
}

/* Sums of 64 rows as the left operand of the next product. */
template <int kSteps> __device__ __forceinline__ void pack(uint32_t (&to)[kSteps][4], const float (&sums)[8 * kSteps])
{
#pragma unroll
    for (int j = 0; j < kSteps; j++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            to[j][i] = pack(sums[8 * j + 2 * i], sums[8 * j + 2 * i + 1]);
}

template <class X> __device__ __forceinline__ X uniform(X x) { return __shfl_sync(0xffffffffu, x, 0); }

/* A matrix descriptor is an address, strides between boxes and between groups of 8 rows (1,024 bytes), and the 128-byte
 * swizzle. The low word holds the first two: steps through a tile are added to it. */
__device__ __forceinline__ uint32_t descriptor_low(const void *p)
{
    return uniform((ptx::smem_address(p) & 0x3ffff) >> 4 | (kTileBytes >> 4) << 16);
}

__device__ __forceinline__ uint64_t descriptor(uint32_t low) { return 0x40000040ull << 32 | low; }

/* sums = (keep ? sums : 0) + A B^T of 64 rows of B in kSteps / 4 tiles. */
template <int kSteps>
__device__ __forceinline__ void times_rows(float (&sums)[32], const uint32_t (&a)[kSteps][4], uint32_t b, bool keep)
{
#pragma unroll
    for (int j = 0; j < kSteps; j++)
        ptx::wgmma_m64n64k16_bf16_rk(sums, a[j], descriptor(b + (j / 4) * (kTileBytes >> 4) + (j % 4) * 2),
                                     keep || j > 0);
    ptx::wgmma_commit_group();
}

/* sums += A B, B of 64 rows and two tiles: 16 rows on are 2,048 bytes on. */
__device__ __forceinline__ void times_columns(float (&sums)[64], const uint32_t (&a)[4][4], uint32_t b)
{
#pragma unroll
    for (int j = 0; j < 4; j++)
        ptx::wgmma_m64n128k16_bf16_rs(sums, a[j], descriptor(b + j * (2048 >> 4)), true);
    ptx::wgmma_commit_group();
}

/* sums = A B, B a tile of 64 rows, 64 columns. */
__device__ __forceinline__ void times_square(float (&sums)[32], const uint32_t (&a)[4][4], uint32_t b)
{
#pragma unroll
    for (int j = 0; j < 4; j++)
        ptx::wgmma_m64n64k16_bf16_rs(sums, a[j], descriptor(b + j * (2048 >> 4)), j > 0);
    ptx::wgmma_commit_group();
}

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

/* Sixteen bytes of a swizzled tile: piece (0 to 7) of a row. */
__device__ __forceinline__ char *piece_of(char *tile, int row, int piece)
{
    return tile + row * 128 + ((piece ^ (row & 7)) << 4);
}

inline bool copyable(const am_tensor &t)
{
    return reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && t.stride[0] % 8 == 0 && t.stride[1] % 8 == 0 &&
           t.stride[0] > 0 && t.stride[1] > 0 && t.shape[0] > 0 && t.shape[0] < (1ll << 31) - 1024;
}

inline bool has_dims(const am_gdn_args *a)
{
    return a->q.dtype == AM_BF16 && a->q.shape[2] == kDim && a->v.shape[2] == kDim && a->q.shape[0] > 0;
}

} // namespace gdn_sm90

#endif
