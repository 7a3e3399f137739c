#include <stdlib.h>
#include <string.h>

#include "am_bf16.h"
#include "am_pool.h"
#include "exchange_moves.h"

enum { BY_GRAIN = 64 };
static const int64_t MOST_ROWS = (int64_t)1 << 48;

#ifndef AM_WITH_CUDA
#define am_cuda_exchange_copy_by(a, ex) am_no_cuda("exchange_copy_by")
#define am_cuda_exchange_sum_by(a, ex) am_no_cuda("exchange_sum_by")
#endif

static am_status new_list(am_exchange_list *list, int64_t n, int64_t width)
{
    list->data = malloc((size_t)(n * width) * sizeof *list->data);
    AM_CHECK(list->data != NULL, AM_ERR_NOMEM, "exchange: no memory for %lld numbers", (long long)(n * width));
    list->n = list->room = n;
    list->width = width;
    return AM_OK;
}

/* How many rows the moves put, in all. */
static am_status rows_of(const char *fn, const am_i64_array *moves, bool reverse, bool runs, int64_t *rows)
{
    for (int64_t i = 0; i < moves->n; i += move_numbers(runs)) {
        const move m = move_of(moves->data + i, reverse, runs);
        int64_t some;
        const bool fine = !__builtin_mul_overflow(m.rows, m.runs, &some) && !__builtin_add_overflow(*rows, some, rows);
        AM_CHECK(fine && *rows < MOST_ROWS, AM_ERR_ARG, "%s: the moves put more rows than 2^48", fn);
    }
    return AM_OK;
}

am_status am_exchange_table(am_exchange_table_args *a, const am_exec *ex)
{
    (void)ex;
    AM_TRY(am_exchange_check_moves("exchange_table", "moves", &a->moves, a->rows_x, a->rows_out, a->reverse, a->runs));
    const int64_t step = move_numbers(a->runs);
    int64_t all = 0, first = 0, n = 0;
    AM_TRY(rows_of("exchange_table", &a->moves, a->reverse, a->runs, &all));
    AM_TRY(new_list(&a->table, a->moves.n / step + 1, AM_EXCHANGE_ENTRY));
    for (int64_t i = 0; i < a->moves.n; i += step) {
        const move m = move_of(a->moves.data + i, a->reverse, a->runs);
        if (m.rows * m.runs == 0)
            continue;
        const int64_t entry[] = {first, m.from, m.to, m.rows, m.runs, m.from_step, m.to_step};
        memcpy(a->table.data + AM_EXCHANGE_ENTRY * n++, entry, sizeof entry);
        first += m.rows * m.runs;
    }
    memset(a->table.data + AM_EXCHANGE_ENTRY * n, 0, AM_EXCHANGE_ENTRY * sizeof first);
    a->table.data[AM_EXCHANGE_ENTRY * n] = first;
    a->table.n = n + 1;
    return AM_OK;
}

/* What is done for every row that a move puts, in the order of the moves. */
typedef void (*put_fn)(int64_t *index, int64_t to, int64_t source);

static void count_row(int64_t *starts, int64_t to, int64_t source)
{
    (void)source;
    starts[to + 1]++;
}

/* starts[to] is where the row's next source goes. */
static void place_row(int64_t *starts, int64_t to, int64_t source) { starts[starts[to]++] = source; }

static void each_row(const am_exchange_index_args *a, const am_i64_array *moves, bool own, int64_t begin, int64_t end,
                     put_fn put, int64_t *index)
{
    const int64_t step = move_numbers(a->runs);
    for (int64_t i = begin; i < end; i++) {
        const move m = move_of(moves->data + step * i, a->reverse, a->runs);
        for (int64_t run = 0; run < m.runs; run++)
            for (int64_t row = 0; row < m.rows; row++) {
                const int64_t from = m.from + run * m.from_step + row;
                put(index, m.to + run * m.to_step + row, own ? -1 - from : from);
            }
    }
}

static void all_rows(const am_exchange_index_args *a, put_fn put, int64_t *index)
{
    const int64_t step = move_numbers(a->runs);
    each_row(a, &a->moves, false, 0, a->own_after, put, index);
    each_row(a, &a->own_moves, true, 0, a->own_moves.n / step, put, index);
    each_row(a, &a->moves, false, a->own_after, a->moves.n / step, put, index);
}

