#include "exchange.h"

#include <string.h>

#include "am_bf16.h"
#include "am_cpu.h"
#include "am_pool.h"
#include "am_rows.h"
#include "am_stream.h"
#include "exchange_moves.h"

/* Bytes and rows of a tile of sums; bytes of a chunk of a copy, and of a piece that memcpy is too much for; moves that
 * are copied together. */
enum { SUM_BYTES = 1 << 15, SUM_ROWS = 128, COPY_BYTES = 1 << 17, PIECE_BYTES = 1 << 12, COPY_MOVES = 1024 };

#define AS_IS(x) (x)

typedef struct sum_kernels {
    void (*more)(void *sums, const void *first, const void *next, int64_t n); /* first: NULL where sums hold it */
    void (*round)(void *to, const void *sums, int64_t n);                     /* NULL: sums are of out's dtype */
    int64_t size;                                                             /* bytes of a sum */
} sum_kernels;

typedef struct exchange_kernels {
    void (*copy)(char *to, const char *from, size_t bytes);
    sum_kernels sums[3]; /* f32, bf16, f64 */
} exchange_kernels;

#define AM_CPU_INC "exchange_cpu.inc"
#include "am_each_isa.h"
#if defined(__x86_64__)
static const exchange_kernels *const by_isa[AM_ISA_COUNT] = {&kernels_scalar, &kernels_avx2, &kernels_avx512,
                                                             &kernels_avx512};
#else
static const exchange_kernels *const by_isa[AM_ISA_COUNT] = {&kernels_scalar, &kernels_scalar, &kernels_scalar,
                                                             &kernels_scalar};
#endif

typedef struct copy_job { /* moves [first, stop), which come equally often */
    const am_exchange_rows_args *args;
    int64_t first, stop, rows; /* rows of all of them, each once */
    size_t bytes;              /* of a row */
    bool stream;
} copy_job;

typedef struct sum_job { /* a row is 2^shift of the caller's: short ones that always come together */
    const am_exchange_rows_args *args;
    const sum_kernels *kernels;
    int64_t width, columns; /* of out, and of a tile */
    int shift;
    bool stream;
} sum_job;

typedef struct sum_tile { /* rows [begin, end), columns [column, column + n) of out */
    const sum_job *job;
    int64_t begin, end, column, n;
    const char *only[SUM_ROWS]; /* the row that came, while it is the only one */
    bool summed[SUM_ROWS];
    _Alignas(64) char sums[SUM_BYTES];
    _Alignas(64) char rounded[SUM_BYTES / 2];
} sum_tile;

static move move_at(const am_exchange_rows_args *a, const am_i64_array *moves, int64_t i)
{
    return move_of(moves->data + move_numbers(a->runs) * i, a->reverse, a->runs);
}

static int64_t move_count(const am_exchange_rows_args *a, const am_i64_array *moves)
{
    return moves->n / move_numbers(a->runs);
}

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

static void copy_bytes(void *to, const void *from, size_t bytes, bool stream)
{
    if (stream)
        am_stream_copy(to, from, bytes);
    else if (bytes < PIECE_BYTES)
        by_isa[am_cpu_isa()]->copy(to, from, bytes);
    else
        memcpy(to, from, bytes);
}

static void copy_rows(const copy_job *job, int64_t from, int64_t to, int64_t rows)
{
    const am_exchange_rows_args *const a = job->args;
    const size_t bytes = job->bytes, to_step = row_step(&a->out), from_step = row_step(&a->x);
    char *out = (char *)a->out.data + (size_t)to * to_step;
    const char *x = (const char *)a->x.data + (size_t)from * from_step;
    if (to_step == bytes && from_step == bytes) {
        copy_bytes(out, x, (size_t)rows * bytes, job->stream);
        return;
    }
    for (; rows > 0; rows--, out += to_step, x += from_step)
        copy_bytes(out, x, bytes, job->stream);
}

/* Times [begin, end) of every move, side by side: the heads of a row lie behind one another. */
static void copy_times(int64_t begin, int64_t end, void *ctx)
{
    const copy_job *const job = ctx;
    const am_exchange_rows_args *const a = job->args;
    for (int64_t time = begin; time < end; time++)
        for (int64_t i = job->first; i < job->stop; i++) {
            const move m = move_at(a, &a->moves, i);
            copy_rows(job, m.from + time * m.from_step, m.to + time * m.to_step, m.rows);
        }
    if (job->stream)
        am_stream_end();
}

