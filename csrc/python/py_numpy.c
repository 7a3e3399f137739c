/* py_numpy.c -- NumPy arrays in and out. The only file that includes NumPy's C-API. */
#include "am_py.h"

#include <string.h>

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#include <numpy/arrayobject.h>

int am_py_numpy_init(void)
{
    import_array1(-1);
    return 0;
}

int am_py_is_ndarray(PyObject *obj) { return PyArray_Check(obj); }

static am_dtype dtype_of(PyArrayObject *array)
{
    if (!PyArray_ISNOTSWAPPED(array))
        return AM_NONE;
    switch (PyArray_TYPE(array)) {
    case NPY_BOOL: return AM_BOOL;
    case NPY_UINT8: return AM_U8;
    case NPY_INT8: return AM_I8;
    case NPY_INT16: return AM_I16;
    case NPY_HALF: return AM_F16;
    case NPY_FLOAT: return AM_F32;
    case NPY_DOUBLE: return AM_F64;
    case NPY_INT:
    case NPY_LONG:
    case NPY_LONGLONG: return PyArray_ITEMSIZE(array) == 8 ? AM_I64 : AM_I32;
    default: return AM_NONE;
    }
}

int am_py_from_ndarray(am_py_call *call, PyObject *obj, const char *name, int writable, am_tensor *t)
{
    PyArrayObject *const array = (PyArrayObject *)obj;
    t->dtype = dtype_of(array);
    if (t->dtype == AM_NONE) {
        PyErr_Format(PyExc_TypeError, "%s: argument '%s' has a NumPy dtype that is not known here (%R)", call->fname,
                     name, (PyObject *)PyArray_DESCR(array));
        return -1;
    }
    if (writable && !PyArray_ISWRITEABLE(array)) {
        PyErr_Format(PyExc_ValueError, "%s: argument '%s' is read-only and cannot be written", call->fname, name);
        return -1;
    }
    const int ndim = PyArray_NDIM(array);
    if (ndim > AM_MAX_DIMS) {
        PyErr_Format(PyExc_ValueError, "%s: argument '%s' has %d axes, at most %d are supported", call->fname, name,
                     ndim, AM_MAX_DIMS);
        return -1;
    }
    const npy_intp size = (npy_intp)am_dtype_size(t->dtype);
    const int empty = PyArray_SIZE(array) == 0;
    t->ndim = ndim;
    t->data = PyArray_DATA(array);
    t->dev = AM_DEV_CPU;
    t->dev_index = 0;
    for (int i = 0; i < ndim; i++)
        t->shape[i] = PyArray_DIM(array, i);
    am_set_compact_strides(t);
    for (int i = 0; i < ndim && !empty; i++) {
        const npy_intp bytes = PyArray_STRIDE(array, i);
        if (t->shape[i] <= 1)
            continue;
        if (bytes < 0 || bytes % size != 0) {
            PyErr_Format(PyExc_ValueError,
                         "%s: argument '%s' has the stride %zd bytes on axis %d: negative or not a multiple of %zd",
                         call->fname, name, (Py_ssize_t)bytes, i, (Py_ssize_t)size);
            return -1;
        }
        t->stride[i] = bytes / size;
    }
    if (!empty && (uintptr_t)t->data % (size_t)size != 0) {
        PyErr_Format(PyExc_ValueError, "%s: argument '%s' is not aligned to its %zd-byte elements", call->fname, name,
                     (Py_ssize_t)size);
        return -1;
    }
    return 0;
}

PyObject *am_py_new_i64(const int64_t *data, int ndim, const int64_t *shape)
{
    npy_intp dims[AM_MAX_DIMS];
    int64_t numel = 1;
    for (int i = 0; i < ndim; i++) {
        dims[i] = (npy_intp)shape[i];
        numel *= shape[i];
    }
    PyObject *array = PyArray_SimpleNew(ndim, dims, NPY_INT64);
    if (array != NULL && numel > 0)
        memcpy(PyArray_DATA((PyArrayObject *)array), data, (size_t)numel * sizeof *data);
    return array;
}
