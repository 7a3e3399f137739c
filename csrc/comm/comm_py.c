#include "comm.h"

#include "am_py.h"

AM_PY_OP(comm_reduce_parts, am_comm_reduce_parts, am_comm_reduce_parts_args, {"out", AM_PY_OUT, &a.out},
         {"parts", AM_PY_IN, &a.parts}, {"$scale", AM_PY_F64, &a.scale})

PyMethodDef am_comm_methods[] = {
    AM_PY_METHOD(comm_reduce_parts,
                 "comm_reduce_parts(out, parts, *, scale)\n--\n\nout[i] = scale * sum over r of parts[r][i]: out [n], "
                 "parts [R, n], each float32 or bfloat16; summed in float32 from r = 0 on, rounded once."),
    {NULL, NULL, 0, NULL},
};
