/* norm_rows.h -- rows of the norms, and the kernels of LayerNorm for each instruction set. */
#ifndef AM_NORM_ROWS_H
#define AM_NORM_ROWS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct norm_row { /* one row of forward */
    void *y, *sum;        /* sum: NULL without a residual */
    const void *x, *residual, *z, *weight, *bias;
    float *rstd, *mean;
    int64_t n;
    float eps, shift; /* shift: 1 where the weight is zero-centred */
    bool bf16, weight_bf16, bias_bf16;
} norm_row;

typedef struct norm_grad_row { /* one row of backward; dweight and dbias are float64 sums, NULL where nobody asks */
    void *dx, *dz;
    double *dweight, *dbias;
    const void *dy, *dsum, *x, *z, *weight;
    const float *rstd, *mean;
    int64_t n;
    float shift;
    bool bf16, weight_bf16;
} norm_grad_row;

enum { NORM_GROUP = 4 }; /* rows whose products meet in float32 before they go to the float64 sums */

typedef struct layer_kernels {
    void (*forward)(const norm_row *r);
    void (*backward)(const norm_grad_row *r, int64_t count); /* at most NORM_GROUP rows, of one n and weight */
} layer_kernels;

extern const layer_kernels am_layer_scalar, am_layer_avx2, am_layer_avx512;

#endif
