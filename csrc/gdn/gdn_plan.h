/* gdn_plan.h -- from documents to work lists and scratch, and the table of CPU kernels.
 *
 * A task walks one document's chunks for one key head and value heads that read it:
 *
 *   forward   in order, a state for each value head; every STEP tokens the states are kept for the backward pass
 *   backward  step by step from the end: the states of the step's chunks and V' are computed again from the kept state
 *             into scratch, then its chunks run in reverse with the states' gradients. dq and dk of a chunk are summed
 *             over the value heads, in order, before the l2 norm's derivative
 *
 * The states kept are 4 Dk Dv / STEP bytes a token and value head; scratch is a step of states for each thread.
 * Everything follows from one document alone, so neighbours and threads never change a bit.
 */
#ifndef AM_GDN_PLAN_H
#define AM_GDN_PLAN_H

#include "am_product.h"
#include "am_slots.h"
#include "gdn.h"

enum {
    GDN_CHUNK = 64,
    GDN_STEP_CHUNKS = AM_GDN_STEP / GDN_CHUNK,
    GDN_PAD = 32,  /* dims of buffers are rounded up to this, the widest panel */
    GDN_GRAIN = 4, /* rows of a chunk are rounded up to this, the smallest block of rows */
    GDN_SQUARE = GDN_CHUNK * GDN_CHUNK
};

typedef struct gdn_doc {
    int64_t start, n;
    int64_t kept; /* row of `states` that holds its state after STEP tokens */
} gdn_doc;

typedef struct gdn_task {
    int64_t doc, head;    /* head: of keys */
    int64_t first, heads; /* value heads of the group */
} gdn_task;

typedef struct gdn_head { /* what one value head has of one chunk; rows beyond the chunk's are 0 */
    float *hi, *lo;       /* [CHUNK]: c in two floats */
    float *e, *f, *r;     /* [CHUNK]: exp(c), exp(c_last - c), exp(c - c_first) */
    float *beta;          /* [CHUNK] */
    float *d, *a, *p;     /* [CHUNK, CHUNK]: D, -A, P, 0 above the diagonal */
    int64_t last;         /* row of c_last */
} gdn_head;

typedef struct gdn_buffers {      /* one task's scratch. panels: of the kernel's NR columns, [columns / NR][rows][NR] */
    float *q, *k;                 /* [CHUNK, dk]: normalised, q times scale */
    float *q_inverse, *k_inverse; /* [CHUNK]: 1 / |q|, 1 / |k| */
    float *kt;                    /* k transposed, in panels */
    float *kk, *qk;               /* [CHUNK, CHUNK]: lower parts of k k^T and q k^T */
    gdn_head head;
    float *own;                /* [CHUNK, padded dk]: gradient of k as the left factor of A, over beta */
    float *rows, *more_rows;   /* [CHUNK, widest] */
    float *panel, *more_panel; /* [CHUNK, NR] */
    float *state;  /* forward: [group], backward: [step chunks, group], of [padded dk, padded dv] in panels */
    float *v_new;  /* the same of V', [CHUNK, padded dv] in panels */
    float *dstate; /* [group] as state */
    float *state_t, *v_new_t; /* transposed, in panels */
    float *dv_new;            /* as V' */
    float *do_rows, *do_panels, *dr_rows;
    float *m, *n, *ga;   /* [CHUNK, CHUNK] */
    float *h1, *h2, *h3; /* [CHUNK, padded dk] */
    float *q_panels, *k_panels;
    float *dq, *dk; /* [CHUNK, padded dk] */
    float *dots;    /* [4, CHUNK] */
} gdn_buffers;

typedef struct gdn_job gdn_job;
typedef void (*gdn_fn)(const gdn_job *, const gdn_task *, const gdn_buffers *);

typedef struct gdn_row { /* the kernels of one instruction set */
    const char *name;
    gdn_fn forward, backward;
} gdn_row;

extern const gdn_row am_gdn_scalar, am_gdn_avx2, am_gdn_avx512;

struct gdn_job {
    const am_gdn_args *a;
    const gdn_row *row;
    bool backward;
    int64_t n_docs, key_heads, group, dk, dv, padded_dk, padded_dv;
    int64_t step_chunks; /* of the longest document, at most GDN_STEP_CHUNKS */
    int64_t split;       /* tasks a group is cut into */
    int64_t n_tasks;
    gdn_doc *docs;
    gdn_task *tasks;
    am_slots slots;
};

/* The documents are pairs that ascend and fit. */
am_status gdn_check_docs(const am_i64_array *docs, int64_t tokens);

/* Checks the documents and sizes everything. */
am_status gdn_plan(const am_gdn_args *a, const gdn_row *row, bool backward, gdn_job *job, size_t *bytes);

/* Lays the planned job out in the workspace, with as many slots as it has room for. */
am_status gdn_layout(gdn_job *job, const am_tensor *workspace);

/* Runs all tasks, long documents first. */
void gdn_run(gdn_job *job);

#endif