am_status am_exchange_index(am_exchange_index_args *a, const am_exec *ex)
{
    (void)ex;
    const char *const fn = "exchange_index";
    AM_CHECK(a->rows_out >= 0, AM_ERR_ARG, "%s: rows_out is %lld, it must not be negative", fn, (long long)a->rows_out);
    AM_TRY(am_exchange_check_moves(fn, "moves", &a->moves, a->rows_x, a->rows_out, a->reverse, a->runs));
    AM_TRY(am_exchange_check_moves(fn, "own_moves", &a->own_moves, a->rows_own, a->rows_out, a->reverse, a->runs));
    const int64_t n_moves = a->moves.n / move_numbers(a->runs);
    AM_CHECK(a->own_after >= 0 && a->own_after <= n_moves, AM_ERR_ARG, "%s: own_after is %lld, there are %lld moves",
             fn, (long long)a->own_after, (long long)n_moves);
    AM_CHECK(a->rows_out < MOST_ROWS, AM_ERR_ARG, "%s: rows_out is %lld, too many", fn, (long long)a->rows_out);
    const int64_t starts = a->rows_out + 1;
    int64_t n = 0;
    AM_TRY(rows_of(fn, &a->moves, a->reverse, a->runs, &n));
    AM_TRY(rows_of(fn, &a->own_moves, a->reverse, a->runs, &n));
    AM_TRY(new_list(&a->index, starts + n, 1));
    int64_t *const index = a->index.data;
    memset(index, 0, (size_t)starts * sizeof *index);
    all_rows(a, count_row, index);
    index[0] = starts;
    for (int64_t row = 1; row < starts; row++)
        index[row] += index[row - 1];
    all_rows(a, place_row, index); /* now a row's start is where its sources end */
    memmove(index + 1, index, (size_t)(starts - 1) * sizeof *index);
    index[0] = starts;
    return AM_OK;
}

typedef struct by_job {
    const am_exchange_by_args *args;
    int64_t entries;
    size_t bytes;
} by_job;

static char *row_at(const am_tensor *t, int64_t row)
{
    return (char *)t->data + (size_t)row * (size_t)t->stride[0] * am_dtype_size(t->dtype);
}

/* Where a row of an entry comes from and goes; whether it is anywhere. No number of a table overflows. */
static bool places_of(const int64_t *e, int64_t row, int64_t *from, int64_t *to)
{
    const uint64_t at = (uint64_t)row - (uint64_t)e[0], rows = (uint64_t)e[3];
    if (e[3] < 1)
        return false;
    const uint64_t run = at / rows, i = at - run * rows;
    *from = (int64_t)((uint64_t)e[1] + run * (uint64_t)e[5] + i);
    *to = (int64_t)((uint64_t)e[2] + run * (uint64_t)e[6] + i);
    return *from >= 0 && *to >= 0;
}

static void copy_rows(int64_t begin, int64_t end, void *ctx)
{
    const by_job *const job = ctx;
    const am_exchange_by_args *const a = job->args;
    const int64_t *const table = a->table.data;
    int64_t low = 0, high = job->entries - 1; /* the last entry whose first row is not after `begin` */
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        *(table[AM_EXCHANGE_ENTRY * middle] <= begin ? &low : &high) = middle;
    }
    for (int64_t row = begin; row < end; row++) {
        while (low + 2 < job->entries && table[AM_EXCHANGE_ENTRY * (low + 1)] <= row)
            low++;
        int64_t from, to;
        if (places_of(table + AM_EXCHANGE_ENTRY * low, row, &from, &to) && from < a->x.shape[0] && to < a->out.shape[0])
            memcpy(row_at(&a->out, to), row_at(&a->x, from), job->bytes);
    }
}

/* The row of x or of own that a source names, NULL where there is none. */
static const void *source_of(const am_exchange_by_args *a, int64_t source)
{
    const am_tensor *const t = source < 0 ? &a->own : &a->x;
    const int64_t row = source < 0 ? -1 - source : source;
    return row < t->shape[0] ? row_at(t, row) : NULL;
}

#define AS_IS(x) (x)
#define SUM_ROW(type, sum_t, load, store)                                                                              \
    static void sum_row_##type(const am_exchange_by_args *a, int64_t row, int64_t begin, int64_t end, int64_t width)   \
    {                                                                                                                  \
        type *const out = (type *)row_at(&a->out, row);                                                                \
        for (int64_t i = 0; i < width; i++) {                                                                          \
            sum_t sum = 0;                                                                                             \
            bool started = false;                                                                                      \
            for (int64_t n = begin; n < end; n++) {                                                                    \
                const type *const in = source_of(a, ((const int64_t *)a->table.data)[n]);                              \
                if (in == NULL)                                                                                        \
                    continue;                                                                                          \
                sum = started ? sum + load(in[i]) : load(in[i]);                                                       \
                started = true;                                                                                        \
            }                                                                                                          \
            out[i] = store(sum);                                                                                       \
        }                                                                                                              \
    }

SUM_ROW(float, float, AS_IS, AS_IS)
SUM_ROW(am_bf16, float, am_bf16_to_f32, am_f32_to_bf16)
SUM_ROW(double, double, AS_IS, AS_IS)

