#include "adam.h"
#include "clip.h"

#include "am_py.h"

AM_PY_OP(adam_step, am_adam_step, am_adam_args, {"params", AM_PY_OUTS, &a.params},
         {"exp_avgs", AM_PY_OUTS, &a.exp_avgs}, {"exp_avg_sqs", AM_PY_OUTS, &a.exp_avg_sqs},
         {"steps", AM_PY_OUTS, &a.steps}, {"grads", AM_PY_INS, &a.grads}, {"$|masters", AM_PY_OUTS, &a.masters},
         {"$|group_sizes", AM_PY_INDEX, &a.group_sizes}, {"$lr", AM_PY_F64S, &a.lr}, {"$beta1", AM_PY_F64S, &a.beta1},
         {"$beta2", AM_PY_F64S, &a.beta2}, {"$eps", AM_PY_F64S, &a.eps}, {"$weight_decay", AM_PY_F64S, &a.weight_decay},
         {"$|lr_tensors", AM_PY_INS, &a.lr_tensors}, {"$|found_inf", AM_PY_IN, &a.found_inf},
         {"$|grad_scale", AM_PY_IN, &a.grad_scale})

AM_PY_OP(grad_sumsq, am_grad_sumsq, am_grad_sumsq_args, {"sumsq", AM_PY_OUT, &a.sumsq}, {"parts", AM_PY_OUT, &a.parts},
         {"grads", AM_PY_INS, &a.grads})
AM_PY_OP(scale_, am_scale, am_scale_args, {"tensors", AM_PY_OUTS, &a.tensors}, {"factor", AM_PY_IN, &a.factor})

PyMethodDef am_adam_methods[] = {
    AM_PY_METHOD(adam_step,
                 "adam_step(params, exp_avgs, exp_avg_sqs, steps, grads, *, masters=None, group_sizes=None, lr, "
                 "beta1, beta2, eps, weight_decay, lr_tensors=None, found_inf=None, grad_scale=None)\n--\n\nOne AdamW "
                 "step over lists of tensors, in place; tensors without elements may stand anywhere."),
    AM_PY_METHOD(grad_sumsq, "grad_sumsq(sumsq, parts, grads)\n--\n\nWrites the sum of all squares, in float64."),
    AM_PY_METHOD(scale_, "scale_(tensors, factor)\n--\n\nMultiplies every element by the float64 factor, in place; a "
                         "factor of 1 writes nothing."),
    {NULL, NULL, 0, NULL},
};
