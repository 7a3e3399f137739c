/* product_plan.h -- what the products' kernels share with their caller: a block of out is one task. */
#ifndef AM_LOSS_PRODUCT_PLAN_H
#define AM_LOSS_PRODUCT_PLAN_H

#include "am_product.h"

/* Largest block of out, and the words of depth that are packed at one time: the right operand's stay in the second
 * cache while the rows of the left one pass. PRODUCT_SPARE: a tile's rows and a vector more than a block has. */
enum { PRODUCT_ROWS = 512, PRODUCT_COLUMNS = 256, PRODUCT_DEPTH = 256, PRODUCT_SPARE = 32 };

enum {
    PRODUCT_RIGHT = PRODUCT_COLUMNS * PRODUCT_DEPTH,
    PRODUCT_LEFT = PRODUCT_SPARE * (PRODUCT_DEPTH + 1),
    PRODUCT_SUMS = (PRODUCT_ROWS + PRODUCT_SPARE) * PRODUCT_COLUMNS,
    PRODUCT_BYTES = 4 * (PRODUCT_RIGHT + PRODUCT_LEFT + PRODUCT_SUMS)
};

typedef struct product_lines { /* rows of the left operand or columns of the right one; one stride is 1 element */
    const char *data;
    int64_t line, along; /* elements from line to line, and along the depth */
    am_dtype dtype;
} product_lines;

typedef struct product_task { /* out [rows, columns] = left right, or += (f32 alone) */
    char *out;
    int64_t out_row;
    am_dtype out_dtype;
    product_lines left, right;
    int64_t rows, columns, depth;
    bool add;
    char *memory; /* PRODUCT_BYTES */
} product_task;

typedef void (*product_fn)(const product_task *);

extern const product_fn am_product_scalar, am_product_avx2, am_product_avx512, am_product_bf16;

#endif
