/* bulk_sm90.cuh -- Hopper's ways out of a block: into other blocks of a cluster, and whole boxes into memory. */
#ifndef BULK_SM90_CUH
#define BULK_SM90_CUH

#include "ptx_sm90.cuh"

namespace ptx
{

/* 8 bytes into this place of block `rank` of the cluster, on its barrier in that place. */
__device__ inline void st_async_at(void *to, uint64_t value, uint64_t *bar, uint32_t rank)
{
    asm volatile("{\n"
                 ".reg .b32 there, signal;\n"
                 "mapa.shared::cluster.u32 there, %0, %3;\n"
                 "mapa.shared::cluster.u32 signal, %2, %3;\n"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [there], %1, [signal];\n"
                 "}" ::"r"(smem_address(to)),
                 "l"(value), "r"(smem_address(bar)), "r"(rank)
                 : "memory");
}

/* Four 8 x 8 matrices of 16-bit words, rows at the addresses of lanes 0 to 7, 8 to 15, and so on. */
__device__ inline void stmatrix_x4(void *row, const uint32_t (&r)[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem_address(row)), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

/* Two neighbouring numbers added to those in memory, on 8 bytes. */
__device__ inline void red_add_v2(float *to, float x, float y)
{
    asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
}

/* A box from shared memory; what is beyond the tensor is not written. Evicted from L2 before anything else is. */
__device__ inline void tma_store_3d(const CUtensorMap *map, const void *from, int x, int y, int z)
{
    asm volatile("{\n"
                 ".reg .b64 policy;\n"
                 "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
                 "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3, %4}], [%1], "
                 "policy;\n"
                 "}" ::"l"(map),
                 "r"(smem_address(from)), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

__device__ inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

/* Until all but the last kPending groups of this thread have read their shared memory. */
template <int kPending> __device__ inline void bulk_wait_read()
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

} // namespace ptx

#endif
