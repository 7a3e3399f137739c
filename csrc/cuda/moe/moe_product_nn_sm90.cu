/* moe_product_nn_sm90.cu -- rows times columns of weights; see moe_product_sm90.cuh. */
#include "moe_product_sm90.cuh"

am_status moe_product_nn_sm90(const MoeProduct *p, cudaStream_t stream)
{
    return moe_sm90::launch<MOE_NN, false, __nv_bfloat16>(p, stream);
}
