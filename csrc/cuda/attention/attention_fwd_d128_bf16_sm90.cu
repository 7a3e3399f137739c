/* The row "d128 bf16 sm90": see attention_fwd_stream_sm90.cuh. */
#include "attention_fwd_stream_sm90.cuh"

bool attention_fits_d128_bf16(const am_attention_args *a) { return attention_sm90::fits(a, AM_BF16, 128, 128); }

am_status attention_fwd_d128_bf16(const am_attention_args *a, cudaStream_t stream)
{
    using namespace attention_sm90;
    using Wide = StreamTile<128, 128, 128, 80, 3, 1, true>;
    using Narrow = StreamTile<128, 128, 128, 128, 2, 2, true>; /* 128 heads a key head */
    if (Wide::kM % (a->q.shape[1] / a->k.shape[1]) == 0)
        return launch_stream<Wide, __nv_bfloat16>(a, stream);
    return launch_stream<Narrow, __nv_bfloat16>(a, stream);
}