/* Rows [begin, end) of the moves laid end to end. */
static void copy_range(int64_t begin, int64_t end, void *ctx)
{
    const copy_job *const job = ctx;
    const am_exchange_rows_args *const a = job->args;
    int64_t before = 0;
    for (int64_t i = job->first; i < job->stop && before < end; i++) {
        const move m = move_at(a, &a->moves, i);
        const int64_t skip = begin > before ? begin - before : 0, last = end - before < m.rows ? end - before : m.rows;
        if (skip < last)
            copy_rows(job, m.from + skip, m.to + skip, last - skip);
        before += m.rows;
    }
    if (job->stream)
        am_stream_end();
}

am_status am_exchange_copy(const am_exchange_rows_args *a, const am_exec *ex)
{
    AM_TRY(check_pair("exchange_copy", a, "x", &a->x, "moves", &a->moves, ex));
    const size_t bytes = (size_t)am_exchange_width(&a->out) * am_dtype_size(a->out.dtype);
    if (am_numel(&a->out) == 0 || am_numel(&a->x) == 0)
        return AM_OK;
    const int64_t n_moves = move_count(a, &a->moves);
    const bool stream = am_numel(&a->out) * (int64_t)am_dtype_size(a->out.dtype) >= AM_STREAM_BYTES;
    for (copy_job job = {a, 0, 0, 0, bytes, stream}; job.first < n_moves; job.first = job.stop) {
        const int64_t times = move_at(a, &a->moves, job.first).runs;
        for (job.rows = 0; job.stop < n_moves && job.stop - job.first < COPY_MOVES; job.stop++) {
            const move m = move_at(a, &a->moves, job.stop);
            if (m.runs != times)
                break;
            job.rows += m.rows;
        }
        if (job.rows == 0)
            continue;
        if (times == 1)
            am_parallel_for(job.rows, 1 + COPY_BYTES / (int64_t)(bytes + 1), copy_range, &job);
        else
            am_parallel_for(times, 1 + COPY_BYTES / (job.rows * (int64_t)bytes + 1), copy_times, &job);
    }
    return AM_OK;
}

static void *sum_row(const sum_job *job, const am_tensor *t, int64_t row, int64_t column)
{
    return am_at(t, (row << job->shift) * t->stride[0] + column);
}

/* Rows x[from + i] meet what came for out[to + i] before. */
static void meet_rows(sum_tile *t, const am_tensor *x, int64_t from, int64_t to, int64_t rows)
{
    const sum_kernels *const kernels = t->job->kernels;
    const int64_t first = to - t->begin;
    const size_t step = row_step(x) << t->job->shift;
    const char *row = sum_row(t->job, x, from, t->column);
    for (int64_t i = first; i < first + rows; i++, row += step) {
        if (t->only[i] == NULL && !t->summed[i]) {
            t->only[i] = row;
            continue;
        }
        kernels->more(t->sums + i * t->n * kernels->size, t->only[i], row, t->n);
        t->only[i] = NULL;
        t->summed[i] = true;
    }
}

/* Adds what moves [first, stop) put into the tile. */
static void add_moves(sum_tile *t, const am_tensor *x, const am_i64_array *moves, int64_t first, int64_t stop)
{
    const am_exchange_rows_args *const a = t->job->args;
    const int shift = t->job->shift;
    for (int64_t i = first; i < stop; i++) {
        const move one = move_at(a, moves, i);
        const move m = {one.from >> shift, one.to >> shift,        one.rows >> shift,
                        one.runs,          one.from_step >> shift, one.to_step >> shift};
        if (m.rows == 0)
            continue;
        const int64_t past = m.to_step > 0 ? t->begin - m.to - m.rows : -1; /* runs before the tile */
        for (int64_t run = past < 0 ? 0 : past / m.to_step + 1; run < m.runs; run++) {
            const int64_t to = m.to + run * m.to_step, end = to + m.rows < t->end ? to + m.rows : t->end;
            const int64_t row = to > t->begin ? to : t->begin;
            if (to >= t->end)
                break;
            meet_rows(t, x, m.from + run * m.from_step + (row - to), row, end - row);
        }
    }
}

/* How many rows from `row` on came alone, one `bytes` behind another. */
static int64_t run_of(const sum_tile *t, int64_t row, size_t bytes)
{
    int64_t rows = 1;
    while (row + rows < t->end - t->begin && t->only[row + rows] == t->only[row] + (size_t)rows * bytes)
        rows++;
    return rows;
}

