/* The row "d64 f16 sm90": see attention_fwd_sm90.cuh. */
#include "attention_fwd_sm90.cuh"

bool attention_fits_d64_f16(const am_attention_args *a) { return attention_sm90::fits(a, AM_F16, 64, 64); }

am_status attention_fwd_d64_f16(const am_attention_args *a, cudaStream_t stream)
{
    return attention_sm90::launch<attention_sm90::Tile<64>, __half>(a, stream);
}
