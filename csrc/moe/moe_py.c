#include "moe.h"

#include "am_py.h"

static PyObject *bytes_result(am_moe_args *a)
{
    return PyErr_Occurred() ? NULL : PyLong_FromLongLong(a->workspace_bytes);
}

AM_PY_OP_RESULT(moe_workspace, am_moe_workspace, am_moe_args, bytes_result, {"hidden", AM_PY_IN, &a.hidden},
                {"|router_weight", AM_PY_IN, &a.router_weight}, {"|gate_up", AM_PY_IN, &a.gate_up},
                {"|down", AM_PY_IN, &a.down}, {"|padding", AM_PY_IN, &a.padding}, {"$top_k", AM_PY_I64, &a.top_k},
                {"$backward", AM_PY_BOOL, &a.backward}, {"$|counts", AM_PY_INDEX, &a.counts})

static PyObject *row_result(am_moe_args *a) { return PyErr_Occurred() ? NULL : PyUnicode_FromString(a->row); }

AM_PY_OP_RESULT(moe_row, am_moe_row, am_moe_args, row_result, {"hidden", AM_PY_IN, &a.hidden},
                {"|router_weight", AM_PY_IN, &a.router_weight}, {"|gate_up", AM_PY_IN, &a.gate_up},
                {"|down", AM_PY_IN, &a.down}, {"|padding", AM_PY_IN, &a.padding}, {"$top_k", AM_PY_I64, &a.top_k},
                {"$backward", AM_PY_BOOL, &a.backward}, {"$|counts", AM_PY_INDEX, &a.counts})

AM_PY_OP(moe_forward, am_moe_forward, am_moe_args, {"|out", AM_PY_OUT, &a.out}, {"load", AM_PY_OUT, &a.load},
         {"prob_sum", AM_PY_OUT, &a.prob_sum}, {"real_rows", AM_PY_OUT, &a.real_rows}, {"logits", AM_PY_OUT, &a.logits},
         {"chosen", AM_PY_OUT, &a.chosen}, {"weights", AM_PY_OUT, &a.weights}, {"workspace", AM_PY_OUT, &a.workspace},
         {"hidden", AM_PY_IN, &a.hidden}, {"router_weight", AM_PY_IN, &a.router_weight},
         {"gate_up", AM_PY_IN, &a.gate_up}, {"down", AM_PY_IN, &a.down}, {"|padding", AM_PY_IN, &a.padding},
         {"|products", AM_PY_OUT, &a.products}, {"$top_k", AM_PY_I64, &a.top_k}, {"$|counts", AM_PY_INDEX, &a.counts})

AM_PY_OP(moe_backward, am_moe_backward, am_moe_args, {"workspace", AM_PY_OUT, &a.workspace},
         {"dout", AM_PY_IN, &a.dout}, {"hidden", AM_PY_IN, &a.hidden}, {"router_weight", AM_PY_IN, &a.router_weight},
         {"gate_up", AM_PY_IN, &a.gate_up}, {"down", AM_PY_IN, &a.down}, {"logits", AM_PY_IN, &a.logits},
         {"chosen", AM_PY_IN, &a.chosen}, {"weights", AM_PY_IN, &a.weights}, {"products", AM_PY_IN, &a.products},
         {"|padding", AM_PY_IN, &a.padding}, {"|dprob_sum", AM_PY_IN, &a.dprob_sum},
         {"|dhidden", AM_PY_OUT, &a.dhidden}, {"|drouter", AM_PY_OUT, &a.drouter},
         {"|dgate_up", AM_PY_OUT, &a.dgate_up}, {"|ddown", AM_PY_OUT, &a.ddown}, {"$top_k", AM_PY_I64, &a.top_k},
         {"$|accumulate", AM_PY_BOOL, &a.accumulate}, {"$|counts", AM_PY_INDEX, &a.counts})

AM_PY_OP(moe_route_forward, am_moe_route_forward, am_moe_args, {"logits", AM_PY_OUT, &a.logits},
         {"chosen", AM_PY_OUT, &a.chosen}, {"weights", AM_PY_OUT, &a.weights}, {"load", AM_PY_OUT, &a.load},
         {"prob_sum", AM_PY_OUT, &a.prob_sum}, {"real_rows", AM_PY_OUT, &a.real_rows},
         {"workspace", AM_PY_OUT, &a.workspace}, {"hidden", AM_PY_IN, &a.hidden},
         {"router_weight", AM_PY_IN, &a.router_weight}, {"|padding", AM_PY_IN, &a.padding},
         {"$top_k", AM_PY_I64, &a.top_k})

AM_PY_OP(moe_route_backward, am_moe_route_backward, am_moe_args, {"workspace", AM_PY_OUT, &a.workspace},
         {"hidden", AM_PY_IN, &a.hidden}, {"router_weight", AM_PY_IN, &a.router_weight},
         {"logits", AM_PY_IN, &a.logits}, {"chosen", AM_PY_IN, &a.chosen}, {"weights", AM_PY_IN, &a.weights},
         {"dweights", AM_PY_IN, &a.dweights}, {"|padding", AM_PY_IN, &a.padding},
         {"|dprob_sum", AM_PY_IN, &a.dprob_sum}, {"|dhidden", AM_PY_OUT, &a.dhidden},
         {"|drouter", AM_PY_OUT, &a.drouter}, {"$top_k", AM_PY_I64, &a.top_k})

