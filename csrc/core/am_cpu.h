/* am_cpu.h -- which instruction set the CPU kernels use.
 *
 * A slice includes its <op>_cpu.inc once per row of am_isa and picks the row am_cpu_isa() from a const table.
 * The environment variable AM_ISA=scalar|avx2|avx512|avx512_bf16 lowers the choice when the process starts. Above the
 * last row, `amx_bf16` is that row with leave to use tile registers, which am_cpu_amx() tells.
 */
#ifndef AM_CPU_H
#define AM_CPU_H

#include <stdbool.h>

#include "am_status.h"

typedef enum am_isa { AM_ISA_SCALAR = 0, AM_ISA_AVX2, AM_ISA_AVX512, AM_ISA_AVX512_BF16, AM_ISA_COUNT } am_isa;

#define AM_TARGET_SCALAR
#define AM_TARGET_AVX2 __attribute__((target("avx2,fma")))
#define AM_TARGET_AVX512 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#define AM_TARGET_AVX512_BF16                                                                                          \
    __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,prefer-vector-width=512")))

am_isa am_cpu_isa(void);       /* the row in use */
bool am_cpu_amx(void);         /* bf16 tile registers may be used: the CPU has them and the kernel gave leave */
const char *am_cpu_name(void); /* the row in use, or amx_bf16 */
am_isa am_cpu_best_isa(void);  /* the highest row of this machine */
const char *am_isa_name(am_isa isa);
am_status am_cpu_set_isa(const char *name); /* for tests and benchmarks; not while an operator runs */

#endif
