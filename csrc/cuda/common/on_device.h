/* on_device.h -- a launcher run with the call's device current, and the caller's device put back; what that device has.
 */
#ifndef ON_DEVICE_H
#define ON_DEVICE_H

#include "cuda_check.h"

template <typename Args>
am_status on_device(am_status (*launch)(const Args *, cudaStream_t), const Args *a, const am_exec *ex)
{
    int before = 0;
    AM_CUDA(cudaGetDevice(&before));
    AM_CUDA(cudaSetDevice(ex->dev_index));
    const am_status st = launch(a, static_cast<cudaStream_t>(ex->stream));
    AM_CUDA(cudaSetDevice(before));
    return st;
}

static inline am_status multiprocessors(int *count)
{
    int device = 0;
    AM_CUDA(cudaGetDevice(&device));
    AM_CUDA(cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device));
    return AM_OK;
}

#endif
