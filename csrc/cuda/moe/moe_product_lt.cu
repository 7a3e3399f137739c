/* moe_product_lt.cu -- products over groups of rows by cuBLASLt, one group after the other.
 *
 * The plain row beside our kernels, and what they are measured and tested against. It needs the rows of every group on
 * the host, which only a caller who knows them can give; without room of its own cuBLASLt takes kernels that need none.
 *
 * Floor: as moe_product_sm90.cuh; groups follow one another, so that each ends with idle multiprocessors.
 */
#include "gemm.h"
#include "moe_job.h"

namespace
{

am_tensor matrix(const void *data, am_dtype dtype, int64_t at, int64_t rows, int64_t columns, int64_t row_stride,
                 int64_t column_stride)
{
    am_tensor t = {};
    t.data = const_cast<char *>(static_cast<const char *>(data)) + at * static_cast<int64_t>(am_dtype_size(dtype));
    t.dtype = dtype;
    t.ndim = 2;
    t.shape[0] = rows, t.shape[1] = columns;
    t.stride[0] = row_stride, t.stride[1] = column_stride;
    return t;
}

am_status run_group(const MoeProduct *p, int group, int64_t first, int64_t rows, cudaStream_t stream)
{
    am_tensor left, right, out;
    if (p->kind == MOE_TN) {
        left = matrix(p->a, p->dtype, first * p->lda, p->m, rows, 1, p->lda);
        right = matrix(p->b, p->dtype, first * p->ldb, rows, p->n, p->ldb, 1);
        out = matrix(p->c, p->to, group * p->c_group, p->m, p->n, p->ldc, 1);
    } else {
        const bool across = p->kind == MOE_NT;
        left = matrix(p->a, p->dtype, first * p->lda, rows, p->k, p->lda, 1);
        right = matrix(p->b, p->dtype, group * p->b_group, p->k, p->n, across ? 1 : p->ldb, across ? p->ldb : 1);
        out = matrix(p->c, p->to, first * p->ldc, rows, p->n, p->ldc, 1);
    }
    gemm_call call = {};
    call.out = &out;
    call.left = &left;
    call.right = &right;
    call.add = p->add;
    return gemm_run(&call, stream);
}

} // namespace

am_status moe_product_lt(const MoeProduct *p, cudaStream_t stream)
{
    int64_t first = 0;
    for (int g = 0; g < p->groups; first += p->counts[g++])
        AM_TRY(run_group(p, g, first, p->counts[g], stream));
    return p->gate ? moe_swiglu(p, stream) : AM_OK;
}
