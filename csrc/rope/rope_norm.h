/* rope_norm.h -- RMSNorm of every head of the queries and keys, then their rotary embedding, in one pass.
 *
 * Of a head x [D] at a token: r = 1 / sqrt(mean(x^2) + eps), y = (x r) (w + 1), or not zero-centred (x r) w, with q's
 * or k's weight, and y turned as rope.h's mrope turns. Float32 throughout, rounded once.
 *
 * Backward turns dy back, g, and has dx = r (g w - x r mean(g w x r)), dw = sum of g x r over tokens and heads, in
 * float64 over k runs of tokens, k = partials' first extent, each in order, and then over the runs in order: the bits
 * depend on k and the shapes alone.
 */
#ifndef AM_ROPE_NORM_H
#define AM_ROPE_NORM_H

#include "rope.h"

typedef struct am_rope_norm_args {
    am_rope_args rope;  /* q_out and k_out are y; not vision, not inverse */
    am_tensor rstd;     /* [T, Hq + Hk] f32 out */
    am_tensor q_weight; /* [D] f32 or bf16 in */
    am_tensor k_weight; /* [D] f32 or bf16 in */
    double eps;
    bool zero_centered;
} am_rope_norm_args;

am_status am_rope_norm_forward(am_rope_norm_args *a, const am_exec *ex);

typedef struct am_rope_norm_grad_args {
    am_rope_args rope;   /* q_out and k_out are dq and dk; q and k what forward was given */
    am_tensor dq_weight; /* [D] out, f32 or bf16, optional */
    am_tensor dk_weight; /* [D] out, f32 or bf16, optional */
    am_tensor partials;  /* [k, 2, D] f64 scratch, k >= 1 */
    am_tensor dq_out;    /* [T, Hq, D] in, q's dtype, last axis contiguous: the gradient of y */
    am_tensor dk_out;    /* [T, Hk, D] in */
    am_tensor q_weight;  /* [D] in */
    am_tensor k_weight;  /* [D] in */
    am_tensor rstd;      /* [T, Hq + Hk] f32 in */
    bool zero_centered;
} am_rope_norm_grad_args;

am_status am_rope_norm_backward(am_rope_norm_grad_args *a, const am_exec *ex);

/* csrc/cuda/rope: of checked arguments. A block does each run of the weight gradients. */
am_status am_cuda_rope_norm_forward(const am_rope_norm_args *a, const am_exec *ex);
am_status am_cuda_rope_norm_backward(const am_rope_norm_grad_args *a, const am_exec *ex);

#endif
