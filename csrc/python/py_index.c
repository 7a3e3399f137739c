/* py_index.c -- host integers, copied: a list, a tuple, or a CPU tensor of any producer. */
#include "am_py.h"

/* The list or tuple itself is read: a subclass may lie about its length. An item may run Python code, so it is held. */
static int index_from_sequence(am_py_call *call, PyObject *obj, const char *name, am_i64_array *out)
{
    const int is_list = PyList_Check(obj);
    const Py_ssize_t n = is_list ? PyList_Size(obj) : PyTuple_Size(obj);
    int64_t *data = am_py_alloc(call, (size_t)n * sizeof *data);
    if (data == NULL)
        return -1;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = Py_XNewRef(is_list ? PyList_GetItem(obj, i) : PyTuple_GetItem(obj, i));
        if (item == NULL)
            return -1;
        if (PyBool_Check(item) || !PyIndex_Check(item)) {
            Py_DECREF(item);
            PyErr_Format(PyExc_TypeError, "%s: argument '%s' holds something other than integers at %zd", call->fname,
                         name, i);
            return -1;
        }
        PyObject *index = PyNumber_Index(item);
        Py_DECREF(item);
        if (index == NULL)
            return -1;
        int overflow = 0;
        data[i] = PyLong_AsLongLongAndOverflow(index, &overflow);
        Py_DECREF(index);
        if (overflow) {
            PyErr_Format(PyExc_ValueError, "%s: argument '%s' does not fit in 64 bits at %zd", call->fname, name, i);
            return -1;
        }
        if (data[i] == -1 && PyErr_Occurred())
            return -1;
    }
    *out = (am_i64_array){data, n, true};
    return 0;
}

int am_py_index(am_py_call *call, PyObject *obj, const char *name, am_i64_array *out)
{
    if (PyList_Check(obj) || PyTuple_Check(obj))
        return index_from_sequence(call, obj, name, out);
    am_tensor t = {0};
    am_py_call reader = {.fname = call->fname, .module = call->module}; /* host data does not choose the device */
    int64_t *data = NULL;
    int rc = am_py_tensor(&reader, obj, name, 0, &t);
    if (rc < 0)
        goto out;
    rc = -1;
    if (t.dev != AM_DEV_CPU) {
        PyErr_Format(PyExc_ValueError, "%s: argument '%s' must be on the CPU", call->fname, name);
        goto out;
    }
    if (t.dtype != AM_I32 && t.dtype != AM_I64) {
        PyErr_Format(PyExc_TypeError, "%s: argument '%s' must be int32 or int64, not %s", call->fname, name,
                     am_dtype_name(t.dtype));
        goto out;
    }
    if (t.ndim != 1) {
        PyErr_Format(PyExc_ValueError, "%s: argument '%s' must have one axis, not %d", call->fname, name, t.ndim);
        goto out;
    }
    data = am_py_alloc(call, (size_t)t.shape[0] * sizeof *data);
    if (data == NULL)
        goto out;
    for (int64_t i = 0; i < t.shape[0]; i++)
        data[i] =
            t.dtype == AM_I64 ? ((const int64_t *)t.data)[i * t.stride[0]] : ((const int32_t *)t.data)[i * t.stride[0]];
    *out = (am_i64_array){data, t.shape[0], true};
    rc = 0;
out:
    am_py_release(&reader);
    return rc;
}