AM_PY_OP(moe_experts_forward, am_moe_experts_forward, am_moe_args, {"|out", AM_PY_OUT, &a.out},
         {"workspace", AM_PY_OUT, &a.workspace}, {"hidden", AM_PY_IN, &a.hidden}, {"gate_up", AM_PY_IN, &a.gate_up},
         {"down", AM_PY_IN, &a.down}, {"chosen", AM_PY_IN, &a.chosen}, {"weights", AM_PY_IN, &a.weights},
         {"|products", AM_PY_OUT, &a.products}, {"$top_k", AM_PY_I64, &a.top_k}, {"$|counts", AM_PY_INDEX, &a.counts})

AM_PY_OP(moe_experts_backward, am_moe_experts_backward, am_moe_args, {"workspace", AM_PY_OUT, &a.workspace},
         {"dout", AM_PY_IN, &a.dout}, {"hidden", AM_PY_IN, &a.hidden}, {"gate_up", AM_PY_IN, &a.gate_up},
         {"down", AM_PY_IN, &a.down}, {"chosen", AM_PY_IN, &a.chosen}, {"weights", AM_PY_IN, &a.weights},
         {"products", AM_PY_IN, &a.products}, {"|dhidden", AM_PY_OUT, &a.dhidden},
         {"|dweights", AM_PY_OUT, &a.dweights}, {"|dgate_up", AM_PY_OUT, &a.dgate_up}, {"|ddown", AM_PY_OUT, &a.ddown},
         {"$top_k", AM_PY_I64, &a.top_k}, {"$|accumulate", AM_PY_BOOL, &a.accumulate},
         {"$|counts", AM_PY_INDEX, &a.counts})

AM_PY_OP(shared_expert_forward, am_shared_expert_forward, am_shared_expert_args, {"out", AM_PY_OUT, &a.out},
         {"routed", AM_PY_IN, &a.routed}, {"shared", AM_PY_IN, &a.shared}, {"gate", AM_PY_IN, &a.gate})
AM_PY_OP(shared_expert_backward, am_shared_expert_backward, am_shared_expert_args, {"dshared", AM_PY_OUT, &a.dshared},
         {"dgate", AM_PY_OUT, &a.dgate}, {"dout", AM_PY_IN, &a.dout}, {"shared", AM_PY_IN, &a.shared},
         {"gate", AM_PY_IN, &a.gate})

PyMethodDef am_moe_methods[] = {
    AM_PY_METHOD(moe_workspace,
                 "moe_workspace(hidden, router_weight=None, gate_up=None, down=None, padding=None, *, top_k, backward, "
                 "counts=None)"
                 "\n--\n\nBytes of scratch that a pass needs: of the layer, or of the half whose weights are given."),
    AM_PY_METHOD(moe_row,
                 "moe_row(hidden, router_weight=None, gate_up=None, down=None, padding=None, *, top_k, backward, "
                 "counts=None)"
                 "\n--\n\nThe name of the kernels that make the experts' products, without experts the router's."),
    AM_PY_METHOD(moe_forward,
                 "moe_forward(out, load, prob_sum, real_rows, logits, chosen, weights, workspace, hidden, "
                 "router_weight, gate_up, down, padding=None, products=None, *, top_k, counts=None)\n--\n\n"
                 "Routed experts, and what the router did. Without out (None) down's products are not made."),
    AM_PY_METHOD(
        moe_backward,
        "moe_backward(workspace, dout, hidden, router_weight, gate_up, down, logits, chosen, weights, products, "
        "padding=None, dprob_sum=None, dhidden=None, drouter=None, dgate_up=None, ddown=None, *, top_k, "
        "accumulate=False, counts=None)\n--\n\nGradients of moe_forward, those that are given; those of experts' "
        "weights float32 or of the weights' dtype, with accumulate added to what they hold."),
    AM_PY_METHOD(moe_route_forward,
                 "moe_route_forward(logits, chosen, weights, load, prob_sum, real_rows, workspace, hidden, "
                 "router_weight, padding=None, *, top_k)\n--\n\nThe router alone."),
    AM_PY_METHOD(moe_route_backward,
                 "moe_route_backward(workspace, hidden, router_weight, logits, chosen, weights, dweights, "
                 "padding=None, dprob_sum=None, dhidden=None, drouter=None, *, top_k)\n--\n\nGradients of "
                 "moe_route_forward, those that are given."),
    AM_PY_METHOD(moe_experts_forward,
                 "moe_experts_forward(out, workspace, hidden, gate_up, down, chosen, weights, products=None, *, top_k, "
                 "counts=None)"
                 "\n--\n\nThe experts alone, on rows that come with their choice; -1 is no expert here."),
    AM_PY_METHOD(moe_experts_backward,
                 "moe_experts_backward(workspace, dout, hidden, gate_up, down, chosen, weights, products, "
                 "dhidden=None, dweights=None, dgate_up=None, ddown=None, *, top_k, accumulate=False, "
                 "counts=None)\n--\n\n"
                 "Gradients of moe_experts_forward, those that are given; those of weights as moe_backward's."),
    AM_PY_METHOD(shared_expert_forward,
                 "shared_expert_forward(out, routed, shared, gate)\n--\n\nout = routed + sigmoid(gate) * shared."),
    AM_PY_METHOD(shared_expert_backward,
                 "shared_expert_backward(dshared, dgate, dout, shared, gate)\n--\n\nGradient of "
                 "shared_expert_forward."),
    {NULL, NULL, 0, NULL},
};
