#include "exchange.h"

#include <string.h>

#include "am_bf16.h"
#include "am_cpu.h"
#include "am_pool.h"
#include "am_rows.h"
#include "exchange_moves.h"

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

static am_status check_pair(const char *fn, const am_exchange_rows_args *a, const char *name, const am_tensor *x,
                            const char *moves_name, const am_i64_array *moves, const am_exec *ex)
{
    AM_TRY(am_exchange_check_rows(fn, "out", &a->out, &a->out));
    AM_TRY(am_exchange_check_rows(fn, name, x, &a->out));
    AM_CHECK(ex->dev == AM_DEV_CPU, AM_ERR_UNSUPPORTED, "%s: the tensors are on CUDA, where %s_by takes a table", fn,
             fn);
    AM_TRY(am_exchange_check_moves(fn, moves_name, moves, x->shape[0], a->out.shape[0], a->reverse, a->runs));
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

static void copy_move(const am_exchange_rows_args *a, move m, size_t bytes)
{
    const size_t to_step = row_step(&a->out), from_step = row_step(&a->x);
    copy_job job = {
        .to = (char *)a->out.data + (size_t)m.to * to_step,
        .from = (const char *)a->x.data + (size_t)m.from * from_step,
        .to_step = to_step,
        .from_step = from_step,
        .bytes = bytes,
    };
    int64_t n = m.rows, times = m.runs;
    if (times != 1) { /* one run is one long row; where rows are not dense, one column of rows after another */
        const bool dense = to_step == bytes && from_step == bytes;
        job.to_step *= (size_t)m.to_step;
        job.from_step *= (size_t)m.from_step;
        job.bytes *= dense ? (size_t)m.rows : 1;
        n = m.runs;
        times = dense ? m.rows > 0 : m.rows;
    }
    const int64_t grain = 1 + (int64_t)(COPY_BYTES / (job.bytes + 1));
    for (; times > 0; times--, job.to += to_step, job.from += from_step)
        am_parallel_for(n, grain, copy_range, &job);
}

am_status am_exchange_copy(const am_exchange_rows_args *a, const am_exec *ex)
{
    AM_TRY(check_pair("exchange_copy", a, "x", &a->x, "moves", &a->moves, ex));
    const size_t bytes = (size_t)am_exchange_width(&a->out) * am_dtype_size(a->out.dtype);
    if (am_numel(&a->out) == 0 || am_numel(&a->x) == 0)
        return AM_OK;
    for (int64_t i = 0; i < a->moves.n; i += move_numbers(a->runs))
        copy_move(a, move_of(a->moves.data + i, a->reverse, a->runs), bytes);
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
    const int64_t n_moves = a->moves.n / move_numbers(a->runs);
    AM_CHECK(a->own_after >= 0 && a->own_after <= n_moves, AM_ERR_ARG,
             "exchange_sum: own_after is %lld, there are %lld moves", (long long)a->own_after, (long long)n_moves);
    if (am_numel(&a->out) == 0)
        return AM_OK;
    sum_job job = {a, sums[am_cpu_isa()][dtype == AM_F32 ? 0 : dtype == AM_BF16 ? 1 : 2], am_exchange_width(&a->out)};
    am_parallel_for(a->out.shape[0], SUM_ROWS, sum_range, &job);
    return AM_OK;
}
