/* moe_product_nt_sm90.cu -- rows times rows of weights; see moe_product_sm90.cuh. */
#include "moe_product_sm90.cuh"

am_status moe_product_nt_sm90(const MoeProduct *p, cudaStream_t stream)
{
    return moe_sm90::launch<MOE_NT, false, __nv_bfloat16>(p, stream);
}
