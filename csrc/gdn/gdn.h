/* gdn.h -- the gated delta rule over packed documents.
 *
 * Per document, with a state S [Dk, Dv] for each value head h, key head h / (Hv / Hk), token by token:
 *   q^ = scale q / |q|     k^ = k / |k|     |x| = sqrt(sum x^2 + 1e-6), or 1 without l2norm
 *   S <- exp(g) S          S <- S + k^ (beta (v - S^T k^))^T          o = S^T q^
 *
 * Computed in chunks of 64 tokens. With c the running sum of g in a chunk and D[i, j] = exp(c_i - c_j) for j <= i:
 *   A = strictly lower part of beta_i (k^_i . k^_j) D          P = lower part of (q^_i . k^_j) D
 *   (I + A) V' = beta (v - exp(c) K S)                         o = exp(c) Q S + P V'
 *   S <- exp(c_last) S + K^T (exp(c_last - c) V')
 * so only exponentials of differences <= 0 are formed when g <= 0.
 *
 * The state starts at initial (0 when left out) at every document; an empty document passes its state through. Rows
 * outside every document may hold anything; their results are 0. q, k, v fp32 or bf16, all sums fp32. Any strides whose
 * last axis is contiguous; g and beta any strides. What a document gets depends on its own rows alone, to the bit, and
 * not on the number of threads. Dk and Dv: multiples of 8 up to 256.
 *
 * Yang, Kautz, Hatamizadeh: Gated Delta Networks, ICLR 2025.
 */
#ifndef AM_GDN_H
#define AM_GDN_H

#include "am_exec.h"

/* What of a pass is made. Early, forward: what needs no state, left in the workspace; nothing else is written. Rest: o
 * and states, from that. Early, backward: dinitial; the other gradients hold anything. */
typedef enum am_gdn_part { AM_GDN_WHOLE, AM_GDN_EARLY, AM_GDN_REST } am_gdn_part;

enum { AM_GDN_STEP = 1024 }; /* a document's state is kept for the backward pass once in so many tokens */

typedef struct am_gdn_args {
    am_tensor o;           /* [T, Hv, Dv]       q's dtype        forward: out */
    am_tensor final;       /* [N, Hv, Dk, Dv]   f32              forward: out; optional */
    am_tensor states;      /* [S, Hv, Dk, Dv]   f32              forward: out, optional; backward: in. S >= T / STEP */
    am_tensor dq;          /* [T, Hk, Dk]       q's dtype        backward: out */
    am_tensor dk;          /* [T, Hk, Dk]       q's dtype        backward: out */
    am_tensor dv;          /* [T, Hv, Dv]       q's dtype        backward: out */
    am_tensor dg;          /* [T, Hv]           f32              backward: out */
    am_tensor dbeta;       /* [T, Hv]           beta's dtype     backward: out */
    am_tensor dinitial;    /* [N, Hv, Dk, Dv]   f32              backward: out; optional */
    am_tensor workspace;   /* [bytes]           u8               scratch, contiguous, any contents */
    am_tensor dout;        /* [T, Hv, Dv]       q's dtype        backward: in */
    am_tensor dfinal;      /* [N, Hv, Dk, Dv]   f32              backward: in; optional: 0 */
    am_tensor q;           /* [T, Hk, Dk]       f32 or bf16      in */
    am_tensor k;           /* [T, Hk, Dk]       q's dtype        in */
    am_tensor v;           /* [T, Hv, Dv]       q's dtype        in */
    am_tensor g;           /* [T, Hv]           f32              in */
    am_tensor beta;        /* [T, Hv]           q's dtype or f32 in */
    am_tensor initial;     /* [N, Hv, Dk, Dv]   f32              in; optional: 0 */
    am_i64_array docs;     /* [2 N] start and end of each document, ascending */
    am_tensor device_docs; /* [3 N] i64 in: docs, and the documents' numbers in the order of work (any). On CUDA needed,
                              and what the kernels read: a captured graph replays what it then holds. On the CPU
                              ignored */
    double scale;
    bool l2norm;
    int64_t part;            /* an am_gdn_part; backward has no rest */
    bool backward;           /* workspace, row: of which pass */
    int64_t workspace_bytes; /* workspace: out */
    const char *row;         /* row: out, static text */
} am_gdn_args;

/* Bytes of scratch that the pass needs; reads q, v, docs and backward. */
am_status am_gdn_workspace(am_gdn_args *a, const am_exec *ex);

/* The name of the kernels that the pass runs for such inputs and fresh outputs; reads q, k, v, docs and backward. */
am_status am_gdn_row(am_gdn_args *a, const am_exec *ex);

am_status am_gdn_forward(const am_gdn_args *a, const am_exec *ex);
am_status am_gdn_backward(const am_gdn_args *a, const am_exec *ex);

/* csrc/cuda/gdn: of checked arguments; the row that plan names runs, in so many bytes of workspace. */
am_status am_cuda_gdn_plan(const am_gdn_args *a, bool backward, const char **row, size_t *bytes);
am_status am_cuda_gdn_forward(const am_gdn_args *a, const am_exec *ex);
am_status am_cuda_gdn_backward(const am_gdn_args *a, const am_exec *ex);

#endif
