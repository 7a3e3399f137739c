/* am_product.h -- block products C (+)= A B on the CPU: the words that the pieces below share.
 *
 * A kernel file picks one of each, in this order, after its target pragma:
 *
 *   am_vec_scalar.inc | am_vec_avx2.inc | am_vec_avx512.inc    vf of VL floats: vload vstore vset vadd vsub vmul vdiv
 *       vfma vfnma vmax vmin vabs vround vscalb vzero_below vpick vhsum vhmax vfirst vload_bf16 vtranspose
 *       vp, two of them: vsplit vjoin vsplit_bf16 vjoin_bf16
 *   am_vec_exp.inc                                             vexp
 *   am_words_fp32.inc | am_words_bf16.inc                      word: KU elements along the depth; NR words a step of B
 *   am_tile.inc | am_tile_amx.inc                              tile of MR or MR_TAIL rows; begin() and end() around it
 *   am_operand.inc                                             rows into operands, multiply(), rows of sums out
 *
 * A, the left operand, is words at any two strides (amx: a_depth 1). B is panels of NR columns: [columns / NR][depth]
 * [NR] words. Depth is counted in words, a multiple of DEPTH_GRAIN. A tile writes whole vectors of columns, and MR or
 * MR_TAIL rows: C has room for them, and A may be read there.
 */
#ifndef AM_PRODUCT_H
#define AM_PRODUCT_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "am_bf16.h"
#include "am_tensor.h"

typedef struct am_product { /* one block of C = A B, or C += A B; strides in words (packed: 4 bytes) */
    const void *a, *b;      /* b: a panel, NR words a step of the depth */
    float *c;
    int64_t a_row, a_depth, c_row, depth;
    bool add;
} am_product;

typedef struct am_rows_view { /* rows in memory: tokens of a tensor, or an operand that is packed already */
    const char *data;
    int64_t row_bytes;
    am_dtype dtype;
} am_rows_view;

static inline int64_t am_round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

static inline int64_t am_min(int64_t a, int64_t b) { return a < b ? a : b; }

/* Row [token, head] of a float32 or bfloat16 tensor [tokens, heads, dim]. */
static inline char *am_token_row(const am_tensor *t, int64_t token, int64_t head)
{
    const int64_t at = token * t->stride[0] + head * t->stride[1];
    return (char *)t->data + at * (t->dtype == AM_F32 ? (int64_t)sizeof(float) : (int64_t)sizeof(am_bf16));
}

/* The rows of one head from `token` on. */
static inline am_rows_view am_token_rows(const am_tensor *t, int64_t token, int64_t head)
{
    const int64_t size = t->dtype == AM_F32 ? sizeof(float) : sizeof(am_bf16);
    return (am_rows_view){am_token_row(t, token, head), t->stride[0] * size, t->dtype};
}

#endif
