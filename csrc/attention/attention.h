/* attention.h -- packed attention with grouped heads.
 *
 * Per document n, with queries [q0, q1) and keys [k0, k1), query head h and key head h / (Hq / Hk):
 *   s = scale * q k^T      causal: query i of nq sees keys j <= i + nk - nq (aligned to the bottom right)
 *   lse = log sum exp(s)   out = exp(s - lse) v
 *   dv = p^T dout          ds = p * (dout v^T - rowsum(dout * out))          dq = scale * ds k      dk = scale * ds^T q
 *
 * A row without keys gives out 0, lse -inf and gradient 0. Rows outside every document may hold anything and get out
 * 0, lse -inf and gradient 0. fp32 and bf16, accumulated in fp32. Any strides whose last axis is contiguous. What a
 * document gets depends on its own rows alone, to the bit, and not on the number of threads.
 *
 * Head dims: 16, 32, 64, 72, 80, 128, 256.
 */
#ifndef AM_ATTENTION_H
#define AM_ATTENTION_H

#include "am_exec.h"

typedef struct am_attention_args {
    am_tensor out;       /* [T, Hq, D]  q's dtype   forward: out, backward: in */
    am_tensor lse;       /* [T, Hq]     f32         forward: out, backward: in */
    am_tensor lse_low;   /* [T, Hq]     f32         what lse lost in rounding; optional, the same way as lse */
    am_tensor dq;        /* [T, Hq, D]  q's dtype   backward: out */
    am_tensor dk;        /* [Tk, Hk, D] q's dtype   backward: out */
    am_tensor dv;        /* [Tk, Hk, D] q's dtype   backward: out */
    am_tensor workspace; /* [bytes]     u8          scratch, contiguous, any contents */
    am_tensor q;         /* [T, Hq, D]  f32 or bf16 in */
    am_tensor k;         /* [Tk, Hk, D] q's dtype   in */
    am_tensor v;         /* [Tk, Hk, D] q's dtype   in */
    am_tensor dout;      /* [T, Hq, D]  q's dtype   backward: in */
    am_i64_array docs;   /* [2 N] start and end of each document's queries, ascending */
    am_i64_array docs_k; /* [2 N] the same for its keys; left out: as docs */
    double scale;
    bool causal;
    bool backward;           /* workspace: of which pass */
    int64_t workspace_bytes; /* workspace: out */
} am_attention_args;

/* Bytes of scratch that the pass needs; reads q, k, docs, docs_k, causal and backward. */
am_status am_attention_workspace(am_attention_args *a, const am_exec *ex);

am_status am_attention_forward(const am_attention_args *a, const am_exec *ex);
am_status am_attention_backward(const am_attention_args *a, const am_exec *ex);

#endif
