#include "exchange.h"

#include <stdlib.h>

#include "am_py.h"

static PyObject *array_of(am_exchange_list *list)
{
    return am_py_new_i64(list->data, 2, (int64_t[]){list->n, list->width});
}

static PyObject *plan_result(am_exchange_plan_args *a)
{
    PyObject *out = NULL, *tried = PyErr_Occurred() ? NULL : PyTuple_New((Py_ssize_t)a->n_tried);
    for (Py_ssize_t i = 0; tried != NULL && i < a->n_tried; i++) {
        const am_exchange_try *const t = &a->tried[i];
        PyObject *const one = Py_BuildValue("(ddn)", t->limit, t->seconds, (Py_ssize_t)t->split);
        if (one == NULL || PyTuple_SetItem(tried, i, one) < 0)
            Py_CLEAR(tried);
    }
    if (tried != NULL)
        out = Py_BuildValue("(NNNNn)", array_of(&a->tasks), array_of(&a->keys), array_of(&a->queries), tried,
                            (Py_ssize_t)a->chosen);
    free(a->tasks.data);
    free(a->keys.data);
    free(a->queries.data);
    return out;
}

AM_PY_OP_RESULT(exchange_plan, am_exchange_plan, am_exchange_plan_args, plan_result, {"docs", AM_PY_INDEX, &a.docs},
                {"owners", AM_PY_INDEX, &a.owners}, {"$tokens", AM_PY_I64, &a.tokens}, {"ranks", AM_PY_I64, &a.ranks},
                {"heads", AM_PY_I64, &a.heads}, {"kv_heads", AM_PY_I64, &a.kv_heads}, {"prices", AM_PY_F64S, &a.prices},
                {"scheme", AM_PY_STR, &a.scheme}, {"causal", AM_PY_BOOL, &a.causal})
AM_PY_OP(exchange_copy, am_exchange_copy, am_exchange_rows_args, {"out", AM_PY_OUT, &a.out}, {"x", AM_PY_IN, &a.x},
         {"moves", AM_PY_INDEX, &a.moves}, {"$reverse", AM_PY_BOOL, &a.reverse}, {"runs", AM_PY_BOOL, &a.runs})
AM_PY_OP(exchange_sum, am_exchange_sum, am_exchange_rows_args, {"out", AM_PY_OUT, &a.out}, {"x", AM_PY_IN, &a.x},
         {"own", AM_PY_IN, &a.own}, {"moves", AM_PY_INDEX, &a.moves}, {"own_moves", AM_PY_INDEX, &a.own_moves},
         {"$own_after", AM_PY_I64, &a.own_after}, {"reverse", AM_PY_BOOL, &a.reverse}, {"runs", AM_PY_BOOL, &a.runs})

static PyObject *list_result(am_exchange_list *list, int ndim)
{
    PyObject *const out = PyErr_Occurred() ? NULL : am_py_new_i64(list->data, ndim, (int64_t[]){list->n, list->width});
    free(list->data);
    return out;
}

static PyObject *table_result(am_exchange_table_args *a) { return list_result(&a->table, 2); }
static PyObject *index_result(am_exchange_index_args *a) { return list_result(&a->index, 1); }

AM_PY_OP_RESULT(exchange_table, am_exchange_table, am_exchange_table_args, table_result,
                {"moves", AM_PY_INDEX, &a.moves}, {"$rows_x", AM_PY_I64, &a.rows_x},
                {"rows_out", AM_PY_I64, &a.rows_out}, {"reverse", AM_PY_BOOL, &a.reverse},
                {"runs", AM_PY_BOOL, &a.runs})
AM_PY_OP_RESULT(exchange_index, am_exchange_index, am_exchange_index_args, index_result,
                {"moves", AM_PY_INDEX, &a.moves}, {"own_moves", AM_PY_INDEX, &a.own_moves},
                {"$own_after", AM_PY_I64, &a.own_after}, {"rows_x", AM_PY_I64, &a.rows_x},
                {"rows_own", AM_PY_I64, &a.rows_own}, {"rows_out", AM_PY_I64, &a.rows_out},
                {"reverse", AM_PY_BOOL, &a.reverse}, {"runs", AM_PY_BOOL, &a.runs})
AM_PY_OP(exchange_copy_by, am_exchange_copy_by, am_exchange_by_args, {"out", AM_PY_OUT, &a.out}, {"x", AM_PY_IN, &a.x},
         {"table", AM_PY_IN, &a.table}, {"$rows", AM_PY_I64, &a.rows})
AM_PY_OP(exchange_sum_by, am_exchange_sum_by, am_exchange_by_args, {"out", AM_PY_OUT, &a.out}, {"x", AM_PY_IN, &a.x},
         {"own", AM_PY_IN, &a.own}, {"index", AM_PY_IN, &a.table})

PyMethodDef am_exchange_methods[] = {
    AM_PY_METHOD(
        exchange_plan,
        "exchange_plan(docs, owners, *, tokens, ranks, heads, kv_heads, prices, scheme, causal)\n--\n\nAttention of "
        "documents [2 N] over ranks: int64 tasks [n, 10] (rank, doc, begin, end, round, query_at, key_at, keys, "
        "head, heads), moves of keys and of queries [m, 7] (src, dst, from, to, rows, head, heads), what was tried "
        "((limit, seconds, split), ...), and the index of the choice."),
    AM_PY_METHOD(exchange_copy, "exchange_copy(out, x, moves, *, reverse, runs)\n--\n\nout[to + i] = x[from + i] for "
                                "moves [3 n] of (from, to, rows), or of (to, from, rows) in reverse; with runs [6 n], "
                                "and how often, at which steps of either."),
    AM_PY_METHOD(exchange_sum,
                 "exchange_sum(out, x, own, moves, own_moves, *, own_after, reverse, runs)\n--\n\nout[to + i] = "
                 "sum of x[from + i] over `own_after` moves, of own[from + i] over own_moves, and over "
                 "the other moves; in float32 (float64 for float64), 0 where nothing goes."),
    AM_PY_METHOD(exchange_table, "exchange_table(moves, *, rows_x, rows_out, reverse, runs)\n--\n\nThe moves of "
                                 "exchange_copy, checked, as int64 [n + 1, 7] that exchange_copy_by reads; the last "
                                 "entry begins with how many rows there are."),
    AM_PY_METHOD(exchange_index,
                 "exchange_index(moves, own_moves, *, own_after, rows_x, rows_own, rows_out, reverse, "
                 "runs)\n--\n\nThe moves of exchange_sum, checked, as int64 [rows_out + 1 + n] that exchange_sum_by "
                 "reads: where the sources of each row begin, and the sources."),
    AM_PY_METHOD(exchange_copy_by, "exchange_copy_by(out, x, table, *, rows)\n--\n\nexchange_copy of so many rows by "
                                   "a table of exchange_table, a tensor beside them."),
    AM_PY_METHOD(exchange_sum_by, "exchange_sum_by(out, x, own, index)\n--\n\nexchange_sum by an index of "
                                  "exchange_index, a tensor beside them."),
    {NULL, NULL, 0, NULL},
};
