#include "exchange.h"

#include <string.h>

#include "am_bf16.h"
#include "am_cpu.h"
#include "am_pool.h"
#include "am_rows.h"

enum { SUM_ROWS = 16, SUM_COLUMNS = 256, COPY_BYTES = 1 << 18 };

/* Rows [begin, end) of out, summed. */
typedef void (*sum_fn)(const am_exchange_rows_args *a, int64_t width, int64_t begin, int64_t end);

#define AS_IS(x) (x)

#define AM_CPU_INC "exchange_cpu.inc"
#include "am_each_isa.h"
#if defined(__x86_64__)
#define SUMS_BY_ISA {sum_scalar, sum_avx2, sum_avx512, sum_avx512}
#else
#define SUMS_BY_ISA {sum_scalar, sum_scalar, sum_scalar, sum_scalar}
#endif
static const sum_fn *const sums[AM_ISA_COUNT] = SUMS_BY_ISA;

typedef struct sum_job {
    const am_exchange_rows_args *args;
    sum_fn run;
    int64_t width;
} sum_job;

typedef struct copy_job {
    char *to;
    const char *from;
    size_t to_step, from_step, bytes; /* bytes of a row, and between rows */
} copy_job;

/* Elements of a row. */
static int64_t row_width(const am_tensor *t)
{
    int64_t width = 1;
    for (int axis = 1; axis < t->ndim; axis++)
        width *= t->shape[axis];
    return width;
}

static am_status check_rows(const char *fn, const char *name, const am_tensor *t, const am_tensor *out)
{
    AM_CHECK(t->dtype == out->dtype, AM_ERR_DTYPE, "%s: %s is %s, out is %s", fn, name, am_dtype_name(t->dtype),
             am_dtype_name(out->dtype));
    AM_CHECK(t->ndim >= 1 && t->ndim == out->ndim, AM_ERR_SHAPE, "%s: %s has %d axes, out has %d, at least 1 is needed",
             fn, name, t->ndim, out->ndim);
    int64_t compact = 1;
    for (int axis = t->ndim - 1; axis > 0; axis--) {
        AM_CHECK(t->shape[axis] == out->shape[axis], AM_ERR_SHAPE, "%s: axis %d of %s has %lld elements, out has %lld",
                 fn, axis, name, (long long)t->shape[axis], (long long)out->shape[axis]);
        AM_CHECK(am_numel(t) == 0 || t->shape[axis] == 1 || t->stride[axis] == compact, AM_ERR_SHAPE,
                 "%s: axis %d of %s has stride %lld, %lld is needed: a row has no gaps", fn, axis, name,
                 (long long)t->stride[axis], (long long)compact);
        compact *= t->shape[axis];
    }
    return AM_OK;
}

static am_status check_moves(const char *fn, const char *name, const am_i64_array *moves, bool reverse,
                             const am_tensor *x, const am_tensor *out)
{
    AM_CHECK(moves->n % 3 == 0, AM_ERR_SHAPE, "%s: %s has %lld numbers, a multiple of 3 is needed", fn, name,
             (long long)moves->n);
    const int64_t from_rows = x->shape[0], to_rows = out->shape[0];
    for (int64_t i = 0; i < moves->n; i += 3) {
        const int64_t from = moves->data[i + reverse], to = moves->data[i + !reverse], rows = moves->data[i + 2];
        AM_CHECK(rows >= 0 && from >= 0 && from <= from_rows && rows <= from_rows - from, AM_ERR_ARG,
                 "%s: %s[%lld] takes %lld rows from %lld, there are %lld", fn, name, (long long)(i / 3),
                 (long long)rows, (long long)from, (long long)from_rows);
        AM_CHECK(to >= 0 && to <= to_rows && rows <= to_rows - to, AM_ERR_ARG,
                 "%s: %s[%lld] puts %lld rows at %lld, there are %lld", fn, name, (long long)(i / 3), (long long)rows,
                 (long long)to, (long long)to_rows);
    }
    return AM_OK;
}

