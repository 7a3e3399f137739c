/* loss_rows.h -- what the two losses share inside the slice: kernels of one row, and checks. */
#ifndef AM_LOSS_ROWS_H
#define AM_LOSS_ROWS_H

#include "am_rows.h"
#include "loss.h"

typedef struct row_stats {
    float top, sum; /* largest logit so far, and the sum of exp(l - top) */
} row_stats;

typedef struct loss_kernels {
    /* Joins n logits to the running statistics, which start as {-INFINITY, 0}. */
    void (*join)(row_stats *s, const void *row, int64_t n, bool bf16);
    /* dst = (exp(l - top) / sum - [column = label]) * scale; dst may be the row itself. */
    void (*grad)(void *dst, const void *row, int64_t n, int64_t label, row_stats s, float scale, bool bf16);
    void (*narrow)(void *dst_bf16, const float *src, int64_t n);
} loss_kernels;

const loss_kernels *am_loss_kernels(void); /* of the instruction set in use */

am_status am_loss_check_cpu(const char *fn, const am_exec *ex);
am_status am_loss_check_count(const char *fn, const am_tensor *num_label_tokens, const am_exec *ex);
am_status am_loss_check_own_count(const char *fn, const am_tensor *count);
am_status am_loss_check_scalar(const char *fn, const char *name, const am_tensor *t);
am_status am_loss_check_matrix(const char *fn, const char *name, const am_tensor *t);
am_status am_loss_check_rows(const char *fn, const char *name, const am_tensor *t); /* and a contiguous last axis */

/* Checks labels; on the CPU every one of them too, and counts those that are not ignored. */
am_status am_loss_check_labels(const char *fn, const am_tensor *labels, int64_t tokens, int64_t vocab, int64_t ignored,
                               int64_t *n, const am_exec *ex);

int64_t am_loss_int_at(const am_tensor *t, int64_t i);

/* 1 / count, or 0 for a count of 0; the count is `given`, or `labelled` without one. */
double am_loss_inverse_count(const am_tensor *given, int64_t labelled);

double am_loss_of(row_stats s, float label_logit);
float am_loss_logit_at(const am_tensor *logits, int64_t row, int64_t column);

#endif
