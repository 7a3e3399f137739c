/* moe.h -- a layer of routed experts.
 *
 *   l = router_weight x                       rounded to x's dtype
 *   p = softmax(l)                            float32
 *   S = the top_k largest of l                equal ones: the lowest expert first
 *   w_e = p_e / sum over S of p, rounded      e in S
 *   [g u] = gate_up_e x, rounded              y_e = down_e (silu(g) * u)
 *   out = sum over S of w_e y_e               in the order of experts, float32, rounded once
 *
 * and of the rows that are not padding: load_e, how many chose e; prob_sum_e, the sum of p_e; real_rows, how many.
 * Gradients come from dout and, where it is given, dprob_sum; load has none. Padding is never read: its rows of every
 * output are 0 (chosen: -1). A row's results depend on that row alone, to the bit, and nothing on the number of
 * threads.
 *
 * Chosen pairs of token and expert are sorted by expert, then token; row r of products belongs to the r-th of them. A
 * token's choices are different experts.
 *
 * On CUDA y_e, and what an expert adds to hidden's gradient, are rounded to hidden's dtype before they are added, and
 * out is added in the order of choice; a choice outside of the experts counts as none, since nobody waits to look.
 *
 * Tensors of T, E or H rows may have any strides whose last axis is contiguous; those of the lower half are contiguous.
 *
 * Where experts live on other ranks the two halves run apart, each with the tensors of the other left out:
 *
 *   route     hidden, router_weight -> logits, chosen, weights, load, prob_sum, real_rows
 *   experts   rows of hidden that came with their chosen experts, -1: none here, and weights -> out, 0 without any
 *
 * Backward of the experts gives dweights, which that of the router takes; each gives its part of dhidden.
 *
 *   shared_expert   out = routed + sigmoid(gate) * shared, rounded after each of the three operations
 */
#ifndef AM_MOE_H
#define AM_MOE_H

#include "am_exec.h"

typedef struct am_moe_args {
    am_tensor hidden;        /* [T, H] f32 or bf16 in; all others that are not named: hidden's dtype */
    am_tensor router_weight; /* [E, H] in */
    am_tensor gate_up;       /* [E, 2I, H] in: gate first */
    am_tensor down;          /* [E, H, I] in */
    am_tensor padding;       /* [T] bool in, optional; true: the row is padding */
    am_tensor dout;          /* [T, H]      backward: in */

    am_tensor out;           /* [T, H]      forward: out; may be left out, then down is not used */
    am_tensor load;          /* [E] i64     forward: out */
    am_tensor prob_sum;      /* [E] f32     forward: out */
    am_tensor real_rows;     /* [] i64      forward: out */
    am_tensor logits;        /* [T, E]      forward: out, backward: in */
    am_tensor chosen;        /* [T, k] i32  forward: out, backward: in; largest logit first */
    am_tensor weights;       /* [T, k] f32  forward: out, backward: in; rounded to hidden's dtype */
    am_tensor products;      /* [T k, 2I]   forward: out, optional; backward: in; rows behind the last are 0 */
    am_tensor dprob_sum;     /* [E] f32     backward: in, optional */
    am_tensor dweights;      /* [T, k] f32  backward of route: in, of experts: out, optional */
    am_tensor dhidden;       /* [T, H]      backward: out, optional as the three below */
    am_tensor drouter;       /* [E, H]      backward: out */
    am_tensor dgate_up;      /* [E, 2I, H]  backward: out; hidden's dtype or f32 */
    am_tensor ddown;         /* [E, H, I]   backward: out; hidden's dtype or f32 */
    am_tensor workspace;     /* [bytes] u8  scratch, any contents */
    int64_t top_k;           /* 1 to E */
    am_i64_array counts;     /* [E] rows of each expert, where the host knows them: then cuBLASLt makes the products */
    bool backward;           /* workspace, row: of which pass */
    bool accumulate;         /* backward of experts: dgate_up and ddown are added to what is there, float32 sums */
    int64_t workspace_bytes; /* workspace: out */
    const char *row;         /* row: out */
} am_moe_args;

/* Bytes of scratch that the pass needs; reads the shapes of the inputs, counts, top_k and backward. Without
 * router_weight: of the experts' pass, without gate_up and down: of the router's. */
am_status am_moe_workspace(am_moe_args *a, const am_exec *ex);

/* The name of the kernels that make the experts' products, or the router's where there are no experts; reads the same.
 */
am_status am_moe_row(am_moe_args *a, const am_exec *ex);

am_status am_moe_forward(am_moe_args *a, const am_exec *ex);
am_status am_moe_backward(am_moe_args *a, const am_exec *ex);
am_status am_moe_route_forward(am_moe_args *a, const am_exec *ex);
am_status am_moe_route_backward(am_moe_args *a, const am_exec *ex);
am_status am_moe_experts_forward(am_moe_args *a, const am_exec *ex);
am_status am_moe_experts_backward(am_moe_args *a, const am_exec *ex);

typedef struct am_shared_expert_args { /* f32 or bf16, one dtype, last axis contiguous */
    am_tensor out;                     /* [T, H] forward: out */
    am_tensor dshared;                 /* [T, H] backward: out */
    am_tensor dgate;                   /* [T] or [T, 1] backward: out */
    am_tensor dout;                    /* [T, H] backward: in; also the gradient of routed */
    am_tensor routed;                  /* [T, H] forward: in */
    am_tensor shared;                  /* [T, H] in */
    am_tensor gate;                    /* [T] or [T, 1] in */
    bool backward;
} am_shared_expert_args;

am_status am_shared_expert_forward(am_shared_expert_args *a, const am_exec *ex);
am_status am_shared_expert_backward(am_shared_expert_args *a, const am_exec *ex);

/* csrc/cuda/moe: of checked arguments; forward and backward of the layer, or of the half whose weights are given. */
am_status am_cuda_moe_plan(const am_moe_args *a, const char **row, size_t *bytes);
am_status am_cuda_moe_forward(const am_moe_args *a, const am_exec *ex);
am_status am_cuda_moe_backward(const am_moe_args *a, const am_exec *ex);
am_status am_cuda_shared_expert(const am_shared_expert_args *a, const am_exec *ex);

#endif
