/* copies.cu -- short messages into and out of windows: blocks (x, copy), 64 bytes a thread and turn.
 *
 * The block that is last done with a copy writes its number, for all to see; nobody waits in a kernel. A copy engine
 * and a stream's write take two launches for what this does in one.
 *
 * Floor: a launch, and the bytes at NVLink's rate; 1 MiB 2.6 us.
 */
#include "copies.h"

#include "cuda_check.h"

namespace
{

constexpr int kThreads = 256, kDeep = 4;
constexpr int64_t kBlocks = 64, kBlockBytes = int64_t{kThreads} * kDeep * 16;

__device__ void copy_words(const Copy &c, int64_t words)
{
    const uint4 *const from = static_cast<const uint4 *>(c.from);
    uint4 *const to = static_cast<uint4 *>(c.to);
    const int64_t step = int64_t{gridDim.x} * kThreads;
    for (int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x; at < words; at += kDeep * step) {
        uint4 word[kDeep];
#pragma unroll
        for (int i = 0; i < kDeep; i++)
            if (at + i * step < words)
                word[i] = from[at + i * step];
#pragma unroll
        for (int i = 0; i < kDeep; i++)
            if (at + i * step < words)
                to[at + i * step] = word[i];
    }
}

__device__ void copy_bytes(const Copy &c, int64_t begin)
{
    const int64_t step = int64_t{gridDim.x} * kThreads;
    for (int64_t at = begin + int64_t{blockIdx.x} * kThreads + threadIdx.x; at < c.bytes; at += step)
        static_cast<char *>(c.to)[at] = static_cast<const char *>(c.from)[at];
}

__global__ void __launch_bounds__(kThreads) comm_copy_kernel(const __grid_constant__ Copies copies)
{
    const Copy &c = copies.at[blockIdx.y];
    const bool fits = (reinterpret_cast<uintptr_t>(c.to) | reinterpret_cast<uintptr_t>(c.from)) % 16 == 0;
    const int64_t words = fits ? c.bytes / 16 : 0;
    copy_words(c, words);
    copy_bytes(c, words * 16);
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x > 0 || atomicAdd(&copies.done[blockIdx.y], 1u) + 1 < gridDim.x)
        return;
    copies.done[blockIdx.y] = 0;
    __threadfence_system();
    *static_cast<volatile uint32_t *>(c.number) = c.value;
}

} // namespace

am_status copy_and_tell(const Copies &copies, cudaStream_t stream)
{
    int64_t most = 1;
    for (int i = 0; i < copies.n; i++)
        most = copies.at[i].bytes > most ? copies.at[i].bytes : most;
    const int64_t blocks = (most + kBlockBytes - 1) / kBlockBytes;
    if (copies.n == 0)
        return AM_OK;
    const dim3 grid(static_cast<unsigned>(blocks < kBlocks ? blocks : kBlocks), static_cast<unsigned>(copies.n));
    comm_copy_kernel<<<grid, kThreads, 0, stream>>>(copies);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}
