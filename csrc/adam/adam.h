/* adam.h -- fused AdamW over any list of tensors, in one pass.
 *
 *   m <- b1*m + (1-b1)*g        v <- b2*v + (1-b2)*g^2        t <- t + 1
 *   p <- p - lr * ( (m/(1-b1^t)) / (sqrt(v/(1-b2^t)) + eps) + wd*p )
 *
 * Arithmetic is float32 in a fixed order without contraction, so that an element's result does not depend on the
 * instruction set, the number of threads, its neighbours, or where a shard was cut. 1-b and the bias corrections are
 * formed in double. Each tensor has its own t.
 *
 * Tensor i: params, exp_avgs, exp_avg_sqs, grads and masters have one shape and the same dense strides, whatever their
 * axis order. A tensor without elements may stand anywhere; its step counts.
 *   params  masters
 *   f32     none
 *   bf16    none   p is rounded once a step
 *   bf16    f32    the master is stepped, p is its rounding to nearest even
 *   bf16    i16    master bits = (p << 16) + remainder, the remainder signed: p is rounded to nearest, halves up in
 *                  magnitude. A NaN master is stored as the quiet NaN, so that p shows it.
 * The groups of a step are one call, so that nothing at all is written when a check fails, or when found_inf is not 0.
 */
#ifndef ADAM_H
#define ADAM_H

#include "am_exec.h"

typedef struct am_adam_args {
    am_tensor_list params;      /* n x [...] f32 | bf16        in/out */
    am_tensor_list exp_avgs;    /* n x [...] f32 | bf16        in/out */
    am_tensor_list exp_avg_sqs; /* n x [...] dtype of exp_avgs in/out */
    am_tensor_list steps;       /* n x [1]   f32 | i64         in/out: t before and after */
    am_tensor_list grads;       /* n x [...] f32 | bf16        in */
    am_tensor_list masters;     /* n x [...] f32 | i16         in/out; optional; one without elements: none */
    am_i64_array group_sizes;   /* [G] tensors of each parameter group, in order; sums to n. Absent: one group */
    am_f64_array lr, beta1, beta2, eps, weight_decay; /* [G] */
    am_tensor_list lr_tensors; /* G x [1] f32 in, in place of lr; optional; one without elements: lr's number */
    am_tensor found_inf;       /* [1] f32 in: not 0 skips the step; optional */
    am_tensor grad_scale;      /* [1] f32 in: gradients are divided by it; optional */
} am_adam_args;

am_status am_adam_step(const am_adam_args *a, const am_exec *ex);
am_status am_cuda_adam_step(const am_adam_args *a, const am_exec *ex); /* csrc/cuda/adam: of checked arguments */

#endif
