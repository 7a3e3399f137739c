#include <stdatomic.h>

#include "am_cpu.h"
#include "am_pool.h"
#include "am_slots.h"
#include "loss_rows.h"
#include "product_plan.h"

enum { LEAST_ROWS = 128 }; /* of a block, where there are few blocks a thread */
static const char *const fn = "linear_cross_entropy_product";

#ifndef AM_WITH_CUDA
#define am_cuda_lce_product(a, ex) am_no_cuda(fn)
#define am_cuda_lce_product_workspace(a) am_no_cuda(fn)
#endif

typedef struct product_job {
    const am_lce_product_args *args;
    product_lines left, right;
    int64_t block_rows, down; /* of a block, and blocks one under the other */
    product_fn run;
    am_slots slots;
} product_job;

am_status am_lce_product_workspace(am_lce_product_args *a, const am_exec *ex)
{
    AM_TRY(am_loss_check_matrix(fn, "left", &a->left));
    if (ex->dev != AM_DEV_CPU)
        return am_cuda_lce_product_workspace(a);
    a->workspace_bytes = AM_MAX_THREADS + AM_SLOT_LINE + (int64_t)am_num_threads() * PRODUCT_BYTES;
    return AM_OK;
}

static am_status check_operand(const char *name, const am_tensor *t, const am_lce_product_args *a)
{
    AM_TRY(am_loss_check_matrix(fn, name, t));
    AM_CHECK(t->dtype == a->left.dtype, AM_ERR_DTYPE, "%s: %s is %s, left is %s", fn, name, am_dtype_name(t->dtype),
             am_dtype_name(a->left.dtype));
    AM_CHECK(t->shape[0] <= 1 || t->shape[1] <= 1 || t->stride[0] == 1 || t->stride[1] == 1, AM_ERR_SHAPE,
             "%s: %s has strides %lld and %lld, one must be 1", fn, name, (long long)t->stride[0],
             (long long)t->stride[1]);
    return AM_OK;
}

static am_status check(const am_lce_product_args *a)
{
    AM_TRY(check_operand("left", &a->left, a));
    AM_TRY(check_operand("right", &a->right, a));
    AM_TRY(am_loss_check_rows(fn, "out", &a->out));
    const int64_t rows = a->left.shape[0], depth = a->left.shape[1], columns = a->right.shape[1];
    AM_CHECK(a->right.shape[0] == depth, AM_ERR_SHAPE, "%s: right has %lld rows, left has %lld columns", fn,
             (long long)a->right.shape[0], (long long)depth);
    AM_CHECK(a->out.shape[0] == rows && a->out.shape[1] == columns, AM_ERR_SHAPE,
             "%s: out is [%lld, %lld], [%lld, %lld] is needed", fn, (long long)a->out.shape[0],
             (long long)a->out.shape[1], (long long)rows, (long long)columns);
    AM_CHECK(a->out.dtype == AM_F32 || (a->out.dtype == a->left.dtype && !a->add), AM_ERR_DTYPE,
             "%s: out is %s; float32, or without add left's dtype, is needed", fn, am_dtype_name(a->out.dtype));
    AM_CHECK(a->workspace.dtype == AM_U8 && a->workspace.ndim == 1 && am_is_contiguous(&a->workspace), AM_ERR_ARG,
             "%s: workspace must be contiguous uint8", fn);
    return AM_OK;
}

/* Lines of an operand along `axis`. Where there is one line, or one element a line, that axis' stride may be anything.
 */
static product_lines lines_of(const am_tensor *t, int axis)
{
    const bool along = t->stride[1 - axis] == 1 || t->shape[1 - axis] <= 1;
    return (product_lines){t->data, t->stride[axis], along ? 1 : t->stride[1 - axis], t->dtype};
}

static product_fn pick(am_dtype dtype)
{
#if defined(__x86_64__)
    const am_isa isa = am_cpu_isa();
    if (dtype == AM_BF16 && isa == AM_ISA_AVX512_BF16)
        return am_product_bf16;
    return isa == AM_ISA_SCALAR ? am_product_scalar : isa == AM_ISA_AVX2 ? am_product_avx2 : am_product_avx512;
#else
    (void)dtype;
    return am_product_scalar;
#endif
}

static void blocks(int64_t begin, int64_t end, void *ctx)
{
    product_job *const job = ctx;
    const am_lce_product_args *const a = job->args;
    const int64_t size = (int64_t)am_dtype_size(a->left.dtype);
    char *memory;
    const int64_t slot = am_slots_claim(&job->slots, &memory);
    for (int64_t i = begin; i < end; i++) {
        const int64_t row = i % job->down * job->block_rows, column = i / job->down * PRODUCT_COLUMNS;
        product_task task = {.out = am_at(&a->out, row * a->out.stride[0] + column),
                             .out_row = a->out.stride[0],
                             .out_dtype = a->out.dtype,
                             .left = job->left,
                             .right = job->right,
                             .rows = am_min(job->block_rows, a->out.shape[0] - row),
                             .columns = am_min(PRODUCT_COLUMNS, a->out.shape[1] - column),
                             .depth = a->left.shape[1],
                             .add = a->add,
                             .memory = memory};
        if (task.depth > 0) { /* or the operands may have no address */
            task.left.data += row * task.left.line * size;
            task.right.data += column * task.right.line * size;
        }
        job->run(&task);
    }
    am_slots_release(&job->slots, slot);
}

am_status am_lce_product(am_lce_product_args *a, const am_exec *ex)
{
    AM_TRY(check(a));
    if (ex->dev != AM_DEV_CPU)
        return am_cuda_lce_product(a, ex);
    const int64_t rows = a->out.shape[0], columns = a->out.shape[1];
    product_job job = {.args = a, .left = lines_of(&a->left, 0), .right = lines_of(&a->right, 1)};
    job.slots.bytes = PRODUCT_BYTES;
    char *start;
    AM_TRY(am_slots_lay(&job.slots, fn, &a->workspace, AM_MAX_THREADS, &start));
    job.slots.busy = (atomic_flag *)start;
    am_slots_reset(&job.slots);
    job.run = pick(a->left.dtype);
    const int64_t across = (columns + PRODUCT_COLUMNS - 1) / PRODUCT_COLUMNS, enough = 4 * am_num_threads();
    job.block_rows = PRODUCT_ROWS;
    while (job.block_rows > LEAST_ROWS && across * ((rows + job.block_rows - 1) / job.block_rows) < enough)
        job.block_rows /= 2;
    job.down = (rows + job.block_rows - 1) / job.block_rows;
    am_parallel_for(across * job.down, 1, blocks, &job);
    return AM_OK;
}
