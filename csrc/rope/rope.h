/* rope.h -- rotary embedding of queries and keys from position ids.
 *
 * The first R = rotary_dim elements of each head turn, pair (i, i + R / 2) by angle position[axis(i)] * theta^-e(i):
 *   y_i = x_i cos - x_{i + R/2} sin,   y_{i + R/2} = x_{i + R/2} cos + x_i sin,   the rest is copied.
 *   mrope   axes T, H, W; e = 2 i / R; axis 1 where i % 3 = 1 and i < 3 section[1], axis 2 where i % 3 = 2 and
 *           i < 3 section[2], else axis 0
 *   vision  axes H, W; R is the whole head; e = 4 (i mod R/4) / R; axis 0 below R/4, axis 1 from there on
 * Angles are formed and reduced in float64, the rotation is float32 and rounded once. inverse turns the other way,
 * which is the gradient.
 */
#ifndef AM_ROPE_H
#define AM_ROPE_H

#include "am_exec.h"

enum { AM_ROPE_MAX_PAIRS = 256 };

typedef struct am_rope_args {
    am_tensor q_out;      /* [T, Hq, D] out, q's dtype, contiguous */
    am_tensor k_out;      /* [T, Hk, D] out, contiguous */
    am_tensor q;          /* [T, Hq, D] f32 or bf16 in, last axis contiguous */
    am_tensor k;          /* [T, Hk, D] in, q's dtype */
    am_tensor positions;  /* [3, T] (vision: [2, T]) or [T], the same on every axis; i32 or i64 in */
    int64_t rotary_dim;   /* R: even, in [2, D] */
    double theta;         /* > 0 */
    am_i64_array section; /* mrope: [3] pairs of each axis in; what lies beyond R / 2 counts for nothing */
    bool inverse;
    bool vision;
    const char *name; /* the operator's, in what is said of its arguments */
} am_rope_args;

am_status am_mrope(am_rope_args *a, const am_exec *ex);
am_status am_vision_rope(am_rope_args *a, const am_exec *ex);

am_status am_cuda_rope(const am_rope_args *a, const am_exec *ex); /* csrc/cuda/rope: of checked arguments */

#endif
