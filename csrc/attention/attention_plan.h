/* attention_plan.h -- from documents to work lists and scratch, and the table of CPU kernels.
 *
 * A document's rows are its queries times the G query heads of one key head: row r is query r / G of head g = r % G,
 * so that short documents fill tiles and a packed key serves G heads.
 *
 *   forward   packs keys and values per (document, key head, block of keys); then one tile of rows is a task
 *   backward  one column of keys is a task: dk and dv of the column, and its part of dq. A document of one column
 *             writes dq at once; else the parts are summed, in order of columns, per tile of rows
 *
 * Every size follows from one document alone, so neighbours and threads never change a bit.
 */
#ifndef AM_ATTENTION_PLAN_H
#define AM_ATTENTION_PLAN_H

#include "am_product.h"
#include "am_slots.h"
#include "attention.h"

enum {
    ATTENTION_ROWS = 96,    /* rows of a tile */
    ATTENTION_KEYS = 192,   /* keys of a block */
    ATTENTION_GRAIN = 32,   /* packed rows, keys and head dims are rounded up to this */
    ATTENTION_COLUMN = 576, /* a document with more keys has several columns, */
    ATTENTION_COLUMNS = 8   /* at most this many */
};

typedef struct attention_doc {
    int64_t q0, nq, k0, nk;
    int64_t packed;  /* rounded-up keys of the documents before */
    int64_t column;  /* keys of a column, a multiple of the block */
    int64_t columns; /* at least 1 */
    int64_t partial; /* first of its partial rows of dq */
} attention_doc;

typedef struct attention_task {
    int64_t doc, head, index; /* index: tile of rows, block of keys, or column; head: of keys */
} attention_task;

typedef enum attention_kind { ATTENTION_PACK, ATTENTION_FORWARD, ATTENTION_BACKWARD, ATTENTION_REDUCE } attention_kind;

typedef struct attention_buffers { /* one task's scratch; `void` holds packed elements */
    void *q, *dout;                /* [ROWS, padded_dim] */
    void *q_panels, *dout_panels;  /* [ROWS, padded_dim] in panels */
    float *s, *dp;                 /* [ROWS, KEYS] */
    void *p, *pt, *dst;            /* [ROWS, KEYS] as operands; the same memory as s and dp where packing is fp32 */
    float *sum;                    /* [ROWS, padded_dim]: out or dq */
    float *top, *total, *low;      /* [ROWS]: running maximum and sum; or lse, delta, and what lse lost */
    int64_t *seen;                 /* [ROWS]: keys of the block that the row sees */
    void *kt, *vt, *k;             /* [column, padded_dim] in panels */
    float *dk, *dv;                /* [column, padded_dim] */
} attention_buffers;

typedef struct attention_job attention_job;
typedef void (*attention_fn)(const attention_job *, const attention_task *, const attention_buffers *);

typedef struct attention_row { /* the kernels of one instruction set */
    const char *name;
    size_t packed_bytes; /* of a packed element: 4 (fp32) or 2 (bf16) */
    attention_fn run[4]; /* by attention_kind */
} attention_row;

extern const attention_row am_attention_scalar, am_attention_avx2, am_attention_avx512, am_attention_bf16,
    am_attention_amx;

struct attention_job {
    const am_attention_args *a;
    const attention_row *row;
    bool backward;
    int64_t n_docs, heads, group, dim, padded_dim; /* heads: Hk; group: Hq / Hk */
    attention_doc *docs;
    attention_task *tasks;
    char *packed_k, *packed_v; /* forward: transposed keys, and values, in panels */
    float *partial;            /* backward: [partial rows, dim] */
    am_slots slots;
    int64_t n_tasks, packed_rows, partial_rows, longest_column; /* sizes of the above */
};

/* ValueError unless docs and docs_k describe documents in q and k. */
am_status attention_check_docs(const am_attention_args *a);

/* Checks the documents and sizes everything; the sum is workspace bytes for n_slots tasks at one time. */
am_status attention_plan(const am_attention_args *a, const attention_row *row, bool backward, attention_job *job,
                         size_t *bytes);

/* Lays the planned job out in the workspace, with as many slots as it has room for. */
am_status attention_layout(attention_job *job, const am_tensor *workspace);

/* Runs all tasks of one kind, costly ones first. */
void attention_run(attention_job *job, attention_kind kind);

/* Keys that a row of the document sees. */
static inline int64_t attention_limit(const attention_job *job, const attention_doc *doc, int64_t row)
{
    if (!job->a->causal)
        return doc->nk;
    const int64_t limit = row / job->group + 1 + doc->nk - doc->nq;
    return limit < 0 ? 0 : limit;
}

#endif
