/* clip.h -- the two halves of clipping a list of gradients by their common norm.
 *
 *   grad_sumsq: sum of squares over all elements, in float64. A square of a float32 is exact there and no sum of them
 *               overflows, so one pass does without the largest element; inf and NaN come through.
 *   scale_:     every element times a factor, rounded once; a factor of exactly 1 writes nothing.
 *
 * The line of all elements is cut into at most AM_SUMSQ_PARTS parts by its length alone (on CUDA into chunks that the
 * parts get in turn) and each is summed in a fixed order: the result does not depend on the threads or the instruction
 * set.
 */
#ifndef ADAM_CLIP_H
#define ADAM_CLIP_H

#include "am_exec.h"

enum { AM_SUMSQ_PARTS = 1024 };

typedef struct am_grad_sumsq_args {
    am_tensor sumsq;      /* [1] f64 out */
    am_tensor parts;      /* [AM_SUMSQ_PARTS] f64 out: sums of the parts, scratch of the caller */
    am_tensor_list grads; /* n x [...] f32 | bf16 in, dense */
} am_grad_sumsq_args;

typedef struct am_scale_args {
    am_tensor_list tensors; /* n x [...] f32 | bf16 in/out, dense */
    am_tensor factor;       /* [1] f64 in */
} am_scale_args;

am_status am_grad_sumsq(const am_grad_sumsq_args *a, const am_exec *ex);
am_status am_scale(const am_scale_args *a, const am_exec *ex);

am_status am_cuda_grad_sumsq(const am_grad_sumsq_args *a, const am_exec *ex); /* csrc/cuda/adam: of checked arguments */
am_status am_cuda_scale(const am_scale_args *a, const am_exec *ex);

#endif
