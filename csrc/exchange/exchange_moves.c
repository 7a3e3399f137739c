#include "exchange_moves.h"

int64_t am_exchange_width(const am_tensor *t)
{
    int64_t width = 1;
    for (int axis = 1; axis < t->ndim; axis++)
        width *= t->shape[axis];
    return width;
}

am_status am_exchange_check_rows(const char *fn, const char *name, const am_tensor *t, const am_tensor *out)
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

am_status am_exchange_check_moves(const char *fn, const char *name, const am_i64_array *moves, int64_t from_rows,
                                  int64_t to_rows, bool reverse, bool runs)
{
    const int n = move_numbers(runs);
    AM_CHECK(moves->n % n == 0, AM_ERR_SHAPE, "%s: %s has %lld numbers, a multiple of %d is needed", fn, name,
             (long long)moves->n, n);
    for (int64_t i = 0; i < moves->n / n; i++) {
        const move m = move_of(moves->data + n * i, reverse, runs);
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
