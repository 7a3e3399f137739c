/* flat.h -- a list of tensors seen as one line of elements, and the check that outputs do not share memory. */
#ifndef ADAM_FLAT_H
#define ADAM_FLAT_H

#include "am_tensor.h"

/* begin [n + 1] out: where each tensor starts in the line; begin[n] is the line's length. */
void am_flat_begin(const am_tensor_list *list, int64_t *begin);

/* The tensor that holds element `at` of the line, 0 <= at < begin[n]. */
int64_t am_flat_find(const int64_t *begin, int64_t n, int64_t at);

typedef struct am_named_list {
    const char *name;
    const am_tensor_list *list; /* of dense tensors */
    bool written;
} am_named_list;

/* ValueError when a written tensor shares memory with any other of the lists. */
am_status am_check_disjoint(const char *fname, const am_named_list *lists, int n_lists);

#endif