static void finish_tile(sum_tile *t)
{
    const am_tensor *const out = &t->job->args->out;
    const sum_kernels *const kernels = t->job->kernels;
    const size_t bytes = (size_t)t->n * am_dtype_size(out->dtype), step = row_step(out) << t->job->shift;
    char *const first = sum_row(t->job, out, t->begin, t->column);
    for (int64_t row = 0, rows = 1; row < t->end - t->begin; row += rows, rows = 1) {
        char *const y = first + (size_t)row * step;
        const char *const found = t->sums + row * t->n * kernels->size;
        if (t->only[row]) {
            rows = step == bytes ? run_of(t, row, bytes) : 1;
            copy_bytes(y, t->only[row], (size_t)rows * bytes, t->job->stream);
        } else if (!t->summed[row]) {
            memset(y, 0, bytes);
        } else if (kernels->round && !t->job->stream) {
            kernels->round(y, found, t->n);
        } else {
            if (kernels->round)
                kernels->round(t->rounded, found, t->n);
            copy_bytes(y, kernels->round ? t->rounded : found, bytes, t->job->stream);
        }
    }
}

static void sum_range(int64_t begin, int64_t end, void *ctx)
{
    const sum_job *const job = ctx;
    const am_exchange_rows_args *const a = job->args;
    sum_tile t; /* no initializer: it would write all of `sums` */
    t.job = job;
    t.begin = begin;
    t.end = end;
    for (t.column = 0; t.column < job->width; t.column += job->columns) {
        t.n = job->width - t.column < job->columns ? job->width - t.column : job->columns;
        memset(t.only, 0, (size_t)(end - begin) * sizeof *t.only);
        memset(t.summed, 0, (size_t)(end - begin));
        add_moves(&t, &a->x, &a->moves, 0, a->own_after);
        add_moves(&t, &a->own, &a->own_moves, 0, move_count(a, &a->own_moves));
        add_moves(&t, &a->x, &a->moves, a->own_after, move_count(a, &a->moves));
        finish_tile(&t);
    }
    if (job->stream)
        am_stream_end();
}

/* Its lowest bit is the greatest power of two that divides all rows and steps of `moves`. */
static int64_t parts_of(const am_exchange_rows_args *a, const am_i64_array *moves)
{
    int64_t bits = 0;
    for (int64_t i = 0; i < move_count(a, moves); i++) {
        const move m = move_at(a, moves, i);
        bits |= m.from | m.to | m.rows | m.from_step | m.to_step;
    }
    return bits;
}

/* By how many powers of two rows can be taken together: at most so that half a tile holds two. */
static int shift_of(const am_exchange_rows_args *a, int64_t width, int64_t most)
{
    const int64_t bits = parts_of(a, &a->moves) | parts_of(a, &a->own_moves) | a->out.shape[0];
    int shift = 0;
    if (a->out.stride[0] != width || a->x.stride[0] != width || a->own.stride[0] != width)
        return 0;
    while (!(bits >> shift & 1) && width << (shift + 3) <= most)
        shift++;
    return shift;
}

am_status am_exchange_sum(const am_exchange_rows_args *a, const am_exec *ex)
{
    const am_dtype dtype = a->out.dtype;
    AM_CHECK(dtype == AM_F32 || dtype == AM_BF16 || dtype == AM_F64, AM_ERR_DTYPE,
             "exchange_sum: out is %s, float32, bfloat16 or float64 is needed", am_dtype_name(dtype));
    AM_TRY(check_pair("exchange_sum", a, "x", &a->x, "moves", &a->moves, ex));
    AM_TRY(check_pair("exchange_sum", a, "own", &a->own, "own_moves", &a->own_moves, ex));
    const int64_t n_moves = move_count(a, &a->moves);
    AM_CHECK(a->own_after >= 0 && a->own_after <= n_moves, AM_ERR_ARG,
             "exchange_sum: own_after is %lld, there are %lld moves", (long long)a->own_after, (long long)n_moves);
    if (am_numel(&a->out) == 0)
        return AM_OK;
    const sum_kernels *const kernels = &by_isa[am_cpu_isa()]->sums[dtype == AM_F32 ? 0 : dtype == AM_BF16 ? 1 : 2];
    const int64_t most = SUM_BYTES / kernels->size, bytes = am_numel(&a->out) * (int64_t)am_dtype_size(dtype);
    const int shift = shift_of(a, am_exchange_width(&a->out), most);
    const int64_t width = am_exchange_width(&a->out) << shift, columns = width < most ? width : most;
    const int64_t rows = most / columns < SUM_ROWS ? most / columns : SUM_ROWS;
    sum_job job = {a, kernels, width, columns, shift, bytes >= AM_STREAM_BYTES};
    am_parallel_for(a->out.shape[0] >> shift, rows, sum_range, &job);
    return AM_OK;
}
