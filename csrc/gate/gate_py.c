#include "gate.h"

#include "am_py.h"

AM_PY_OP(gdn_gate_forward, am_gdn_gate_forward, am_gate_args, {"g", AM_PY_OUT, &a.g}, {"beta", AM_PY_OUT, &a.beta},
         {"a", AM_PY_IN, &a.a}, {"b", AM_PY_IN, &a.b}, {"A_log", AM_PY_IN, &a.A_log}, {"dt_bias", AM_PY_IN, &a.dt_bias})
AM_PY_OP(gdn_gate_backward, am_gdn_gate_backward, am_gate_args, {"da", AM_PY_OUT, &a.da}, {"db", AM_PY_OUT, &a.db},
         {"dA_log", AM_PY_OUT, &a.dA_log}, {"ddt_bias", AM_PY_OUT, &a.ddt_bias}, {"partials", AM_PY_OUT, &a.partials},
         {"dg", AM_PY_IN, &a.dg}, {"dbeta", AM_PY_IN, &a.dbeta}, {"a", AM_PY_IN, &a.a}, {"b", AM_PY_IN, &a.b},
         {"A_log", AM_PY_IN, &a.A_log}, {"dt_bias", AM_PY_IN, &a.dt_bias})

PyMethodDef am_gate_methods[] = {
    AM_PY_METHOD(gdn_gate_forward, "gdn_gate_forward(g, beta, a, b, A_log, dt_bias)\n--\n\n"
                                   "g = -exp(A_log) * softplus(a + dt_bias) in float32, beta = sigmoid(b)."),
    AM_PY_METHOD(gdn_gate_backward,
                 "gdn_gate_backward(da, db, dA_log, ddt_bias, partials, dg, dbeta, a, b, A_log, dt_bias)\n--\n\n"
                 "Gradients of gdn_gate_forward. partials is float64 scratch [k, 2, H]; k decides the order of the sum "
                 "over rows."),
    {NULL, NULL, 0, NULL},
};
