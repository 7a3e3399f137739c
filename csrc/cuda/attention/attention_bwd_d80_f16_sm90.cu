/* The backward row "d80 f16 sm90": see attention_bwd_narrow_sm90.cuh. */
#include "attention_bwd_narrow_sm90.cuh"

bool attention_bwd_fits_d80_f16(const am_attention_args *a) { return attention_sm90::backward_fits(a, AM_F16, 72, 80); }

am_status attention_bwd_d80_f16(const am_attention_args *a, cudaStream_t stream)
{
    return attention_sm90::launch_narrow_backward<128, __half, 80>(a, stream);
}
