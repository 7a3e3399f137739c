/* The backward row "d64 bf16 sm90": see attention_bwd_narrow_sm90.cuh. */
#include "attention_bwd_narrow_sm90.cuh"

bool attention_bwd_fits_d64_bf16(const am_attention_args *a)
{
    return attention_sm90::backward_fits(a, AM_BF16, 64, 64);
}

am_status attention_bwd_d64_bf16(const am_attention_args *a, cudaStream_t stream)
{
    return attention_sm90::launch_narrow_backward<64, __nv_bfloat16>(a, stream);
}
