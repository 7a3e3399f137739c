/* linear.cu -- the three products of the layer, by cuBLASLt.
 *
 *   logits = hidden W^T    [n, Vc] bf16 or f32     dhidden += dlogits W    [n, H] f32
 *   dW = dlogits^T hidden  [Vc, H]: one product over all n rows, so that it is rounded once
 *
 * 2 n Vc H flops each; at 8,192 x 3,072 x 248,320 and 790 TFLOP/s 15.8 ms.
 */
#include "gemm.h"
#include "on_device.h"

extern "C" {
#include "loss.h"
}

namespace
{

am_status product(const am_lce_product_args *a, cudaStream_t stream)
{
    const gemm_call call = {&a->out, &a->left, &a->right, a->workspace.data, am_numel(&a->workspace), a->add};
    return gemm_run(&call, stream);
}

} // namespace

extern "C" am_status am_cuda_lce_product(const am_lce_product_args *a, const am_exec *ex)
{
    return on_device(product, a, ex);
}

extern "C" am_status am_cuda_lce_product_workspace(am_lce_product_args *a)
{
    a->workspace_bytes = GEMM_WORKSPACE;
    return AM_OK;
}
