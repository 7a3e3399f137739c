/* am_rows.h -- what am_rows.inc needs: tile and lane counts. */
#ifndef AM_ROWS_H
#define AM_ROWS_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

#include "am_bf16.h"
#include "am_tensor.h"

/* AM_TILE: elements of the float32 tiles on a worker's stack. AM_LANES: partial sums of a row. */
enum { AM_TILE = 1024, AM_LANES = 64 };

/* Element `index` of a tensor's data; NULL where it has none, as rows without columns may have. */
static inline void *am_at(const am_tensor *t, int64_t index)
{
    return t->data ? (char *)t->data + (size_t)index * am_dtype_size(t->dtype) : NULL;
}

/* Row `row` of a tensor [.., H], counted in row-major order over the leading axes. */
static inline void *am_row(const am_tensor *t, int64_t row)
{
    int64_t index = 0;
    for (int axis = t->ndim - 2; axis > 0; axis--) {
        index += row % t->shape[axis] * t->stride[axis];
        row /= t->shape[axis];
    }
    return am_at(t, index + (t->ndim > 1 ? row * t->stride[0] : 0));
}

static inline int64_t am_row_count(const am_tensor *t)
{
    int64_t rows = 1;
    for (int axis = 0; axis + 1 < t->ndim; axis++)
        rows *= t->shape[axis];
    return rows;
}

#endif
