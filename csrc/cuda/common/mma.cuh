/* mma.cuh -- the product of a warp. */
#ifndef MMA_CUH
#define MMA_CUH

#include <stdint.h>

namespace ptx
{

/* d += A B, m16 n8 k16, bf16 with float32 sums. Of lane 4 g + c: a: rows g and g + 8 of columns 2 c, 2 c + 1, then of
 * 2 c + 8, 2 c + 9; b: rows 2 c, 2 c + 1, then 2 c + 8, 2 c + 9, of column g; d: columns 2 c, 2 c + 1 of rows g and
 * g + 8. */
__device__ inline void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2])
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

} // namespace ptx

#endif
