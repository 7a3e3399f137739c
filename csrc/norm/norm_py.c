#include "norm.h"

#include "am_py.h"

AM_PY_OP(rms_norm_forward, am_rms_norm_forward, am_norm_args, {"y", AM_PY_OUT, &a.y}, {"rstd", AM_PY_OUT, &a.rstd},
         {"x", AM_PY_IN, &a.x}, {"weight", AM_PY_IN, &a.weight}, {"$|sum", AM_PY_OUT, &a.sum},
         {"$|residual", AM_PY_IN, &a.residual}, {"$eps", AM_PY_F64, &a.eps},
         {"$zero_centered", AM_PY_BOOL, &a.zero_centered})
AM_PY_OP(rms_norm_backward, am_rms_norm_backward, am_norm_grad_args, {"dx", AM_PY_OUT, &a.dx},
         {"|dweight", AM_PY_OUT, &a.dweight}, {"partials", AM_PY_OUT, &a.partials}, {"dy", AM_PY_IN, &a.dy},
         {"x", AM_PY_IN, &a.x}, {"weight", AM_PY_IN, &a.weight}, {"rstd", AM_PY_IN, &a.rstd},
         {"$|dsum", AM_PY_IN, &a.dsum}, {"$zero_centered", AM_PY_BOOL, &a.zero_centered})
AM_PY_OP(gated_rms_norm_forward, am_gated_rms_norm_forward, am_norm_args, {"y", AM_PY_OUT, &a.y},
         {"rstd", AM_PY_OUT, &a.rstd}, {"x", AM_PY_IN, &a.x}, {"z", AM_PY_IN, &a.z}, {"weight", AM_PY_IN, &a.weight},
         {"$eps", AM_PY_F64, &a.eps})
AM_PY_OP(gated_rms_norm_backward, am_gated_rms_norm_backward, am_norm_grad_args, {"dx", AM_PY_OUT, &a.dx},
         {"dz", AM_PY_OUT, &a.dz}, {"|dweight", AM_PY_OUT, &a.dweight}, {"partials", AM_PY_OUT, &a.partials},
         {"dy", AM_PY_IN, &a.dy}, {"x", AM_PY_IN, &a.x}, {"z", AM_PY_IN, &a.z}, {"weight", AM_PY_IN, &a.weight},
         {"rstd", AM_PY_IN, &a.rstd})
AM_PY_OP(layer_norm_forward, am_layer_norm_forward, am_norm_args, {"y", AM_PY_OUT, &a.y}, {"mean", AM_PY_OUT, &a.mean},
         {"rstd", AM_PY_OUT, &a.rstd}, {"x", AM_PY_IN, &a.x}, {"weight", AM_PY_IN, &a.weight},
         {"bias", AM_PY_IN, &a.bias}, {"$eps", AM_PY_F64, &a.eps})
AM_PY_OP(layer_norm_backward, am_layer_norm_backward, am_norm_grad_args, {"dx", AM_PY_OUT, &a.dx},
         {"|dweight", AM_PY_OUT, &a.dweight}, {"|dbias", AM_PY_OUT, &a.dbias}, {"partials", AM_PY_OUT, &a.partials},
         {"dy", AM_PY_IN, &a.dy}, {"x", AM_PY_IN, &a.x}, {"weight", AM_PY_IN, &a.weight}, {"mean", AM_PY_IN, &a.mean},
         {"rstd", AM_PY_IN, &a.rstd})

PyMethodDef am_norm_methods[] = {
    AM_PY_METHOD(rms_norm_forward, "rms_norm_forward(y, rstd, x, weight, *, sum=None, residual=None, eps, "
                                   "zero_centered)\n--\n\nRMSNorm over the last axis; with a residual, of sum = x + "
                                   "residual, which is written too. rstd is float32, one a row."),
    AM_PY_METHOD(rms_norm_backward, "rms_norm_backward(dx, dweight, partials, dy, x, weight, rstd, *, dsum=None, "
                                    "zero_centered)\n--\n\nx is what was normalised. partials is float64 scratch [k, "
                                    "1, H]; k decides the order of the sum over rows. dweight may be None."),
    AM_PY_METHOD(gated_rms_norm_forward,
                 "gated_rms_norm_forward(y, rstd, x, z, weight, *, eps)\n--\n\nRMSNorm times SiLU(z)."),
    AM_PY_METHOD(gated_rms_norm_backward,
                 "gated_rms_norm_backward(dx, dz, dweight, partials, dy, x, z, weight, rstd)\n--\n\nAs "
                 "rms_norm_backward."),
    AM_PY_METHOD(layer_norm_forward,
                 "layer_norm_forward(y, mean, rstd, x, weight, bias, *, eps)\n--\n\nLayerNorm over the last axis."),
    AM_PY_METHOD(layer_norm_backward,
                 "layer_norm_backward(dx, dweight, dbias, partials, dy, x, weight, mean, rstd)\n--\n\nAs "
                 "rms_norm_backward; partials is [k, 2, H]."),
    {NULL, NULL, 0, NULL},
};
