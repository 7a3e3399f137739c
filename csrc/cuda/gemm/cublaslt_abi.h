/* cublaslt_abi.h -- the little of cuBLASLt's binary interface that is called here, so that a build needs no header of
 * it. gemm_lt.cu checks every number against the library's own header where the compiler finds that. */
#ifndef CUBLASLT_ABI_H
#define CUBLASLT_ABI_H

#include <stddef.h>
#include <stdint.h>

#include <cuda_runtime.h>
#include <library_types.h>

#define LT_SONAME "libcublasLt.so.13"
#define LT_WHEEL "nvidia/cu13/lib"
#define LT_PACKAGE "'nvidia-cublas>=13'"

typedef int lt_status; /* 0: fine */
typedef void *lt_handle, *lt_operation, *lt_layout, *lt_preference;

typedef struct lt_algorithm {
    uint64_t data[8];
} lt_algorithm;

typedef struct lt_choice {
    lt_algorithm algorithm;
    size_t workspace_bytes;
    lt_status status;
    float waves;
    int reserved[4];
} lt_choice;

enum {
    LT_COMPUTE_F32 = 68,
    LT_TRANSPOSE = 1,
    LT_OPERATION_LEFT = 3, /* attributes of an operation: is the first, the second operand transposed */
    LT_OPERATION_RIGHT = 4,
    LT_ROOM_BYTES = 1, /* attributes of a preference */
    LT_ALIGNMENT_LEFT = 5,
    LT_ALIGNMENT_RIGHT = 6,
    LT_ALIGNMENT_IN = 7,
    LT_ALIGNMENT_OUT = 8
};

typedef struct lt_functions {
    lt_status (*create)(lt_handle *);
    const char *(*text)(lt_status);
    lt_status (*operation_create)(lt_operation *, int compute, cudaDataType_t scale);
    lt_status (*operation_destroy)(lt_operation);
    lt_status (*operation_set)(lt_operation, int attribute, const void *, size_t);
    lt_status (*layout_create)(lt_layout *, cudaDataType_t, uint64_t rows, uint64_t columns, int64_t stride);
    lt_status (*layout_destroy)(lt_layout);
    lt_status (*preference_create)(lt_preference *);
    lt_status (*preference_destroy)(lt_preference);
    lt_status (*preference_set)(lt_preference, int attribute, const void *, size_t);
    lt_status (*choose)(lt_handle, lt_operation, lt_layout a, lt_layout b, lt_layout c, lt_layout d, lt_preference,
                        int wanted, lt_choice *, int *found);
    lt_status (*multiply)(lt_handle, lt_operation, const void *alpha, const void *a, lt_layout, const void *b,
                          lt_layout, const void *beta, const void *c, lt_layout, void *d, lt_layout,
                          const lt_algorithm *, void *workspace, size_t, cudaStream_t);
} lt_functions;

#endif
