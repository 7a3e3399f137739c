/* The row "d72 bf16 sm90": see attention_fwd_turns_sm90.cuh. */
#include "attention_fwd_turns_sm90.cuh"

bool attention_fits_d72_bf16(const am_attention_args *a) { return attention_sm90::fits(a, AM_BF16, 72, 72); }

am_status attention_fwd_d72_bf16(const am_attention_args *a, cudaStream_t stream)
{
    return attention_sm90::launch_turns<attention_sm90::TurnsTile, __nv_bfloat16>(a, stream);
}
