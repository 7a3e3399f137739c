/* norm.h -- normalisation over the last axis: RMSNorm, gated RMSNorm, LayerNorm. Forward and backward.
 *
 * With s = x, or x + residual rounded to x's dtype, and r = 1 / sqrt(mean(s^2) + eps):
 *   rms    y = (s r) (1 + w)  or, not zero-centred, (s r) w;  rounded once
 *   gated  y = [w c(x r)] silu(z), where c and the product with w round to x's dtype as transformers' eager code does
 *          (a float32 w keeps the product in float32)
 *   layer  y = (x - mean) r w + b, r = 1 / sqrt(var + eps);  rounded once
 * Arithmetic is float32. x is [.., H], f32 or bf16, last axis contiguous, any other strides; weight and bias are [H],
 * contiguous, f32 or bf16 each. Outputs are contiguous.
 *
 * Backward is given r (and the mean) of forward. A gradient of weight or bias is summed in float64 over k runs of rows,
 * k = partials' first extent, each in order (layer: four rows are summed in float32 before), and then over the runs in
 * order: the bits depend on k and the rows alone.
 */
#ifndef AM_NORM_H
#define AM_NORM_H

#include "am_exec.h"

typedef enum am_norm_kind { AM_NORM_RMS = 0, AM_NORM_GATED, AM_NORM_LAYER } am_norm_kind;

typedef struct am_norm_args {
    am_tensor y;        /* [.., H] out, x's dtype */
    am_tensor sum;      /* [.., H] out, x + residual; given with residual */
    am_tensor rstd;     /* [rows] f32 out */
    am_tensor mean;     /* [rows] f32 out, layer */
    am_tensor x;        /* [.., H] in */
    am_tensor residual; /* [.., H] in, rms, optional */
    am_tensor z;        /* [.., H] in, gated */
    am_tensor weight;   /* [H] in */
    am_tensor bias;     /* [H] in, layer */
    double eps;
    bool zero_centered; /* rms */
    am_norm_kind kind;
} am_norm_args;

am_status am_rms_norm_forward(am_norm_args *a, const am_exec *ex);
am_status am_gated_rms_norm_forward(am_norm_args *a, const am_exec *ex);
am_status am_layer_norm_forward(am_norm_args *a, const am_exec *ex);

typedef struct am_norm_grad_args {
    am_tensor dx;       /* [.., H] out, x's dtype; the gradient of x and of residual */
    am_tensor dz;       /* [.., H] out, gated */
    am_tensor dweight;  /* [H] out, f32 or bf16, optional */
    am_tensor dbias;    /* [H] out, layer, optional */
    am_tensor partials; /* [k, 1 or 2, H] f64 scratch, k >= 1; 2 for layer */
    am_tensor dy;       /* [.., H] in, x's dtype */
    am_tensor dsum;     /* [.., H] in, rms with residual, optional: gradient of the sum */
    am_tensor x;        /* [.., H] in: what forward normalised (the sum, where there is a residual) */
    am_tensor z;        /* [.., H] in, gated */
    am_tensor weight;   /* [H] in */
    am_tensor rstd;     /* [rows] f32 in */
    am_tensor mean;     /* [rows] f32 in, layer */
    bool zero_centered;
    am_norm_kind kind;
} am_norm_grad_args;

am_status am_rms_norm_backward(am_norm_grad_args *a, const am_exec *ex);
am_status am_gated_rms_norm_backward(am_norm_grad_args *a, const am_exec *ex);
am_status am_layer_norm_backward(am_norm_grad_args *a, const am_exec *ex);

/* csrc/cuda/norm: of checked arguments. A block does each run of the weight gradients, in float32 before its end. */
am_status am_cuda_norm_forward(const am_norm_args *a, const am_exec *ex);
am_status am_cuda_norm_backward(const am_norm_grad_args *a, const am_exec *ex);

#endif
