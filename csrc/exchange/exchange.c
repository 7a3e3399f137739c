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

typedef struct move { /* rows x[from + i] -> out[to + i], `runs` times, a step further each time */
    int64_t from, to, rows, runs, from_step, to_step;
} move;

static inline int move_numbers(const am_exchange_rows_args *a) { return a->runs ? 6 : 3; }

static inline move move_of(const am_exchange_rows_args *a, const int64_t *m)
{
    move found = {m[a->reverse], m[!a->reverse], m[2], 1, 0, 0};
    if (a->runs) {
        found.runs = m[3];
        found.from_step = m[4 + a->reverse];
        found.to_step = m[4 + !a->reverse];
    }
    return found;
}

/* Whether `runs` times `rows` from `at` on lie inside `all`; none of them negative but perhaps `at`. */
static bool fits(int64_t at, int64_t rows, int64_t runs, int64_t step, int64_t all)
{
    return at >= 0 && at <= all && rows <= all - at && (runs <= 1 || step == 0 || runs - 1 <= (all - at - rows) / step);
}

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

static am_status check_moves(const char *fn, const char *name, const am_i64_array *moves, const am_tensor *x,
                             const am_exchange_rows_args *a)
{
    const int n = move_numbers(a);
    AM_CHECK(moves->n % n == 0, AM_ERR_SHAPE, "%s: %s has %lld numbers, a multiple of %d is needed", fn, name,
             (long long)moves->n, n);
    const int64_t from_rows = x->shape[0], to_rows = a->out.shape[0];
    for (int64_t i = 0; i < moves->n / n; i++) {
        const move m = move_of(a, moves->data + n * i);
        AM_CHECK(m.rows >= 0 && fits(m.from, m.rows, 1, 0, from_rows), AM_ERR_ARG,
                 "%s: %s[%lld] takes %lld rows from %lld, there are %lld", fn, name, (long long)i, (long long)m.rows,
                 (long long)m.from, (long long)from_rows);
        AM_CHECK(fits(m.to, m.rows, 1, 0, to_rows), AM_ERR_ARG, "%s: %s[%lld] puts %lld rows at %lld, there are %lld",
                 fn, name, (long long)i, (long long)m.rows, (long long)m.to, (long long)to_rows);
        AM_CHECK(m.runs >= 0 && m.from_step >= 0 && m.to_step >= 0, AM_ERR_ARG,
                 "%s: %s[%lld] comes %lld times in steps of %lld and %lld, none may be negative", fn, name,
                 (long long)i, (long long)m.runs, (long long)m.from_step, (long long)m.to_step);
        AM_CHECK(fits(m.from, m.rows, m.runs, m.from_step, from_rows) && fits(m.to, m.rows, m.runs, m.to_step, to_rows),
                 AM_ERR_ARG, "%s: %s[%lld] comes %lld times in steps of %lld and %lld, beyond %lld or %lld rows", fn,
                 name, (long long)i, (long long)m.runs, (long long)m.from_step, (long long)m.to_step,
                 (long long)from_rows, (long long)to_rows);
    }
    return AM_OK;
}

static am_status check_pair(const char *fn, const am_exchange_rows_args *a, const char *name, const am_tensor *x,
                            const char *moves_name, const am_i64_array *moves, const am_exec *ex)
{
    AM_TRY(check_rows(fn, "out", &a->out, &a->out));
    AM_TRY(check_rows(fn, name, x, &a->out));
    AM_CHECK(ex->dev == AM_DEV_CPU, AM_ERR_UNSUPPORTED, "%s: there is a CPU kernel only, the tensors are on CUDA", fn);
    AM_TRY(check_moves(fn, moves_name, moves, x, a));
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
    const size_t bytes = (size_t)row_width(&a->out) * am_dtype_size(a->out.dtype);
    if (am_numel(&a->out) == 0 || am_numel(&a->x) == 0)
        return AM_OK;
    for (int64_t i = 0; i < a->moves.n; i += move_numbers(a))
        copy_move(a, move_of(a, a->moves.data + i), bytes);
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
    const int64_t n_moves = a->moves.n / move_numbers(a);
    AM_CHECK(a->own_after >= 0 && a->own_after <= n_moves, AM_ERR_ARG,
             "exchange_sum: own_after is %lld, there are %lld moves", (long long)a->own_after, (long long)n_moves);
    if (am_numel(&a->out) == 0)
        return AM_OK;
    sum_job job = {a, sums[am_cpu_isa()][dtype == AM_F32 ? 0 : dtype == AM_BF16 ? 1 : 2], row_width(&a->out)};
    am_parallel_for(a->out.shape[0], SUM_ROWS, sum_range, &job);
    return AM_OK;
}
