/* am_cpu.h -- which instruction set the CPU kernels use.
 *
 * A slice includes its <op>_cpu.inc once per row of am_isa and picks the row am_cpu_isa() from a const table.
 * The environment variable AM_ISA=scalar|avx2|avx512|avx512_bf16 lowers the choice when the process starts. Above the
 * rows, amx_bf16 is the last row with leave to use bf16 tile registers, for the slices that ask am_cpu_amx().
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

am_isa am_cpu_isa(void); /* the row in use */
bool am_cpu_amx(void);   /* the CPU has tile registers, the kernel gave leave, and nothing lowered the choice */
const char *am_cpu_isa_name(void);
const char *am_cpu_best_isa_name(void);     /* the most that this machine has */
am_status am_cpu_set_isa(const char *name); /* for tests and benchmarks; not while an operator runs */

#endif
