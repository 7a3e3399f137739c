/* mlp_rows.h -- rows of the gates and of their gradients, for each instruction set. */
#ifndef AM_MLP_ROWS_H
#define AM_MLP_ROWS_H

#include <stdbool.h>
#include <stdint.h>

typedef void (*mlp_forward)(void *y, const void *a, const void *b, int64_t n, bool bf16);
typedef void (*mlp_backward)(void *da, void *db, const void *dy, const void *a, const void *b, int64_t n, bool bf16);

typedef struct mlp_kernels { /* n elements, f32 or bf16; by am_mlp_kind; GELU has no b and no db */
    mlp_forward forward[4];
    mlp_backward backward[4];
} mlp_kernels;

extern const mlp_kernels am_mlp_scalar, am_mlp_avx2, am_mlp_avx512;

#endif
