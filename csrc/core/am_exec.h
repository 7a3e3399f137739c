/* am_exec.h -- where a call runs. Filled by the doorway from the first tensor of the call. */
#ifndef AM_EXEC_H
#define AM_EXEC_H

#include "am_tensor.h"

typedef struct am_exec {
    am_device dev;
    int dev_index;
    void *stream; /* the producer's current CUDA stream; NULL on the CPU and for the legacy default stream */
} am_exec;

#endif
