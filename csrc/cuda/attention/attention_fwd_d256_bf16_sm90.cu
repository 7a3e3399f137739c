/* The row "d256 bf16 sm90": see attention_fwd_sm90.cuh. */
#include "attention_fwd_sm90.cuh"

bool attention_fits_d256_bf16(const am_attention_args *a) { return attention_sm90::fits(a, AM_BF16, 256, 256); }

am_status attention_fwd_d256_bf16(const am_attention_args *a, cudaStream_t stream)
{
    return attention_sm90::launch<attention_sm90::Tile<256>, __nv_bfloat16>(a, stream);
}