static void sum_rows(int64_t begin, int64_t end, void *ctx)
{
    const by_job *const job = ctx;
    const am_exchange_by_args *const a = job->args;
    const int64_t *const index = a->table.data, width = am_exchange_width(&a->out), n = a->table.shape[0];
    const am_dtype dtype = a->out.dtype;
    for (int64_t row = begin; row < end; row++) {
        const int64_t first = index[row] < 0 ? 0 : index[row], last = index[row + 1] < n ? index[row + 1] : n;
        (dtype == AM_F32    ? sum_row_float
         : dtype == AM_BF16 ? sum_row_am_bf16
                            : sum_row_double)(a, row, first, last, width);
    }
}

static am_status check_table(const char *fn, const am_exchange_by_args *a)
{
    AM_CHECK(a->table.dtype == AM_I64, AM_ERR_DTYPE, "%s: table is %s, int64 is needed", fn,
             am_dtype_name(a->table.dtype));
    AM_CHECK(am_is_contiguous(&a->table), AM_ERR_SHAPE, "%s: table is not contiguous", fn);
    return AM_OK;
}

static am_status check_source(const char *fn, const char *name, const am_exchange_by_args *a, const am_tensor *x)
{
    AM_TRY(am_exchange_check_rows(fn, "out", &a->out, &a->out));
    AM_TRY(am_exchange_check_rows(fn, name, x, &a->out));
    AM_CHECK(!am_overlaps(&a->out, x), AM_ERR_ARG, "%s: out and %s share memory", fn, name);
    return AM_OK;
}

am_status am_exchange_copy_by(const am_exchange_by_args *a, const am_exec *ex)
{
    const char *const fn = "exchange_copy_by";
    AM_TRY(check_source(fn, "x", a, &a->x));
    AM_TRY(check_table(fn, a));
    AM_CHECK(a->table.ndim == 2 && a->table.shape[0] >= 1 && a->table.shape[1] == AM_EXCHANGE_ENTRY, AM_ERR_SHAPE,
             "%s: table has %d axes and %lld rows, [n + 1, %d] is needed", fn, a->table.ndim,
             (long long)(a->table.ndim ? a->table.shape[0] : 1), AM_EXCHANGE_ENTRY);
    AM_CHECK(a->rows >= 0, AM_ERR_ARG, "%s: rows is %lld, it must not be negative", fn, (long long)a->rows);
    AM_CHECK(a->rows == 0 || a->table.shape[0] > 1, AM_ERR_ARG, "%s: %lld rows of a table without moves", fn,
             (long long)a->rows);
    if (a->rows == 0 || am_numel(&a->out) == 0 || am_numel(&a->x) == 0)
        return AM_OK;
    if (ex->dev == AM_DEV_CUDA)
        return am_cuda_exchange_copy_by(a, ex);
    const int64_t told = ((const int64_t *)a->table.data)[AM_EXCHANGE_ENTRY * (a->table.shape[0] - 1)];
    AM_CHECK(a->rows <= told || a->rows <= a->out.shape[0], AM_ERR_ARG, "%s: rows is %lld, the table ends at %lld", fn,
             (long long)a->rows, (long long)told);
    by_job job = {a, a->table.shape[0], (size_t)am_exchange_width(&a->out) * am_dtype_size(a->out.dtype)};
    am_parallel_for(a->rows, BY_GRAIN, copy_rows, &job);
    return AM_OK;
}

am_status am_exchange_sum_by(const am_exchange_by_args *a, const am_exec *ex)
{
    const char *const fn = "exchange_sum_by";
    const am_dtype dtype = a->out.dtype;
    AM_CHECK(dtype == AM_F32 || dtype == AM_BF16 || dtype == AM_F64, AM_ERR_DTYPE,
             "%s: out is %s, float32, bfloat16 or float64 is needed", fn, am_dtype_name(dtype));
    AM_TRY(check_source(fn, "x", a, &a->x));
    AM_TRY(check_source(fn, "own", a, &a->own));
    AM_TRY(check_table(fn, a));
    AM_CHECK(a->table.ndim == 1 && a->table.shape[0] > a->out.shape[0], AM_ERR_SHAPE,
             "%s: index has %d axes and %lld numbers, out has %lld rows: [rows + 1 + n] is needed", fn, a->table.ndim,
             (long long)am_numel(&a->table), (long long)a->out.shape[0]);
    if (am_numel(&a->out) == 0)
        return AM_OK;
    if (ex->dev == AM_DEV_CUDA)
        return am_cuda_exchange_sum_by(a, ex);
    by_job job = {.args = a};
    am_parallel_for(a->out.shape[0], BY_GRAIN, sum_rows, &job);
    return AM_OK;
}
