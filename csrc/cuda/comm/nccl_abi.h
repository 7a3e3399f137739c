/* nccl_abi.h -- the little of NCCL's binary interface that is called here, so that a build needs no header of it.
 * nccl.cu checks every number against the library's own header where the compiler finds that. */
#ifndef NCCL_ABI_H
#define NCCL_ABI_H

#include <stddef.h>

#include <cuda_runtime.h>

#define NCCL_LIBRARY "libnccl.so.2"
#define NCCL_WHEEL "nvidia/nccl/lib"
#define NCCL_PACKAGE "nvidia-nccl-cu13"

typedef int nccl_status; /* 0: fine */
typedef void *nccl_handle;

typedef struct nccl_id {
    char data[128];
} nccl_id;

enum { NCCL_IN_PROGRESS = 7, NCCL_BYTE = 1 };

typedef struct nccl_functions {
    nccl_status (*make_id)(nccl_id *);
    nccl_status (*open)(nccl_handle *, int ranks, nccl_id, int rank);
    nccl_status (*state)(nccl_handle, nccl_status *);
    nccl_status (*destroy)(nccl_handle);
    nccl_status (*end)(nccl_handle);
    nccl_status (*group_start)(void);
    nccl_status (*group_end)(void);
    nccl_status (*send)(const void *, size_t, int type, int peer, nccl_handle, cudaStream_t);
    nccl_status (*receive)(void *, size_t, int type, int peer, nccl_handle, cudaStream_t);
    const char *(*text)(nccl_status);
    const char *(*last_words)(nccl_handle);
} nccl_functions;

#endif
