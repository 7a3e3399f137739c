/* moe_plan.h -- from the routing to work lists and scratch, and the table of CPU kernels.
 *
 *   forward   router panels -> route (a group of tokens) -> sort -> gate_up (expert, block of rows, block of columns)
 *             -> combine (a block of out's columns, over all experts in order)
 *   backward  sort -> act_grad (as gate_up) -> route_grad (as route) -> weight_grad (a block of one weight) and
 *             hidden_grad (as combine)
 *
 * "Rows" are chosen pairs of token and expert, sorted; they are gathered from hidden where they are packed and added to
 * their token where they are summed. Activations between two products are operands already: [row][depth] words.
 */
#ifndef AM_MOE_PLAN_H
#define AM_MOE_PLAN_H

#include "am_product.h"
#include "am_slots.h"
#include "moe.h"

enum {
    MOE_GROUP = 48,  /* rows that are packed together: whole tiles of every instruction set */
    MOE_BLOCK = 384, /* rows that share a packed weight, at most */
    MOE_DEPTH = 256, /* rows of one chain of additions in a weight's gradient */
    MOE_HEIGHT = 384 /* rows of a block of a weight's gradient */
};

typedef struct moe_task {
    int64_t expert, first, rows, column;
    int weight; /* weight_grad: 0 gate_up, 1 down, 2 router */
} moe_task;

typedef enum moe_kind {
    MOE_PACK_ROUTER,
    MOE_ROUTE,
    MOE_GATE_UP,
    MOE_COMBINE,
    MOE_ACT_GRAD,
    MOE_ROUTE_GRAD,
    MOE_WEIGHT_GRAD,
    MOE_HIDDEN_GRAD,
    MOE_KINDS
} moe_kind;

typedef struct moe_buffers { /* one task's scratch */
    void *left, *right;      /* operands */
    float *c;                /* sums */
    float *line[4];          /* [job.line] each */
    int64_t *picks;          /* [top_k] */
} moe_buffers;

typedef struct moe_job moe_job;
typedef void (*moe_fn)(const moe_job *, const moe_task *, const moe_buffers *);

typedef struct moe_row { /* the kernels of one instruction set */
    const char *name;
    int ku, nr, mr, grain;
    moe_fn run[MOE_KINDS];
} moe_row;

extern const moe_row am_moe_scalar, am_moe_avx2, am_moe_avx512, am_moe_bf16, am_moe_amx;

struct moe_job {
    const am_moe_args *a;
    const moe_row *row;
    bool backward;
    int64_t tokens, hidden, inner, experts, top_k;
    int64_t depth_h, depth_i, depth_2i, depth_e; /* words of operands that are as deep */
    int64_t pair_columns;                        /* columns of gate (and of up) in a block of gate_up */
    int64_t sum_columns;                         /* columns of a block of combine and hidden_grad */
    int64_t grad_columns;                        /* columns of a block of a weight's gradient */
    int64_t line;

    int64_t n_real;
    int64_t *real;   /* [n_real] tokens that are not padding */
    int64_t *offset; /* [E + 1] an expert's first row */
    int64_t *order;  /* [E] experts, those with most rows first */
    int64_t *token;  /* [rows] */
    int64_t *pair;   /* [rows] index into weights */
    int64_t *place;  /* [T k] the row of a pair, -1 without one */
    moe_task *tasks;
    void *router;    /* forward: router_weight in panels */
    double *partial; /* forward: [groups of tokens, E] sums of p */
    void *act;       /* [rows, depth_i] words: silu(g) u; backward: times the routing weight */
    void *dproducts; /* backward: [rows, depth_2i] words */
    float *dweight;  /* backward: [rows, blocks of I] parts of the routing weights' gradients */
    void *dlogits;   /* backward: [n_real, depth_e] words */
    float *sum;      /* [T, H]: the result itself where it is float32 */
    am_slots slots;  /* scratch of the tasks that run at one time */
    int64_t n_tasks;
};

/* Sizes everything; the sum is workspace bytes for as many tasks at one time as there are threads. */
void moe_plan(const am_moe_args *a, const moe_row *row, bool backward, moe_job *job, size_t *bytes);

/* Lays the planned job out in the workspace, with as many slots as it has room for, and lists the real tokens. */
am_status moe_layout(moe_job *job, const am_tensor *workspace);

/* Sorts the chosen pairs by expert, then token; those without an expert here have no row. */
void moe_sort(moe_job *job);

/* Runs all tasks of one kind, costly ones first. */
void moe_run(moe_job *job, moe_kind kind);

static inline int64_t moe_blocks(int64_t n, int64_t size) { return (n + size - 1) / size; }

/* The gradient of a pair's routing weight: what came in, else the sum of its row's parts, 0 without a row. */
static inline float moe_dweight(const moe_job *job, int64_t pair)
{
    if (job->a->down.dtype == AM_NONE)
        return ((const float *)job->a->dweights.data)[pair];
    if (job->place[pair] < 0)
        return 0.0f;
    const int64_t parts = moe_blocks(job->inner, job->pair_columns);
    const float *const from = job->dweight + job->place[pair] * parts;
    float total = 0.0f;
    for (int64_t i = 0; i < parts; i++)
        total += from[i];
    return total;
}

#endif
