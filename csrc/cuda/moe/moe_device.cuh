/* moe_device.cuh -- elements and sums that the kernels of moe share. */
#ifndef MOE_DEVICE_CUH
#define MOE_DEVICE_CUH

#include "rows.cuh"

namespace moe
{

constexpr int64_t kMostBlocks = (1ll << 31) - 1;

/* Float32 takes the exact exponential; of bfloat16 the fast one's error is far below a rounding. */
template <typename T> __device__ float sigmoid(float x)
{
    return __fdividef(1.0f, 1.0f + (sizeof(T) == 4 ? expf(-x) : __expf(-x)));
}

__device__ inline float warp_sum(float x)
{
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, lane);
    return x;
}

/* The same bits on every thread of a block of kThreads. */
template <int kThreads> __device__ float block_sum(float x)
{
    __shared__ float shared[kThreads / 32];
    x = warp_sum(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        shared[threadIdx.x / 32] = x;
    __syncthreads();
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kThreads / 32; i++)
        total += shared[i];
    return total;
}

/* 16 bytes, or one element where kPer is 1. */
template <typename T, int kPer> struct Word {
    uint4 raw;
    __device__ void get(float (&to)[kPer]) const { rows::unpack<T>(to, raw); }
    __device__ void set(const float (&from)[kPer]) { raw = rows::pack<T>(from); }
};

template <typename T> struct Word<T, 1> {
    T raw;
    __device__ void get(float (&to)[1]) const { to[0] = rows::to_float(raw); }
    __device__ void set(const float (&from)[1]) { rows::from_float(&raw, from[0]); }
};

inline bool aligned(const void *p, int64_t stride, am_dtype dtype)
{
    return reinterpret_cast<uintptr_t>(p) % 16 == 0 && stride * static_cast<int64_t>(am_dtype_size(dtype)) % 16 == 0;
}

} // namespace moe

#endif
