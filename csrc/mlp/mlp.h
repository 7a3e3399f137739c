/* mlp.h -- elementwise gates. Arithmetic is float32, rounded once to the inputs' dtype.
 *
 *   swiglu        y = silu(gate) * up, silu(x) = x / (1 + e^-x)
 *   sigmoid_gate  y = x / (1 + e^-gate)
 *   gelu          y = x (1 + erf(x / sqrt(2))) / 2, or with tanh x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3)
 *
 * All are [.., N], f32 or bf16, of one shape and dtype, last axis contiguous, other strides free; gate and up may be
 * halves of one tensor. Outputs are written by stride too, so that gradients of two halves land in one tensor.
 */
#ifndef AM_MLP_H
#define AM_MLP_H

#include "am_exec.h"

typedef enum am_mlp_kind { AM_MLP_SWIGLU = 0, AM_MLP_SIGMOID_GATE, AM_MLP_GELU, AM_MLP_GELU_TANH } am_mlp_kind;

typedef struct am_mlp_args {
    am_tensor y;  /* [.., N] out, forward */
    am_tensor da; /* [.., N] out, backward: gradient of a */
    am_tensor db; /* [.., N] out, backward: gradient of b */
    am_tensor dy; /* [.., N] in, backward */
    am_tensor a;  /* [.., N] in: gate of swiglu, x of the others */
    am_tensor b;  /* [.., N] in: up of swiglu, gate of sigmoid_gate; not given for gelu */
    bool tanh;    /* gelu */
    bool backward;
    am_mlp_kind kind;
} am_mlp_args;

am_status am_swiglu_forward(am_mlp_args *a, const am_exec *ex);
am_status am_swiglu_backward(am_mlp_args *a, const am_exec *ex);
am_status am_sigmoid_gate_forward(am_mlp_args *a, const am_exec *ex);
am_status am_sigmoid_gate_backward(am_mlp_args *a, const am_exec *ex);
am_status am_gelu_forward(am_mlp_args *a, const am_exec *ex);
am_status am_gelu_backward(am_mlp_args *a, const am_exec *ex);

am_status am_cuda_mlp(const am_mlp_args *a, const am_exec *ex); /* csrc/cuda/mlp: of checked arguments */

#endif
