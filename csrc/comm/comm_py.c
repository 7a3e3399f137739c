#include "comm.h"

#include "am_py.h"

static PyObject *id_result(am_comm_id_args *a) { return PyErr_Occurred() ? NULL : PyUnicode_FromString(a->id); }

static PyObject *open_result(am_comm_open_args *a) { return PyErr_Occurred() ? NULL : PyLong_FromLongLong(a->comm); }

static PyObject *state_result(am_comm_state_args *a)
{
    return PyErr_Occurred() ? NULL
                            : Py_BuildValue("(OO)", a->ready ? Py_True : Py_False, a->pending ? Py_True : Py_False);
}

static PyObject *window_result(am_comm_window_args *a)
{
    return PyErr_Occurred() ? NULL : PyUnicode_FromString(a->handle);
}

AM_PY_OP(comm_reduce_parts, am_comm_reduce_parts, am_comm_reduce_parts_args, {"out", AM_PY_OUT, &a.out},
         {"parts", AM_PY_IN, &a.parts}, {"$scale", AM_PY_F64, &a.scale})
AM_PY_OP_RESULT(comm_id, am_comm_id, am_comm_id_args, id_result, )
AM_PY_OP_RESULT(comm_open, am_comm_open, am_comm_open_args, open_result, {"id", AM_PY_STR, &a.id},
                {"$rank", AM_PY_I64, &a.rank}, {"ranks", AM_PY_I64, &a.ranks}, {"device", AM_PY_I64, &a.device})
AM_PY_OP_RESULT(comm_state, am_comm_state, am_comm_state_args, state_result, {"comm", AM_PY_I64, &a.comm})
AM_PY_OP(comm_exchange, am_comm_exchange, am_comm_exchange_args, {"arriving", AM_PY_OUT, &a.arriving},
         {"sent", AM_PY_IN, &a.sent}, {"$comm", AM_PY_I64, &a.comm}, {"send_bytes", AM_PY_INDEX, &a.send_bytes},
         {"receive_bytes", AM_PY_INDEX, &a.receive_bytes}, {"|joined", AM_PY_BOOL, &a.joined})
AM_PY_OP_RESULT(comm_window, am_comm_window, am_comm_window_args, window_result, {"comm", AM_PY_I64, &a.comm},
                {"$chunk", AM_PY_I64, &a.chunk})
AM_PY_OP(comm_attach, am_comm_attach, am_comm_attach_args, {"comm", AM_PY_I64, &a.comm},
         {"$handles", AM_PY_STR, &a.handles})
AM_PY_OP(comm_sum, am_comm_sum, am_comm_sum_args, {"out", AM_PY_OUT, &a.out}, {"sent", AM_PY_IN, &a.sent},
         {"$comm", AM_PY_I64, &a.comm}, {"scale", AM_PY_F64, &a.scale})
AM_PY_OP(comm_join, am_comm_join, am_comm_join_args, {"arriving", AM_PY_OUT, &a.arriving},
         {"$comm", AM_PY_I64, &a.comm})
AM_PY_OP(comm_close, am_comm_close, am_comm_close_args, {"comm", AM_PY_I64, &a.comm}, {"$abort", AM_PY_BOOL, &a.abort})

PyMethodDef am_comm_methods[] = {
    AM_PY_METHOD(comm_reduce_parts,
                 "comm_reduce_parts(out, parts, *, scale)\n--\n\nout[i] = scale * sum over r of parts[r][i]: out [n], "
                 "parts [R, n], each float32 or bfloat16; summed in float32 from r = 0 on, rounded once."),
    AM_PY_METHOD(comm_id, "comm_id()\n--\n\nWhat the ranks of a new NCCL communicator must all be given: 256 letters."),
    AM_PY_METHOD(comm_open, "comm_open(id, *, rank, ranks, device)\n--\n\nBegins to open an NCCL communicator of this "
                            "rank's GPU, and returns its number; comm_state tells when it is open."),
    AM_PY_METHOD(comm_state, "comm_state(comm)\n--\n\n(whether it is open, whether what comm_exchange began is under "
                             "way still); RuntimeError: what NCCL says is wrong with it."),
    AM_PY_METHOD(
        comm_exchange,
        "comm_exchange(arriving, sent, *, comm, send_bytes, receive_bytes, joined=False)\n--\n\nSends so many "
        "bytes to each rank and receives so many from each, on a stream of its own behind the current one; does "
        "not wait. joined: the current stream waits at once, and carries short messages itself."),
    AM_PY_METHOD(comm_window,
                 "comm_window(comm, *, chunk)\n--\n\nMakes memory of this rank's GPU that the others of one machine "
                 "write into, in places of so many bytes, and returns its handle, 192 letters."),
    AM_PY_METHOD(comm_attach, "comm_attach(comm, *, handles)\n--\n\nMaps the windows of all ranks, whose handles are "
                              "given side by side: from now on bytes travel through them. \"\" drops this one's."),
    AM_PY_METHOD(comm_sum, "comm_sum(out, sent, *, comm, scale)\n--\n\nout [n] = scale * the sum, in the order of "
                           "ranks, of every rank's row for this one; sent [ranks, n]; float32 or bfloat16, summed in "
                           "float32, rounded once. Through windows; comm_join waits for it."),
    AM_PY_METHOD(comm_join, "comm_join(arriving, *, comm)\n--\n\nThe current stream of `arriving` waits for what "
                            "comm_exchange began; the host does not."),
    AM_PY_METHOD(comm_close,
                 "comm_close(comm, *, abort)\n--\n\nCloses a communicator; with abort, what is under way ends "
                 "at once, on this rank and those that wait for it here."),
    {NULL, NULL, 0, NULL},
};
