/* copies.h -- several copies by one kernel, each with the news that it is done, for window.cu. */
#ifndef COPIES_H
#define COPIES_H

#include <stdint.h>

#include <cuda_runtime.h>

extern "C" {
#include "am_status.h"
}

constexpr int kMostCopies = 16;

struct Copy {
    void *to;
    const void *from;
    int64_t bytes;
    uint32_t *number; /* becomes `value` once all bytes are there */
    uint32_t value;
};

struct Copies {
    Copy at[kMostCopies];
    int n;
    unsigned *done; /* [n] on the device, 0 between calls that come one after another */
};

am_status copy_and_tell(const Copies &copies, cudaStream_t stream);

#endif
