#include "am_py.h"

void am_py_raise(am_status st)
{
    PyObject *const types[] = {
        [AM_ERR_ARG] = PyExc_ValueError,    [AM_ERR_SHAPE] = PyExc_ValueError,
        [AM_ERR_DEVICE] = PyExc_ValueError, [AM_ERR_DTYPE] = PyExc_TypeError,
        [AM_ERR_NOMEM] = PyExc_MemoryError, [AM_ERR_UNSUPPORTED] = PyExc_NotImplementedError,
        [AM_ERR_CUDA] = PyExc_RuntimeError, [AM_ERR_INTERNAL] = PyExc_SystemError,
    };
    PyErr_SetString(types[st], am_last_error());
}

int am_py_run(am_py_call *call, am_status (*fn)(const void *, const am_exec *), const void *args)
{
    am_status st;
    Py_BEGIN_ALLOW_THREADS
    st = fn(args, &call->exec);
    Py_END_ALLOW_THREADS
    if (st == AM_OK)
        return 0;
    am_py_raise(st);
    return -1;
}
