/* moe_product_gate_sm90.cu -- gate_up with its activation; see moe_product_sm90.cuh. */
#include "moe_product_sm90.cuh"

am_status moe_product_gate_sm90(const MoeProduct *p, cudaStream_t stream)
{
    return moe_sm90::launch<MOE_NT, true, __nv_bfloat16>(p, stream);
}
