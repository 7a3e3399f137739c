#include "rope_norm.h"

#include "am_py.h"

AM_PY_OP(mrope, am_mrope, am_rope_args, {"q_out", AM_PY_OUT, &a.q_out}, {"k_out", AM_PY_OUT, &a.k_out},
         {"q", AM_PY_IN, &a.q}, {"k", AM_PY_IN, &a.k}, {"position_ids", AM_PY_IN, &a.positions},
         {"$rotary_dim", AM_PY_I64, &a.rotary_dim}, {"$theta", AM_PY_F64, &a.theta},
         {"$section", AM_PY_INDEX, &a.section}, {"$inverse", AM_PY_BOOL, &a.inverse})
AM_PY_OP(vision_rope, am_vision_rope, am_rope_args, {"q_out", AM_PY_OUT, &a.q_out}, {"k_out", AM_PY_OUT, &a.k_out},
         {"q", AM_PY_IN, &a.q}, {"k", AM_PY_IN, &a.k}, {"position_ids", AM_PY_IN, &a.positions},
         {"$theta", AM_PY_F64, &a.theta}, {"$inverse", AM_PY_BOOL, &a.inverse})

AM_PY_OP(qk_norm_mrope_forward, am_rope_norm_forward, am_rope_norm_args, {"q_out", AM_PY_OUT, &a.rope.q_out},
         {"k_out", AM_PY_OUT, &a.rope.k_out}, {"rstd", AM_PY_OUT, &a.rstd}, {"q", AM_PY_IN, &a.rope.q},
         {"k", AM_PY_IN, &a.rope.k}, {"q_weight", AM_PY_IN, &a.q_weight}, {"k_weight", AM_PY_IN, &a.k_weight},
         {"position_ids", AM_PY_IN, &a.rope.positions}, {"$rotary_dim", AM_PY_I64, &a.rope.rotary_dim},
         {"$theta", AM_PY_F64, &a.rope.theta}, {"$section", AM_PY_INDEX, &a.rope.section}, {"$eps", AM_PY_F64, &a.eps},
         {"$zero_centered", AM_PY_BOOL, &a.zero_centered})
AM_PY_OP(qk_norm_mrope_backward, am_rope_norm_backward, am_rope_norm_grad_args, {"dq", AM_PY_OUT, &a.rope.q_out},
         {"dk", AM_PY_OUT, &a.rope.k_out}, {"|dq_weight", AM_PY_OUT, &a.dq_weight},
         {"|dk_weight", AM_PY_OUT, &a.dk_weight}, {"partials", AM_PY_OUT, &a.partials}, {"dq_out", AM_PY_IN, &a.dq_out},
         {"dk_out", AM_PY_IN, &a.dk_out}, {"q", AM_PY_IN, &a.rope.q}, {"k", AM_PY_IN, &a.rope.k},
         {"q_weight", AM_PY_IN, &a.q_weight}, {"k_weight", AM_PY_IN, &a.k_weight}, {"rstd", AM_PY_IN, &a.rstd},
         {"position_ids", AM_PY_IN, &a.rope.positions}, {"$rotary_dim", AM_PY_I64, &a.rope.rotary_dim},
         {"$theta", AM_PY_F64, &a.rope.theta}, {"$section", AM_PY_INDEX, &a.rope.section},
         {"$zero_centered", AM_PY_BOOL, &a.zero_centered})

PyMethodDef am_rope_methods[] = {
    AM_PY_METHOD(mrope, "mrope(q_out, k_out, q, k, position_ids, *, rotary_dim, theta, section, inverse)\n--\n\nTurns "
                        "the first rotary_dim elements of each head by interleaved (T, H, W) positions."),
    AM_PY_METHOD(vision_rope, "vision_rope(q_out, k_out, q, k, position_ids, *, theta, inverse)\n--\n\nTurns whole "
                              "heads by (H, W) positions."),
    AM_PY_METHOD(qk_norm_mrope_forward,
                 "qk_norm_mrope_forward(q_out, k_out, rstd, q, k, q_weight, k_weight, position_ids, *, rotary_dim, "
                 "theta, section, eps, zero_centered)\n--\n\nRMSNorm of every head, then mrope, in one pass."),
    AM_PY_METHOD(qk_norm_mrope_backward,
                 "qk_norm_mrope_backward(dq, dk, dq_weight, dk_weight, partials, dq_out, dk_out, q, k, q_weight, "
                 "k_weight, rstd, position_ids, *, rotary_dim, theta, section, zero_centered)\n--\n\nIts gradients; a "
                 "weight's is None where nobody asks."),
    {NULL, NULL, 0, NULL},
};
