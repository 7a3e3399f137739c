#include "rope.h"

#include "am_py.h"

AM_PY_OP(mrope, am_mrope, am_rope_args, {"q_out", AM_PY_OUT, &a.q_out}, {"k_out", AM_PY_OUT, &a.k_out},
         {"q", AM_PY_IN, &a.q}, {"k", AM_PY_IN, &a.k}, {"position_ids", AM_PY_IN, &a.positions},
         {"$rotary_dim", AM_PY_I64, &a.rotary_dim}, {"$theta", AM_PY_F64, &a.theta},
         {"$section", AM_PY_INDEX, &a.section}, {"$inverse", AM_PY_BOOL, &a.inverse})
AM_PY_OP(vision_rope, am_vision_rope, am_rope_args, {"q_out", AM_PY_OUT, &a.q_out}, {"k_out", AM_PY_OUT, &a.k_out},
         {"q", AM_PY_IN, &a.q}, {"k", AM_PY_IN, &a.k}, {"position_ids", AM_PY_IN, &a.positions},
         {"$theta", AM_PY_F64, &a.theta}, {"$inverse", AM_PY_BOOL, &a.inverse})

PyMethodDef am_rope_methods[] = {
    AM_PY_METHOD(mrope, "mrope(q_out, k_out, q, k, position_ids, *, rotary_dim, theta, section, inverse)\n--\n\nTurns "
                        "the first rotary_dim elements of each head by interleaved (T, H, W) positions."),
    AM_PY_METHOD(vision_rope, "vision_rope(q_out, k_out, q, k, position_ids, *, theta, inverse)\n--\n\nTurns whole "
                              "heads by (H, W) positions."),
    {NULL, NULL, 0, NULL},
};
