#include "mlp.h"

#include "am_py.h"

AM_PY_OP(swiglu_forward, am_swiglu_forward, am_mlp_args, {"y", AM_PY_OUT, &a.y}, {"gate", AM_PY_IN, &a.a},
         {"up", AM_PY_IN, &a.b})
AM_PY_OP(swiglu_backward, am_swiglu_backward, am_mlp_args, {"dgate", AM_PY_OUT, &a.da}, {"dup", AM_PY_OUT, &a.db},
         {"dy", AM_PY_IN, &a.dy}, {"gate", AM_PY_IN, &a.a}, {"up", AM_PY_IN, &a.b})
AM_PY_OP(sigmoid_gate_forward, am_sigmoid_gate_forward, am_mlp_args, {"y", AM_PY_OUT, &a.y}, {"x", AM_PY_IN, &a.a},
         {"gate", AM_PY_IN, &a.b})
AM_PY_OP(sigmoid_gate_backward, am_sigmoid_gate_backward, am_mlp_args, {"dx", AM_PY_OUT, &a.da},
         {"dgate", AM_PY_OUT, &a.db}, {"dy", AM_PY_IN, &a.dy}, {"x", AM_PY_IN, &a.a}, {"gate", AM_PY_IN, &a.b})
AM_PY_OP(gelu_forward, am_gelu_forward, am_mlp_args, {"y", AM_PY_OUT, &a.y}, {"x", AM_PY_IN, &a.a},
         {"$tanh", AM_PY_BOOL, &a.tanh})
AM_PY_OP(gelu_backward, am_gelu_backward, am_mlp_args, {"dx", AM_PY_OUT, &a.da}, {"dy", AM_PY_IN, &a.dy},
         {"x", AM_PY_IN, &a.a}, {"$tanh", AM_PY_BOOL, &a.tanh})

PyMethodDef am_mlp_methods[] = {
    AM_PY_METHOD(swiglu_forward, "swiglu_forward(y, gate, up)\n--\n\ny = silu(gate) * up."),
    AM_PY_METHOD(swiglu_backward, "swiglu_backward(dgate, dup, dy, gate, up)\n--\n\nGradient of swiglu_forward."),
    AM_PY_METHOD(sigmoid_gate_forward, "sigmoid_gate_forward(y, x, gate)\n--\n\ny = x * sigmoid(gate)."),
    AM_PY_METHOD(sigmoid_gate_backward,
                 "sigmoid_gate_backward(dx, dgate, dy, x, gate)\n--\n\nGradient of sigmoid_gate_forward."),
    AM_PY_METHOD(gelu_forward, "gelu_forward(y, x, *, tanh)\n--\n\nGELU by erf, or by its tanh approximation."),
    AM_PY_METHOD(gelu_backward, "gelu_backward(dx, dy, x, *, tanh)\n--\n\nGradient of gelu_forward."),
    {NULL, NULL, 0, NULL},
};
