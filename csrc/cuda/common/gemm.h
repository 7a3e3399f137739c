/* gemm.h -- one product of matrices by cuBLASLt. */
#ifndef GEMM_H
#define GEMM_H

#include "cuda_check.h"

/* What cuBLASLt may use on Hopper, and what a workspace starts on a multiple of: one that does not is used from there.
 */
enum { GEMM_ALIGNMENT = 256, GEMM_WORKSPACE = (32 << 20) + GEMM_ALIGNMENT };

/* out [M, N] = left [M, K] right [K, N], or with add out += left right. Operands have one axis of stride 1 and the
 * other's at least as long as a line; out's last axis is the one. Sums are float32; operands float32 or bfloat16,
 * alike, out float32 or theirs. */
typedef struct gemm_call {
    const am_tensor *out, *left, *right;
    void *workspace;
    int64_t workspace_bytes;
    bool add;
} gemm_call;

#ifdef __cplusplus
extern "C" {
#endif
am_status gemm_run(const gemm_call *c, cudaStream_t stream);
#ifdef __cplusplus
}
#endif

#endif
