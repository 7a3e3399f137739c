/* attention_rows.h -- the rows of attention's dispatch tables, and what they share on the host. */
#ifndef ATTENTION_ROWS_H
#define ATTENTION_ROWS_H

#include "cuda_check.h"

extern "C" {
#include "attention.h"
}

#include "attention_tiles.cuh"

typedef am_status (*attention_run_fn)(const am_attention_args *a, cudaStream_t stream);

struct AttentionRow {
    const char *name;
    bool (*fits)(const am_attention_args *a);
    attention_run_fn run;
};

/* The workspace: places of tiles, the next tile, and rowsum(dout * out) in a backward pass. */
struct AttentionScratch {
    int64_t *first, *first_k; /* [N + 1] each */
    int64_t *next;            /* [1] */
    float *delta;             /* [T, Hq] */
    size_t bytes;
};

AttentionScratch attention_scratch(const am_attention_args *a, bool backward);
AttentionDocs attention_docs(const am_attention_args *a);
AttentionView attention_view(const am_tensor &t);

/* first[i] = tiles of `rows` rows before document order[i], of its queries or of its keys; *next = 0. */
am_status attention_place_tiles(const am_attention_args *a, bool of_keys, int64_t rows, int64_t *first, int64_t *next,
                                cudaStream_t stream);

/* Zeros (lse: -inf) in the tokens outside every document: out, lse, lse_low; or dq, dk, dv. */
am_status attention_fill_gaps(const am_attention_args *a, bool backward, cudaStream_t stream);

/* Both for the queries of a forward pass in one launch, under which a kernel that waits for it may begin. */
am_status attention_prepare(const am_attention_args *a, int64_t rows, int64_t *first, int64_t *next,
                            cudaStream_t stream);

bool attention_fits_d256_bf16(const am_attention_args *a);
bool attention_fits_d256_f16(const am_attention_args *a);
bool attention_fits_d128_bf16(const am_attention_args *a);
bool attention_fits_d128_f16(const am_attention_args *a);
bool attention_fits_d72_bf16(const am_attention_args *a);
bool attention_fits_d80_bf16(const am_attention_args *a);
bool attention_fits_d64_bf16(const am_attention_args *a);
bool attention_fits_d80_f16(const am_attention_args *a);
bool attention_fits_d64_f16(const am_attention_args *a);
am_status attention_fwd_d256_bf16(const am_attention_args *a, cudaStream_t stream);
am_status attention_fwd_d256_f16(const am_attention_args *a, cudaStream_t stream);
am_status attention_fwd_d128_bf16(const am_attention_args *a, cudaStream_t stream);
am_status attention_fwd_d128_f16(const am_attention_args *a, cudaStream_t stream);
am_status attention_fwd_d72_bf16(const am_attention_args *a, cudaStream_t stream);
am_status attention_fwd_d80_bf16(const am_attention_args *a, cudaStream_t stream);
am_status attention_fwd_d64_bf16(const am_attention_args *a, cudaStream_t stream);
am_status attention_fwd_d80_f16(const am_attention_args *a, cudaStream_t stream);
am_status attention_fwd_d64_f16(const am_attention_args *a, cudaStream_t stream);

bool attention_bwd_fits_d256_bf16(const am_attention_args *a);
bool attention_bwd_fits_d256_f16(const am_attention_args *a);
bool attention_bwd_fits_d128_bf16(const am_attention_args *a);
bool attention_bwd_fits_d128_f16(const am_attention_args *a);
bool attention_bwd_fits_d80_bf16(const am_attention_args *a);
bool attention_bwd_fits_d64_bf16(const am_attention_args *a);
bool attention_bwd_fits_d80_f16(const am_attention_args *a);
bool attention_bwd_fits_d64_f16(const am_attention_args *a);
am_status attention_bwd_d256_bf16(const am_attention_args *a, cudaStream_t stream);
am_status attention_bwd_d256_f16(const am_attention_args *a, cudaStream_t stream);
am_status attention_bwd_d128_bf16(const am_attention_args *a, cudaStream_t stream);
am_status attention_bwd_d128_f16(const am_attention_args *a, cudaStream_t stream);
am_status attention_bwd_d80_bf16(const am_attention_args *a, cudaStream_t stream);
am_status attention_bwd_d64_bf16(const am_attention_args *a, cudaStream_t stream);
am_status attention_bwd_d80_f16(const am_attention_args *a, cudaStream_t stream);
am_status attention_bwd_d64_f16(const am_attention_args *a, cudaStream_t stream);

am_status attention_fwd_simple(const am_attention_args *a, cudaStream_t stream);
am_status attention_bwd_simple(const am_attention_args *a, cudaStream_t stream);

#endif
