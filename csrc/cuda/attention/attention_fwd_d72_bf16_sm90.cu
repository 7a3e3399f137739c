/* The row "d72 bf16 sm90": see attention_fwd_stream_sm90.cuh. */
#include "attention_fwd_stream_sm90.cuh"

bool attention_fits_d72_bf16(const am_attention_args *a) { return attention_sm90::fits(a, AM_BF16, 72, 72); }

am_status attention_fwd_d72_bf16(const am_attention_args *a, cudaStream_t stream)
{
    using namespace attention_sm90;
    using Wide = StreamTile<128, 80, 72, 128, 3, 1, true>;
    using Narrow = StreamTile<128, 80, 72, 128, 2, 2, true>;
    return launch_faster<Wide, Narrow, __nv_bfloat16>(a, 130, stream);
}
