/* tensor_map.h -- descriptors for the copy engine, made on the host at every launch. */
#ifndef TENSOR_MAP_H
#define TENSOR_MAP_H

#include "cuda_check.h"

#include <cuda.h>

/* A 16-bit [tokens, heads, dim] tensor in boxes of box_tokens x box_heads x 64 elements, laid out token by token in
 * rows of 128 bytes with the 128-byte swizzle; what is beyond the tensor, a row or a head's columns, reads as 0. The
 * tensor's address and strides are multiples of 16 bytes. */
static inline am_status tensor_map_of(CUtensorMap *map, const am_tensor *t, uint32_t box_tokens, uint32_t box_heads)
{
    typedef CUresult (*encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                  const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                                  CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    void *encode = NULL;
    cudaDriverEntryPointQueryResult found;
    AM_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &found));
    AM_CHECK(found == cudaDriverEntryPointSuccess && encode != NULL, AM_ERR_CUDA,
             "cuTensorMapEncodeTiled: the driver has none (%d)", (int)found);
    const cuuint64_t size[3] = {(cuuint64_t)t->shape[2], (cuuint64_t)t->shape[1], (cuuint64_t)t->shape[0]};
    const cuuint64_t stride[2] = {(cuuint64_t)t->stride[1] * 2, (cuuint64_t)t->stride[0] * 2};
    const cuuint32_t box[3] = {64, box_heads, box_tokens}, step[3] = {1, 1, 1};
    const CUtensorMapDataType type =
        t->dtype == AM_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    const CUresult result = ((encode_fn)encode)(map, type, 3, t->data, size, stride, box, step,
                                                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    AM_CHECK(result == CUDA_SUCCESS, AM_ERR_CUDA, "cuTensorMapEncodeTiled: error %d", (int)result);
    return AM_OK;
}

#endif
