/* rope_norm.cuh -- what the kernels of heads that are normed and turned share. */
#ifndef ROPE_NORM_CUH
#define ROPE_NORM_CUH

#include "rope_angles.cuh"

extern "C" {
#include "rope_norm.h"
}

namespace rope_norms
{

using ropes::Angles;
using ropes::Heads;

struct Forward {
    Heads q, k;
    const void *q_weight, *k_weight;
    float *rstd; /* [tokens, heads] */
    int64_t tokens;
    rows::Divisor heads; /* of q and k together */
    uint32_t q_heads, block_tokens;
    int n; /* of a head */
    float eps, shift;
    bool q_weight_bf16, k_weight_bf16;
    Angles angles;
};

struct Backward {
    Heads q, k; /* x and dx */
    const char *dq, *dk;
    int64_t dq_token, dq_head, dk_token, dk_head; /* bytes */
    const void *q_weight, *k_weight;
    const float *rstd;
    double *partials; /* [runs, 2, n] */
    int64_t tokens;
    rows::Divisor heads;
    uint32_t q_heads, batch; /* batch: rows that a block has at a time */
    int n;
    float shift;
    bool q_weight_bf16, k_weight_bf16;
    Angles angles;
};

__device__ inline float element(const void *v, int i, bool bf16)
{
    return bf16 ? __bfloat162float(static_cast<const __nv_bfloat16 *>(v)[i]) : static_cast<const float *>(v)[i];
}

/* Any head dims, strides and alignments. */
am_status forward_plain(const Forward &p, bool bf16, cudaStream_t stream);
am_status backward_plain(const Backward &p, int runs, bool bf16, cudaStream_t stream);

} // namespace rope_norms

#endif
