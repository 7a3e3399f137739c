#include "conv.h"

#include "am_py.h"

AM_PY_OP(causal_conv1d_forward, am_causal_conv1d_forward, am_conv_args, {"y", AM_PY_OUT, &a.y},
         {"|final_state", AM_PY_OUT, &a.final_state}, {"x", AM_PY_IN, &a.x}, {"weight", AM_PY_IN, &a.weight},
         {"|bias", AM_PY_IN, &a.bias}, {"|initial_state", AM_PY_IN, &a.initial_state}, {"docs", AM_PY_INDEX, &a.docs},
         {"|device_docs", AM_PY_IN, &a.device_docs}, {"$silu", AM_PY_BOOL, &a.silu})
AM_PY_OP(causal_conv1d_backward, am_causal_conv1d_backward, am_conv_args, {"dx", AM_PY_OUT, &a.dx},
         {"|dweight", AM_PY_OUT, &a.dweight}, {"|dbias", AM_PY_OUT, &a.dbias}, {"|dstate", AM_PY_OUT, &a.dstate},
         {"partials", AM_PY_OUT, &a.partials}, {"dy", AM_PY_IN, &a.dy}, {"|dfinal", AM_PY_IN, &a.dfinal},
         {"x", AM_PY_IN, &a.x}, {"weight", AM_PY_IN, &a.weight}, {"|bias", AM_PY_IN, &a.bias},
         {"|initial_state", AM_PY_IN, &a.initial_state}, {"docs", AM_PY_INDEX, &a.docs},
         {"|device_docs", AM_PY_IN, &a.device_docs}, {"$silu", AM_PY_BOOL, &a.silu})

PyMethodDef am_conv_methods[] = {
    AM_PY_METHOD(
        causal_conv1d_forward,
        "causal_conv1d_forward(y, final_state, x, weight, bias, initial_state, docs, device_docs=None, *, silu)\n--\n\n"
        "Depthwise causal convolution of x [T, C] with weight [C, W] inside documents; docs [2 N] are their "
        "starts and ends, on CUDA also beside x as device_docs. States are [N, C, W - 1]; they and bias may be None."),
    AM_PY_METHOD(
        causal_conv1d_backward,
        "causal_conv1d_backward(dx, dweight, dbias, dstate, partials, dy, dfinal, x, weight, bias, "
        "initial_state, docs, device_docs=None, *, silu)\n--\n\nGradients of causal_conv1d_forward. partials is float64 "
        "scratch [k, W + 1, C]; k decides the order of the sum over rows. "
        "dweight, dbias, dstate, dfinal may be None."),
    {NULL, NULL, 0, NULL},
};
