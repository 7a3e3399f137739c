/* moe_product_tn_sm90.cu -- gradients of weights; see moe_product_sm90.cuh. */
#include "moe_product_sm90.cuh"

am_status moe_product_tn_sm90(const MoeProduct *p, cudaStream_t stream)
{
    return moe_sm90::launch<MOE_TN, false, __nv_bfloat16>(p, stream);
}
