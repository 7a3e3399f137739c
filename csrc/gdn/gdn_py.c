#include "am_py.h"
#include "gdn.h"

static PyObject *bytes_result(am_gdn_args *a)
{
    return PyErr_Occurred() ? NULL : PyLong_FromLongLong(a->workspace_bytes);
}

AM_PY_OP_RESULT(gated_delta_rule_workspace, am_gdn_workspace, am_gdn_args, bytes_result, {"q", AM_PY_IN, &a.q},
                {"v", AM_PY_IN, &a.v}, {"docs", AM_PY_INDEX, &a.docs}, {"$backward", AM_PY_BOOL, &a.backward})

static PyObject *row_result(am_gdn_args *a) { return PyErr_Occurred() ? NULL : PyUnicode_FromString(a->row); }

AM_PY_OP_RESULT(gated_delta_rule_row, am_gdn_row, am_gdn_args, row_result, {"q", AM_PY_IN, &a.q}, {"k", AM_PY_IN, &a.k},
                {"v", AM_PY_IN, &a.v}, {"docs", AM_PY_INDEX, &a.docs}, {"$backward", AM_PY_BOOL, &a.backward})

AM_PY_OP(gated_delta_rule_forward, am_gdn_forward, am_gdn_args, {"o", AM_PY_OUT, &a.o},
         {"workspace", AM_PY_OUT, &a.workspace}, {"q", AM_PY_IN, &a.q}, {"k", AM_PY_IN, &a.k}, {"v", AM_PY_IN, &a.v},
         {"g", AM_PY_IN, &a.g}, {"beta", AM_PY_IN, &a.beta}, {"docs", AM_PY_INDEX, &a.docs},
         {"|initial", AM_PY_IN, &a.initial}, {"|final", AM_PY_OUT, &a.final}, {"|states", AM_PY_OUT, &a.states},
         {"|device_docs", AM_PY_IN, &a.device_docs}, {"$scale", AM_PY_F64, &a.scale},
         {"$l2norm", AM_PY_BOOL, &a.l2norm}, {"|part", AM_PY_I64, &a.part})

AM_PY_OP(gated_delta_rule_backward, am_gdn_backward, am_gdn_args, {"dq", AM_PY_OUT, &a.dq}, {"dk", AM_PY_OUT, &a.dk},
         {"dv", AM_PY_OUT, &a.dv}, {"dg", AM_PY_OUT, &a.dg}, {"dbeta", AM_PY_OUT, &a.dbeta},
         {"workspace", AM_PY_OUT, &a.workspace}, {"dout", AM_PY_IN, &a.dout}, {"q", AM_PY_IN, &a.q},
         {"k", AM_PY_IN, &a.k}, {"v", AM_PY_IN, &a.v}, {"g", AM_PY_IN, &a.g}, {"beta", AM_PY_IN, &a.beta},
         {"docs", AM_PY_INDEX, &a.docs}, {"|initial", AM_PY_IN, &a.initial}, {"|states", AM_PY_IN, &a.states},
         {"|dfinal", AM_PY_IN, &a.dfinal}, {"|dinitial", AM_PY_OUT, &a.dinitial},
         {"|device_docs", AM_PY_IN, &a.device_docs}, {"$scale", AM_PY_F64, &a.scale},
         {"$l2norm", AM_PY_BOOL, &a.l2norm}, {"|part", AM_PY_I64, &a.part})

PyMethodDef am_gdn_methods[] = {
    AM_PY_METHOD(gated_delta_rule_workspace,
                 "gated_delta_rule_workspace(q, v, docs, *, backward)\n--\n\nBytes of scratch that a pass over these "
                 "documents needs."),
    AM_PY_METHOD(gated_delta_rule_row,
                 "gated_delta_rule_row(q, k, v, docs, *, backward)\n--\n\nThe name of the kernels that run for such "
                 "inputs and fresh outputs."),
    AM_PY_METHOD(
        gated_delta_rule_forward,
        "gated_delta_rule_forward(o, workspace, q, k, v, g, beta, docs, initial=None, final=None, "
        "states=None, device_docs=None, *, scale, l2norm, part=0)\n--\n\n"
        "o [T, Hv, Dv] of q and k [T, Hk, Dk], v [T, Hv, Dv], f32 or bf16, g [T, Hv] f32 and beta [T, Hv]; docs "
        "[2 N] are starts and ends of the documents, initial and final [N, Hv, Dk, Dv] f32 their states. "
        "states [T // 1024, Hv, Dk, Dv] f32 takes what the backward pass starts from. On CUDA device_docs is needed: int64 "
        "[3 N] of docs and the order of work, beside q. part 1: only what needs no state, into the workspace; 2: the rest, "
        "from it."),
    AM_PY_METHOD(
        gated_delta_rule_backward,
        "gated_delta_rule_backward(dq, dk, dv, dg, dbeta, workspace, dout, q, k, v, g, beta, docs, "
        "initial=None, states=None, dfinal=None, dinitial=None, device_docs=None, *, scale, l2norm, part=0)\n--\n\n"
        "Gradients of gated_delta_rule_forward for dout and dfinal; always the same bits. part 1: dinitial alone, "
        "the others hold anything."),
    {NULL, NULL, 0, NULL},
};
