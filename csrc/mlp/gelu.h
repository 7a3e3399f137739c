/* gelu.h -- rows of GELU by erf and of its gradient, for each instruction set. */
#ifndef AM_MLP_GELU_H
#define AM_MLP_GELU_H

#include <stdbool.h>
#include <stdint.h>

typedef struct gelu_kernels { /* n elements, f32 or bf16 */
    void (*forward)(void *y, const void *x, int64_t n, bool bf16);
    void (*backward)(void *dx, const void *dy, const void *x, int64_t n, bool bf16);
} gelu_kernels;

extern const gelu_kernels am_gelu_scalar, am_gelu_avx2, am_gelu_avx512;

#endif
