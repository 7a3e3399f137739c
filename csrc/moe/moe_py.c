#include "moe.h"

#include "am_py.h"

static PyObject *bytes_result(am_moe_args *a)
{
    return PyErr_Occurred() ? NULL : PyLong_FromLongLong(a->workspace_bytes);
}

AM_PY_OP_RESULT(moe_workspace, am_moe_workspace, am_moe_args, bytes_result, {"hidden", AM_PY_IN, &a.hidden},
                {"router_weight", AM_PY_IN, &a.router_weight}, {"gate_up", AM_PY_IN, &a.gate_up},
                {"down", AM_PY_IN, &a.down}, {"|padding", AM_PY_IN, &a.padding}, {"$top_k", AM_PY_I64, &a.top_k},
                {"$backward", AM_PY_BOOL, &a.backward})

AM_PY_OP(moe_forward, am_moe_forward, am_moe_args, {"out", AM_PY_OUT, &a.out}, {"load", AM_PY_OUT, &a.load},
         {"prob_sum", AM_PY_OUT, &a.prob_sum}, {"real_rows", AM_PY_OUT, &a.real_rows}, {"logits", AM_PY_OUT, &a.logits},
         {"chosen", AM_PY_OUT, &a.chosen}, {"weights", AM_PY_OUT, &a.weights}, {"workspace", AM_PY_OUT, &a.workspace},
         {"hidden", AM_PY_IN, &a.hidden}, {"router_weight", AM_PY_IN, &a.router_weight},
         {"gate_up", AM_PY_IN, &a.gate_up}, {"down", AM_PY_IN, &a.down}, {"|padding", AM_PY_IN, &a.padding},
         {"|products", AM_PY_OUT, &a.products}, {"$top_k", AM_PY_I64, &a.top_k})

AM_PY_OP(moe_backward, am_moe_backward, am_moe_args, {"workspace", AM_PY_OUT, &a.workspace},
         {"dout", AM_PY_IN, &a.dout}, {"hidden", AM_PY_IN, &a.hidden}, {"router_weight", AM_PY_IN, &a.router_weight},
         {"gate_up", AM_PY_IN, &a.gate_up}, {"down", AM_PY_IN, &a.down}, {"logits", AM_PY_IN, &a.logits},
         {"chosen", AM_PY_IN, &a.chosen}, {"weights", AM_PY_IN, &a.weights}, {"products", AM_PY_IN, &a.products},
         {"|padding", AM_PY_IN, &a.padding}, {"|dprob_sum", AM_PY_IN, &a.dprob_sum},
         {"|dhidden", AM_PY_OUT, &a.dhidden}, {"|drouter", AM_PY_OUT, &a.drouter},
         {"|dgate_up", AM_PY_OUT, &a.dgate_up}, {"|ddown", AM_PY_OUT, &a.ddown}, {"$top_k", AM_PY_I64, &a.top_k})

AM_PY_OP(shared_expert_forward, am_shared_expert_forward, am_shared_expert_args, {"out", AM_PY_OUT, &a.out},
         {"routed", AM_PY_IN, &a.routed}, {"shared", AM_PY_IN, &a.shared}, {"gate", AM_PY_IN, &a.gate})
AM_PY_OP(shared_expert_backward, am_shared_expert_backward, am_shared_expert_args, {"dshared", AM_PY_OUT, &a.dshared},
         {"dgate", AM_PY_OUT, &a.dgate}, {"dout", AM_PY_IN, &a.dout}, {"shared", AM_PY_IN, &a.shared},
         {"gate", AM_PY_IN, &a.gate})

PyMethodDef am_moe_methods[] = {
    AM_PY_METHOD(
        moe_workspace,
        "moe_workspace(hidden, router_weight, gate_up, down, padding=None, *, top_k, backward)\n--\n\nBytes of "
        "scratch that a pass needs."),
    AM_PY_METHOD(moe_forward,
                 "moe_forward(out, load, prob_sum, real_rows, logits, chosen, weights, workspace, hidden, "
                 "router_weight, gate_up, down, padding=None, products=None, *, top_k)\n--\n\nRouted experts, and what "
                 "the router did."),
    AM_PY_METHOD(
        moe_backward,
        "moe_backward(workspace, dout, hidden, router_weight, gate_up, down, logits, chosen, weights, products, "
        "padding=None, dprob_sum=None, dhidden=None, drouter=None, dgate_up=None, ddown=None, *, top_k)\n--\n\n"
        "Gradients of moe_forward, those that are given."),
    AM_PY_METHOD(shared_expert_forward,
                 "shared_expert_forward(out, routed, shared, gate)\n--\n\nout = routed + sigmoid(gate) * shared."),
    AM_PY_METHOD(shared_expert_backward,
                 "shared_expert_backward(dshared, dgate, dout, shared, gate)\n--\n\nGradient of "
                 "shared_expert_forward."),
    {NULL, NULL, 0, NULL},
};
