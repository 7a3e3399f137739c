/* conv.h -- depthwise causal convolution over packed documents, with an optional SiLU. Forward and backward.
 *
 * Per document n with rows [start, end), l = end - start, and channel c, let u be the W - 1 numbers of the initial
 * state (oldest first; 0 without one), then x[start .. end). For t in [0, l):
 *
 *   z[t] = bias + sum over j < W of weight[j] u[t + j]
 *   y[start + t] = silu(z[t]) or z[t]
 *   final_state[k] = u[l + k], k < W - 1: raw inputs; a document without rows passes its state on
 *
 *   dz[t] = dy[start + t] silu'(z[t])
 *   du[m] = sum over j of weight[j] dz[m - j], and dfinal_state[m - l] where m >= l
 *   dinitial_state = du[0 .. W - 1), dx[start + t] = du[W - 1 + t]
 *   dweight[j] = sum over documents and t of dz[t] u[t + j], dbias = sum of dz
 *
 * Arithmetic is float32, y is rounded once. Rows outside every document may hold anything, get y = dx = 0 and reach no
 * result. A gradient of weight or bias is summed over k runs of rows, k = partials' first extent, each in order
 * (float32 over at most 8 rows, on CUDA 32, float64 from there), and then over the runs in order: the bits depend on k
 * and the rows alone.
 */
#ifndef AM_CONV_H
#define AM_CONV_H

#include "am_exec.h"

enum { AM_CONV_MAX_WIDTH = 8 };

typedef struct am_conv_args {
    am_tensor y;             /* [T, C]        x's dtype   forward: out */
    am_tensor final_state;   /* [N, C, W - 1] x's dtype   forward: out, optional */
    am_tensor dx;            /* [T, C]        x's dtype   backward: out */
    am_tensor dweight;       /* [C, W]        f32 or bf16 backward: out, optional */
    am_tensor dbias;         /* [C]           f32 or bf16 backward: out, optional */
    am_tensor dstate;        /* [N, C, W - 1] x's dtype   backward: out, optional: gradient of initial_state */
    am_tensor partials;      /* [k, W + 1, C] f64         backward: scratch, k >= 1 */
    am_tensor dy;            /* [T, C]        x's dtype   backward: in */
    am_tensor dfinal;        /* [N, C, W - 1] x's dtype   backward: in, optional */
    am_tensor x;             /* [T, C] f32 or bf16 in, last axis contiguous */
    am_tensor weight;        /* [C, W] f32 or bf16 in, any strides, 1 <= W <= AM_CONV_MAX_WIDTH */
    am_tensor bias;          /* [C]    f32 or bf16 in, optional */
    am_tensor initial_state; /* [N, C, W - 1] x's dtype in, any strides, optional */
    am_i64_array docs;       /* [2 N] start and end of each document, ascending */
    am_tensor device_docs; /* [2 N] or [N, 2] i64 in: docs beside x. CUDA reads these; optional for N = 1, on the CPU */
    bool silu;
    bool backward;
} am_conv_args;

am_status am_causal_conv1d_forward(am_conv_args *a, const am_exec *ex);
am_status am_causal_conv1d_backward(am_conv_args *a, const am_exec *ex);

/* csrc/cuda/conv: of checked arguments */
am_status am_cuda_causal_conv1d_forward(const am_conv_args *a, const am_exec *ex);
am_status am_cuda_causal_conv1d_backward(const am_conv_args *a, const am_exec *ex);

#endif
