/* am_each_isa.h -- includes AM_CPU_INC ("<op>_cpu.inc") once for each instruction set that has a body of its own, with
 * AM_NAME(f) (f_scalar, f_avx2, f_avx512) and AM_TARGET. No guard: a file may include it for several bodies. On other
 * machines than x86-64 there is the scalar body alone. */
#define AM_NAME(f) f##_scalar
#define AM_TARGET AM_TARGET_SCALAR
#include AM_CPU_INC
#undef AM_NAME
#undef AM_TARGET
#if defined(__x86_64__)
#define AM_NAME(f) f##_avx2
#define AM_TARGET AM_TARGET_AVX2
#include AM_CPU_INC
#undef AM_NAME
#undef AM_TARGET
#define AM_NAME(f) f##_avx512
#define AM_TARGET AM_TARGET_AVX512
#include AM_CPU_INC
#undef AM_NAME
#undef AM_TARGET
#endif
#undef AM_CPU_INC
