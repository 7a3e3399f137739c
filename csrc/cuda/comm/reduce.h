/* reduce.h -- the sum of parts that lie anywhere, for window.cu. */
#ifndef REDUCE_H
#define REDUCE_H

#include <cuda_runtime.h>

extern "C" {
#include "comm.h"
}

constexpr int kMostParts = 16;

struct Listed {
    const void *at[kMostParts];
};

/* out[i] = scale * (((parts.at[0][i] + parts.at[1][i]) + ...), float32 or bfloat16, as comm_reduce_parts. */
am_status reduce_listed(void *out, am_dtype out_dtype, const Listed &parts, am_dtype dtype, int64_t n, int ranks,
                        float scale, cudaStream_t stream);

#endif
