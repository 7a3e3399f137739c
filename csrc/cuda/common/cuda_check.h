/* cuda_check.h -- the C core seen from CUDA C++, and how a CUDA call's failure becomes a status. */
#ifndef CUDA_CHECK_H
#define CUDA_CHECK_H

#include <cuda_runtime.h>

#ifdef __cplusplus
extern "C" {
#endif
#include "am_exec.h"
#ifdef __cplusplus
}
#endif

#define AM_CUDA(call)                                                                                                  \
    do {                                                                                                               \
        const cudaError_t am_cuda_e_ = (call);                                                                         \
        if (am_cuda_e_ != cudaSuccess)                                                                                 \
            return am_fail(AM_ERR_CUDA, "%s: %s (%d): %s", #call, cudaGetErrorName(am_cuda_e_), (int)am_cuda_e_,       \
                           cudaGetErrorString(am_cuda_e_));                                                            \
    } while (0)

/* After every launch: a bad configuration shows here; a fault of the kernel shows at the caller's next wait. */
#define AM_CUDA_LAUNCHED() AM_CUDA(cudaGetLastError())

#endif