static am_status check_pair(const char *fn, const am_exchange_rows_args *a, const char *name, const am_tensor *x,
                            const char *moves_name, const am_i64_array *moves, const am_exec *ex)
{
    AM_TRY(check_rows(fn, "out", &a->out, &a->out));
    AM_TRY(check_rows(fn, name, x, &a->out));
    AM_CHECK(ex->dev == AM_DEV_CPU, AM_ERR_UNSUPPORTED, "%s: there is a CPU kernel only, the tensors are on CUDA", fn);
    AM_TRY(check_moves(fn, moves_name, moves, a->reverse, x, &a->out));
    AM_CHECK(!am_overlaps(&a->out, x), AM_ERR_ARG, "%s: out and %s share memory", fn, name);
    return AM_OK;
}

static size_t row_step(const am_tensor *t) { return (size_t)t->stride[0] * am_dtype_size(t->dtype); }

static void copy_range(int64_t begin, int64_t end, void *ctx)
{
    const copy_job *const job = ctx;
    const size_t first = (size_t)begin, rows = (size_t)(end - begin);
    if (job->to_step == job->bytes && job->from_step == job->bytes) {
        memcpy(job->to + first * job->bytes, job->from + first * job->bytes, rows * job->bytes);
        return;
    }
    for (size_t i = first; i < first + rows; i++)
        memcpy(job->to + i * job->to_step, job->from + i * job->from_step, job->bytes);
}

am_status am_exchange_copy(const am_exchange_rows_args *a, const am_exec *ex)
{
    AM_TRY(check_pair("exchange_copy", a, "x", &a->x, "moves", &a->moves, ex));
    const size_t bytes = (size_t)row_width(&a->out) * am_dtype_size(a->out.dtype);
    if (am_numel(&a->out) == 0 || am_numel(&a->x) == 0)
        return AM_OK;
    const int64_t grain = 1 + (int64_t)(COPY_BYTES / bytes);
    for (int64_t i = 0; i < a->moves.n; i += 3) {
        const int64_t from = a->moves.data[i + a->reverse], to = a->moves.data[i + !a->reverse];
        copy_job job = {
            .to_step = row_step(&a->out),
            .from_step = row_step(&a->x),
            .bytes = bytes,
        };
        job.to = (char *)a->out.data + (size_t)to * job.to_step;
        job.from = (const char *)a->x.data + (size_t)from * job.from_step;
        am_parallel_for(a->moves.data[i + 2], grain, copy_range, &job);
    }
    return AM_OK;
}

static void sum_range(int64_t begin, int64_t end, void *ctx)
{
    const sum_job *const job = ctx;
    job->run(job->args, job->width, begin, end);
}

am_status am_exchange_sum(const am_exchange_rows_args *a, const am_exec *ex)
{
    const am_dtype dtype = a->out.dtype;
    AM_CHECK(dtype == AM_F32 || dtype == AM_BF16 || dtype == AM_F64, AM_ERR_DTYPE,
             "exchange_sum: out is %s, float32, bfloat16 or float64 is needed", am_dtype_name(dtype));
    AM_TRY(check_pair("exchange_sum", a, "x", &a->x, "moves", &a->moves, ex));
    AM_TRY(check_pair("exchange_sum", a, "own", &a->own, "own_moves", &a->own_moves, ex));
    AM_CHECK(a->own_after >= 0 && a->own_after <= a->moves.n / 3, AM_ERR_ARG,
             "exchange_sum: own_after is %lld, there are %lld moves", (long long)a->own_after,
             (long long)(a->moves.n / 3));
    if (am_numel(&a->out) == 0)
        return AM_OK;
    sum_job job = {a, sums[am_cpu_isa()][dtype == AM_F32 ? 0 : dtype == AM_BF16 ? 1 : 2], row_width(&a->out)};
    am_parallel_for(a->out.shape[0], SUM_ROWS, sum_range, &job);
    return AM_OK;
}
