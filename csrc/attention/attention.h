/* attention.h -- packed attention with grouped heads.
 *
 * Per document n, with queries [q0, q1) and keys [k0, k1), query head h and key head h / (Hq / Hk):
 *   s = scale * q k^T      causal: query i of nq sees keys j <= i + nk - nq (aligned to the bottom right)
 *   lse = log sum exp(s)   out = exp(s - lse) v
 *   dv = p^T dout          ds = p * (dout v^T - rowsum(dout * out))          dq = scale * ds k      dk = scale * ds^T q
 *
 * A row without keys gives out 0, lse -inf and gradient 0. Rows outside every document may hold anything and get out
 * 0, lse -inf and gradient 0. fp32 and bf16, on CUDA fp16 too, accumulated in fp32. Any strides whose last axis is
 * contiguous. What a document gets depends on its own rows alone, to the bit, and not on the number of threads.
 *
 * Head dims: 16, 32, 64, 72, 80, 128, 256.
 */
#ifndef AM_ATTENTION_H
#define AM_ATTENTION_H

#include "am_exec.h"

typedef struct am_attention_args {
    am_tensor out;         /* [T, Hq, D]  q's dtype   forward: out, backward: in */
    am_tensor lse;         /* [T, Hq]     f32         forward: out, backward: in */
    am_tensor lse_low;     /* [T, Hq]     f32         what lse lost in rounding; optional, the same way as lse */
    am_tensor dq;          /* [T, Hq, D]  q's dtype   backward: out */
    am_tensor dk;          /* [Tk, Hk, D] q's dtype   backward: out */
    am_tensor dv;          /* [Tk, Hk, D] q's dtype   backward: out */
    am_tensor workspace;   /* [bytes]     u8          scratch, contiguous, any contents */
    am_tensor q;           /* [T, Hq, D]  f32, bf16, f16 in */
    am_tensor k;           /* [Tk, Hk, D] q's dtype   in */
    am_tensor v;           /* [Tk, Hk, D] q's dtype   in */
    am_tensor dout;        /* [T, Hq, D]  q's dtype   backward: in */
    am_i64_array docs;     /* [2 N] start and end of each document's queries, ascending */
    am_i64_array docs_k;   /* [2 N] the same for its keys; left out: as docs */
    am_tensor device_docs; /* [3 N] or, with docs_k, [5 N] i64 in: docs, docs_k, and the documents' numbers in the order
                              of work (any). On CUDA needed, and what the kernels read: a captured graph replays what
                              it then holds. On the CPU ignored */
    double scale;
    bool causal;
    bool backward;           /* workspace: of which pass */
    int64_t workspace_bytes; /* workspace: out */
    const char *row;         /* row: out, static text */
} am_attention_args;

/* Bytes of scratch that the pass needs; reads q, k, docs, docs_k, causal and backward. */
am_status am_attention_workspace(am_attention_args *a, const am_exec *ex);

/* The name of the kernels that the pass runs for such inputs and fresh outputs. */
am_status am_attention_row(am_attention_args *a, const am_exec *ex);

am_status am_attention_forward(const am_attention_args *a, const am_exec *ex);
am_status am_attention_backward(const am_attention_args *a, const am_exec *ex);

/* On a CUDA device, with checked arguments; the row that plan names runs. In a build without CUDA: AM_ERR_UNSUPPORTED.
 */
am_status am_cuda_attention_plan(const am_attention_args *a, bool backward, const char **row, size_t *bytes);
am_status am_cuda_attention_forward(const am_attention_args *a, const am_exec *ex);
am_status am_cuda_attention_backward(const am_attention_args *a, const am_exec *ex);

#endif
