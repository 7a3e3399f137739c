/* am_tensor.h -- a borrowed view of a strided array. By value; owns nothing. */
#ifndef AM_TENSOR_H
#define AM_TENSOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "am_status.h"

enum { AM_MAX_DIMS = 6 };

typedef enum am_dtype {
    AM_NONE = 0, /* the argument was not given */
    AM_BOOL,
    AM_U8,
    AM_I8,
    AM_I16,
    AM_I32,
    AM_I64,
    AM_F16,
    AM_BF16,
    AM_F32,
    AM_F64,
    AM_DTYPE_COUNT
} am_dtype;

typedef enum am_device { AM_DEV_CPU = 0, AM_DEV_CUDA } am_device;

typedef struct am_tensor {
    void *data;                  /* first element, byte offset applied; may be NULL when numel is 0 */
    int64_t shape[AM_MAX_DIMS];  /* elements */
    int64_t stride[AM_MAX_DIMS]; /* elements, never negative; compact on axes of size 1 and in empty tensors */
    int ndim;
    am_dtype dtype; /* AM_NONE: an optional argument that was left out */
    am_device dev;
    int dev_index;
} am_tensor;

typedef struct am_tensor_list {
    am_tensor *items;
    int64_t n;
} am_tensor_list;

typedef struct am_i64_array {
    const int64_t *data; /* compact host copy; NULL when absent or empty */
    int64_t n;
    bool present;
} am_i64_array;

/* Of documents, [2 n] starts and stops in ascending order: the first that ends after `row`. */
static inline int64_t am_doc_after(const am_i64_array *docs, int64_t row)
{
    int64_t low = 0, high = docs->n / 2;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (docs->data[2 * middle + 1] > row)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

typedef struct am_f64_array {
    const double *data; /* host copy; NULL when absent or empty */
    int64_t n;
} am_f64_array;

size_t am_dtype_size(am_dtype dtype);
const char *am_dtype_name(am_dtype dtype);
int64_t am_numel(const am_tensor *t);

/* Sets the strides of a row-major tensor without gaps, an axis of size 0 counting as 1. The product of the other
 * axes fits. */
void am_set_compact_strides(am_tensor *t);

/* Row-major without gaps. Axes of size 1 may carry any stride; so may every axis of an empty tensor. */
bool am_is_contiguous(const am_tensor *t);

/* Different elements lie at different addresses and fill one block, in any axis order (a transposed or
 * permuted contiguous tensor). */
bool am_is_dense(const am_tensor *t);

bool am_same_shape(const am_tensor *a, const am_tensor *b);

/* Equal strides on every axis longer than 1. The shapes are equal already. */
bool am_same_strides(const am_tensor *a, const am_tensor *b);

/* Half-open byte ranges of the two tensors share an address. Empty tensors share nothing. */
bool am_overlaps(const am_tensor *a, const am_tensor *b);

#endif
