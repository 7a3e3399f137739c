/* The backward row "d256 f16 sm90": see attention_bwd_sm90.cuh. */
#include "attention_bwd_sm90.cuh"

bool attention_bwd_fits_d256_f16(const am_attention_args *a)
{
    return attention_sm90::backward_fits(a, AM_F16, 256, 256);
}

am_status attention_bwd_d256_f16(const am_attention_args *a, cudaStream_t stream)
{
    return attention_sm90::launch_backward<256, __half>(a, stream);
}
