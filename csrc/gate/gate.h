/* gate.h -- the two gates of a gated delta net layer: log decay and write strength. Forward and backward.
 *
 *   g = -exp(A_log) softplus(a + dt_bias), softplus(s) = log(1 + e^s)        beta = 1 / (1 + e^-b)
 *   da = dg (-exp(A_log)) / (1 + e^-s), s = a + dt_bias                       db = dbeta beta (1 - beta)
 *   dA_log = sum over rows of dg g                                            ddt_bias = sum over rows of da
 *
 * a and b are [T, H], f32 or bf16 each, last axis contiguous. Arithmetic is float32. Where dg or dbeta is 0 an element
 * adds nothing, whatever it holds: padding may hold NaN. The sums over rows are float64 over k runs of rows, k =
 * partials' first extent, each in order, and then over the runs in order: the bits depend on k and the rows alone.
 */
#ifndef AM_GATE_H
#define AM_GATE_H

#include "am_exec.h"

typedef struct am_gate_args {
    am_tensor g;        /* [T, H]    f32       forward: out, contiguous */
    am_tensor beta;     /* [T, H]    b's dtype forward: out, contiguous */
    am_tensor da;       /* [T, H]    a's dtype backward: out, contiguous */
    am_tensor db;       /* [T, H]    b's dtype backward: out, contiguous */
    am_tensor dA_log;   /* [H]       f32       backward: out */
    am_tensor ddt_bias; /* [H]       f32       backward: out */
    am_tensor partials; /* [k, 2, H] f64       backward: scratch, k >= 1 */
    am_tensor dg;       /* [T, H]    f32       backward: in */
    am_tensor dbeta;    /* [T, H]    b's dtype backward: in */
    am_tensor a;        /* [T, H] f32 or bf16 in */
    am_tensor b;        /* [T, H] f32 or bf16 in */
    am_tensor A_log;    /* [H] f32 in */
    am_tensor dt_bias;  /* [H] f32 in */
    bool backward;
} am_gate_args;

am_status am_gdn_gate_forward(am_gate_args *a, const am_exec *ex);
am_status am_gdn_gate_backward(am_gate_args *a, const am_exec *ex);

am_status am_cuda_gdn_gate(const am_gate_args *a, const am_exec *ex); /* csrc/cuda/gate: of checked arguments */

#endif
