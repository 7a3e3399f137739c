#include "am_py.h"
#include "attention.h"

static PyObject *bytes_result(am_attention_args *a)
{
    return PyErr_Occurred() ? NULL : PyLong_FromLongLong(a->workspace_bytes);
}

AM_PY_OP_RESULT(attention_workspace, am_attention_workspace, am_attention_args, bytes_result, {"q", AM_PY_IN, &a.q},
                {"k", AM_PY_IN, &a.k}, {"v", AM_PY_IN, &a.v}, {"docs", AM_PY_INDEX, &a.docs},
                {"|docs_k", AM_PY_INDEX, &a.docs_k}, {"$causal", AM_PY_BOOL, &a.causal},
                {"$backward", AM_PY_BOOL, &a.backward})

static PyObject *row_result(am_attention_args *a) { return PyErr_Occurred() ? NULL : PyUnicode_FromString(a->row); }

AM_PY_OP_RESULT(attention_row, am_attention_row, am_attention_args, row_result, {"q", AM_PY_IN, &a.q},
                {"k", AM_PY_IN, &a.k}, {"v", AM_PY_IN, &a.v}, {"docs", AM_PY_INDEX, &a.docs},
                {"|docs_k", AM_PY_INDEX, &a.docs_k}, {"$causal", AM_PY_BOOL, &a.causal},
                {"$backward", AM_PY_BOOL, &a.backward})

AM_PY_OP(attention_forward, am_attention_forward, am_attention_args, {"out", AM_PY_OUT, &a.out},
         {"lse", AM_PY_OUT, &a.lse}, {"workspace", AM_PY_OUT, &a.workspace}, {"q", AM_PY_IN, &a.q},
         {"k", AM_PY_IN, &a.k}, {"v", AM_PY_IN, &a.v}, {"docs", AM_PY_INDEX, &a.docs},
         {"|docs_k", AM_PY_INDEX, &a.docs_k}, {"|lse_low", AM_PY_OUT, &a.lse_low},
         {"|device_docs", AM_PY_IN, &a.device_docs}, {"$scale", AM_PY_F64, &a.scale},
         {"$causal", AM_PY_BOOL, &a.causal})

AM_PY_OP(attention_backward, am_attention_backward, am_attention_args, {"dq", AM_PY_OUT, &a.dq},
         {"dk", AM_PY_OUT, &a.dk}, {"dv", AM_PY_OUT, &a.dv}, {"workspace", AM_PY_OUT, &a.workspace},
         {"dout", AM_PY_IN, &a.dout}, {"q", AM_PY_IN, &a.q}, {"k", AM_PY_IN, &a.k}, {"v", AM_PY_IN, &a.v},
         {"out", AM_PY_IN, &a.out}, {"lse", AM_PY_IN, &a.lse}, {"docs", AM_PY_INDEX, &a.docs},
         {"|docs_k", AM_PY_INDEX, &a.docs_k}, {"|lse_low", AM_PY_IN, &a.lse_low},
         {"|device_docs", AM_PY_IN, &a.device_docs}, {"$scale", AM_PY_F64, &a.scale},
         {"$causal", AM_PY_BOOL, &a.causal})

PyMethodDef am_attention_methods[] = {
    AM_PY_METHOD(attention_workspace,
                 "attention_workspace(q, k, v, docs, docs_k=None, *, causal, backward)\n--\n\nBytes of scratch that a "
                 "pass over these documents needs."),
    AM_PY_METHOD(attention_row,
                 "attention_row(q, k, v, docs, docs_k=None, *, causal, backward)\n--\n\nThe name of the kernels that "
                 "run for such inputs and fresh outputs."),
    AM_PY_METHOD(
        attention_forward,
        "attention_forward(out, lse, workspace, q, k, v, docs, docs_k=None, lse_low=None, device_docs=None, *, scale, "
        "causal)\n--\n\n"
        "out [T, Hq, D] and lse [T, Hq] f32 of q [T, Hq, D], k and v [Tk, Hk, D], f32 or bf16; docs [2 N] are "
        "starts and ends of the documents' queries, docs_k of their keys; lse_low [T, Hq] f32 takes what lse loses in rounding, for the backward pass. On CUDA f16 too, "
        "and device_docs is needed: int64 [3 N] or [5 N] of docs, docs_k and the order of work, beside q."),
    AM_PY_METHOD(
        attention_backward,
        "attention_backward(dq, dk, dv, workspace, dout, q, k, v, out, lse, docs, docs_k=None, "
        "lse_low=None, device_docs=None, *, scale, causal)\n--\n\nGradients of attention_forward for dout [T, Hq, D]; always the same bits."),
    {NULL, NULL, 0, NULL},
};
