/* moe_job.h -- a pass over a layer of experts as launches: its sizes, its scratch, and the products it asks for.
 *
 *   route forward    logits = x R^T -> softmax, choice, weights, sums of p
 *   sort             counts of (128 tokens, expert) -> offsets -> place of every chosen pair
 *   experts forward  rows of x to their places -> [g u] = x W^T -> silu(g) u -> y = act D^T -> weighted sum a token
 *   backward         rows of x and dout to their places -> dact = dout D -> dproducts, dweights -> dD = dout^T act,
 *                    dW = dproducts^T x, dx = dproducts W -> sum a token
 *   route backward   dlogits -> dR = dlogits^T x, dx = dlogits R
 *
 * Offsets are read on the device alone; launches depend on shapes.
 */
#ifndef MOE_JOB_H
#define MOE_JOB_H

#include "cuda_check.h"

extern "C" {
#include "moe.h"
}

enum MoeKind {
    MOE_NT, /* C[r, n] = sum over k of A[r, k] B_g[n, k], r a row of group g */
    MOE_NN, /* C[r, n] = sum over k of A[r, k] B_g[k, n] */
    MOE_TN  /* C_g[m, n] = sum over rows r of group g of A[r, m] B[r, n] */
};

/* A product over groups of rows; strides in elements, last axes contiguous. */
struct MoeProduct {
    MoeKind kind;
    am_dtype dtype, to; /* of a, b and act; of c */
    const void *a, *b;
    void *c;
    bool gate; /* NT with N = 2 inner: act = silu(c[:, :inner]) c[:, inner:] too, [rows, inner] */
    void *act;
    bool keep;             /* with the gate: c is wanted; else it may be left as it is */
    int64_t lda, ldb, ldc; /* between rows */
    int64_t b_group, c_group;
    int64_t m, n, k;    /* m: of TN, k: of the others */
    int64_t rows;       /* at most, of all groups together */
    const int *offset;  /* [groups + 1] first rows, on the device */
    const int *by_size; /* [groups] groups, those with most rows first, on the device */
    int groups;
    const int64_t *counts;    /* [groups] rows of each, on the host, where it knows them; else null */
    bool add;                 /* TN: to what is there */
    unsigned long long *next; /* TN: 0 on the device, for this product alone */
};

/* Kernels that make products; the first row that fits wins. */
struct MoeProductRow {
    const char *name;
    bool gates; /* makes act without the products in memory */
    bool (*fits)(const MoeProduct *p);
    am_status (*run)(const MoeProduct *p, cudaStream_t stream);
};

const MoeProductRow *moe_pick(const MoeProduct *p);
am_status moe_product(const MoeProduct *p, cudaStream_t stream);
am_status moe_product_simple(const MoeProduct *p, cudaStream_t stream);
am_status moe_product_lt(const MoeProduct *p, cudaStream_t stream);
am_status moe_product_gate_sm90(const MoeProduct *p, cudaStream_t stream);
am_status moe_product_nt_sm90(const MoeProduct *p, cudaStream_t stream);
am_status moe_product_nn_sm90(const MoeProduct *p, cudaStream_t stream);
am_status moe_product_tn_sm90(const MoeProduct *p, cudaStream_t stream);
am_status moe_product_tn_f32_sm90(const MoeProduct *p, cudaStream_t stream);

constexpr int kMoeTokens = 128; /* that are sorted together */
constexpr int kMoeNext = 3;     /* products that draw their work */

/* Sizes, and scratch on the device. */
struct MoeJob {
    const am_moe_args *a;
    bool backward, routes, runs_experts;
    int64_t tokens, hidden, inner, experts, top_k, pairs;
    int blocks; /* of kMoeTokens tokens */
    int splits; /* of the tokens in the router's gradient */

    int *offset;              /* [E + 1] first rows of experts */
    int *by_size;             /* [E] */
    int *whole;               /* [2] 0, T: all tokens as one group */
    int *split;               /* [splits + 1] */
    int *order;               /* [splits] 0, 1, .. */
    unsigned long long *next; /* [3] 0: of the products for ddown, dgate_up, drouter */
    int *counts;              /* [blocks, E] then first places within an expert */
    int *token;               /* [pairs] by row */
    int *pair;                /* [pairs] by row */
    int *place;               /* [pairs] row of a pair, -1 without one */
    float *partial;           /* [route_blocks, E] sums of p */
    char *x;                  /* [pairs, H] rows of hidden by expert; y afterwards */
    char *dy;                 /* [pairs, H] rows of dout by expert; dx afterwards */
    char *products;           /* [pairs, 2I] where they are not kept, and no kernel does without */
    char *act;                /* [pairs, I] silu(g) u; backward: dact, then times the routing weight */
    char *dproducts;          /* [pairs, 2I] */
    float *dweights;          /* [pairs] */
    char *dlogits;            /* [T, E] */
    char *clean;              /* [T, H] hidden with padding as 0; then the router's part of dhidden */
    float *parts;             /* [splits, E, H] */
    size_t bytes;
};

constexpr int kMoeRouteTokens = 64; /* of a block of the router's kernels */

MoeJob moe_job(const am_moe_args *a, bool backward);

/* moe_route.cu */
am_status moe_route_choose(const MoeJob &job, cudaStream_t stream);
am_status moe_route_sums(const MoeJob &job, cudaStream_t stream);
am_status moe_route_grad(const MoeJob &job, const float *dweights, cudaStream_t stream);

/* moe_sort.cu: offset, by_size, token, pair, place; load and real_rows where they are asked for. */
am_status moe_sort_rows(const MoeJob &job, bool counts_wanted, cudaStream_t stream);
am_status moe_groups(const MoeJob &job, cudaStream_t stream); /* whole, split, order, next */

/* moe_rows.cu */
am_status moe_permute(const MoeJob &job, const am_tensor &from, char *to, cudaStream_t stream);
am_status moe_unpermute(const MoeJob &job, const char *rows, const float *weights, const char *more,
                        const am_tensor &to, cudaStream_t stream);
am_status moe_without_padding(const MoeJob &job, const am_tensor &from, char *to, cudaStream_t stream);
am_status moe_clear_products(const MoeJob &job, cudaStream_t stream);
am_status moe_swiglu(const MoeProduct *p, cudaStream_t stream);
am_status moe_swiglu_grad(const MoeJob &job, float *dweights, cudaStream_t stream);
am_status moe_add_parts(const MoeJob &job, cudaStream_t stream);

#endif
