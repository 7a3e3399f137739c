/* moe_product_tn_f32_sm90.cu -- parts of a weight's gradient in float32; see moe_product_sm90.cuh. */
#include "moe_product_sm90.cuh"

am_status moe_product_tn_f32_sm90(const MoeProduct *p, cudaStream_t stream)
{
    return moe_sm90::launch<MOE_TN, false, float>(p, stream);
}
