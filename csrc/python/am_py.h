/* am_py.h -- how a slice's function becomes a Python function.
 *
 * A slice's *_py.c is a table: name, kind and target of each argument. AM_PY_OP writes the entry point, which parses
 * the arguments into the slice's args struct, runs the slice without the GIL, and turns its status into an exception.
 *
 *     AM_PY_OP(adam_step, am_adam_step, am_adam_args,
 *              {"param", AM_PY_OUT, &a.param}, {"grad", AM_PY_IN, &a.grad}, {"$lr", AM_PY_F64, &a.lr})
 *
 * A name may start with `$` (this and all that follow are keyword-only) and `|` (may be left out or None; then the
 * target keeps its zero, and a tensor's dtype is AM_NONE). Functions that return something use AM_PY_OP_RESULT with
 * a function `PyObject *result(args_t *)`, called with the GIL after success; it also frees what the call allocated,
 * and is called with the exception set (to free only) after a failure.
 */
#ifndef AM_PY_H
#define AM_PY_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "am_exec.h"
#include "am_status.h"
#include "am_tensor.h"

typedef enum am_py_kind {
    AM_PY_IN,    /* am_tensor: read */
    AM_PY_OUT,   /* am_tensor: written, perhaps read too; read-only arrays are refused */
    AM_PY_INS,   /* am_tensor_list: a list or tuple of tensors to read */
    AM_PY_OUTS,  /* am_tensor_list: a list or tuple of tensors to write */
    AM_PY_INDEX, /* am_i64_array: host integers (int32 or int64), copied: list, NumPy array, CPU tensor */
    AM_PY_I64,   /* int64_t */
    AM_PY_F64,   /* double */
    AM_PY_F64S,  /* am_f64_array: a real number, or a list or tuple of them */
    AM_PY_BOOL,  /* bool */
    AM_PY_STR    /* const char *: UTF-8, lives as long as the call */
} am_py_kind;

typedef struct am_py_spec {
    const char *name;
    am_py_kind kind;
    void *target;
} am_py_spec;

enum { AM_PY_MAX_ARGS = 40, AM_PY_ROOM = 1024 };

typedef struct am_py_sig { /* one static per function: interned keyword names, filled at its first call */
    PyObject *names[AM_PY_MAX_ARGS];
    int ready;
} am_py_sig;

typedef struct am_py_hold am_py_hold;

/* What a call holds until it returns: memory for lists and index arrays, and producers' managed tensors. */
typedef struct am_py_call {
    const char *fname;
    PyObject *module;
    am_exec exec;
    int have_device;
    int stream_from_producer; /* the stream came from an exchange table */
    am_py_hold *holds;
    size_t room_used;
    _Alignas(16) char room[AM_PY_ROOM]; /* the first allocations: a call with short lists asks malloc for nothing */
} am_py_call;

int am_py_parse(am_py_call *call, am_py_sig *sig, const am_py_spec *spec, int n_spec, PyObject *const *argv,
                Py_ssize_t argc, PyObject *kwnames);
int am_py_run(am_py_call *call, am_status (*fn)(const void *, const am_exec *), const void *args);
void am_py_release(am_py_call *call);

void *am_py_alloc(am_py_call *call, size_t bytes); /* lives until am_py_release; NULL + MemoryError */
int am_py_hold_managed(am_py_call *call, void *managed, int versioned); /* its deleter runs in am_py_release */

/* Read `obj` into `t`. `name` is the argument's, for messages. Returns -1 with an exception set. */
int am_py_tensor(am_py_call *call, PyObject *obj, const char *name, int writable, am_tensor *t);
int am_py_index(am_py_call *call, PyObject *obj, const char *name, am_i64_array *out);

/* Sets the exception that belongs to `st` with the thread's last error text. */
void am_py_raise(am_status st);

/* py_numpy.c: the only user of NumPy's C-API. */
int am_py_numpy_init(void);
int am_py_is_ndarray(PyObject *obj);
int am_py_from_ndarray(am_py_call *call, PyObject *obj, const char *name, int writable, am_tensor *t);
PyObject *am_py_new_i64(const int64_t *data, int ndim, const int64_t *shape); /* a fresh int64 array, copied */

/* The module's state: exchange tables by tensor type. */
typedef struct am_py_state {
    PyObject *exchange_by_type; /* dict: type -> capsule, or None when the type has no table */
    PyObject *last_type;        /* strong: the type seen last, and its table, so that the usual call skips the dict */
    const void *last_api;
    int last_wraps; /* whether its objects have a field behind their header */
} am_py_state;

#define AM_PY_OP_RESULT(pyname, cname, args_t, result, ...)                                                            \
    static am_status pyname##_tramp(const void *args, const am_exec *ex)                                               \
    {                                                                                                                  \
        return cname((args_t *)(uintptr_t)args, ex);                                                                   \
    }                                                                                                                  \
    static PyObject *pyname(PyObject *module, PyObject *const *argv, Py_ssize_t argc, PyObject *kwnames)               \
    {                                                                                                                  \
        static am_py_sig sig;                                                                                          \
        args_t a = {0};                                                                                                \
        am_py_call call = {.fname = #pyname, .module = module};                                                        \
        const am_py_spec spec[] = {__VA_ARGS__};                                                                       \
        PyObject *out = NULL;                                                                                          \
        if (am_py_parse(&call, &sig, spec, (int)(sizeof spec / sizeof *spec), argv, argc, kwnames) == 0) {             \
            (void)am_py_run(&call, pyname##_tramp, &a);                                                                \
            out = result(&a);                                                                                          \
        }                                                                                                              \
        am_py_release(&call);                                                                                          \
        return out;                                                                                                    \
    }

#define AM_PY_OP(pyname, cname, args_t, ...)                                                                           \
    static PyObject *pyname##_none(const args_t *args)                                                                 \
    {                                                                                                                  \
        (void)args;                                                                                                    \
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);                                                           \
    }                                                                                                                  \
    AM_PY_OP_RESULT(pyname, cname, args_t, pyname##_none, __VA_ARGS__)

#define AM_PY_METHOD(pyname, doc) {#pyname, (PyCFunction)(void (*)(void))pyname, METH_FASTCALL | METH_KEYWORDS, doc}

#endif
