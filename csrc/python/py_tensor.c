/* py_tensor.c -- from a producer's object to am_tensor: exchange table, NumPy, capsule, in that order. */
#include "am_py.h"

#include <stdlib.h>
#include <string.h>

#include "dlpack_abi.h"

static am_dtype dtype_of(DLDataType d)
{
    if (d.lanes != 1)
        return AM_NONE;
    switch (d.code << 8 | d.bits) {
    case DL_BOOL << 8 | 8: return AM_BOOL;
    case DL_UINT << 8 | 8: return AM_U8;
    case DL_INT << 8 | 8: return AM_I8;
    case DL_INT << 8 | 16: return AM_I16;
    case DL_INT << 8 | 32: return AM_I32;
    case DL_INT << 8 | 64: return AM_I64;
    case DL_FLOAT << 8 | 16: return AM_F16;
    case DL_BFLOAT << 8 | 16: return AM_BF16;
    case DL_FLOAT << 8 | 32: return AM_F32;
    case DL_FLOAT << 8 | 64: return AM_F64;
    default: return AM_NONE;
    }
}

/* Copies the extents. The product of those above 0 stays below 2^60, so that no later product overflows. */
static int read_extents(const am_py_call *call, const char *name, const DLTensor *d, am_tensor *t)
{
    t->ndim = d->ndim;
    if (d->ndim > 0 && d->shape == NULL) {
        PyErr_Format(PyExc_ValueError, "%s: argument '%s' has %d axes but no shape", call->fname, name, d->ndim);
        return -1;
    }
    int64_t product = 1;
    for (int i = d->ndim - 1; i >= 0; i--) {
        const int64_t extent = d->shape[i];
        if (extent < 0 || (extent > 0 && product > INT64_MAX / 8 / extent)) {
            PyErr_Format(PyExc_ValueError, "%s: argument '%s' has extent %lld on axis %d", call->fname, name,
                         (long long)extent, i);
            return -1;
        }
        product *= extent ? extent : 1;
        t->shape[i] = extent;
    }
    return 0;
}

/* Copies the strides of the axes that have more than one element. Offsets in bytes stay below 2^63. */
static int read_strides(const am_py_call *call, const char *name, const DLTensor *d, am_tensor *t)
{
    am_set_compact_strides(t);
    if (d->strides == NULL || am_numel(t) == 0)
        return 0;
    int64_t span = (int64_t)am_dtype_size(t->dtype);
    for (int i = 0; i < t->ndim; i++) {
        int64_t reach, bytes;
        if (t->shape[i] <= 1)
            continue;
        t->stride[i] = d->strides[i];
        if (t->stride[i] >= 0 && !__builtin_mul_overflow(t->shape[i] - 1, t->stride[i], &reach) &&
            !__builtin_mul_overflow(reach, (int64_t)am_dtype_size(t->dtype), &bytes) &&
            !__builtin_add_overflow(span, bytes, &span))
            continue;
        PyErr_Format(PyExc_ValueError, "%s: argument '%s' has the %sstride %lld on axis %d", call->fname, name,
                     t->stride[i] < 0 ? "negative " : "", (long long)t->stride[i], i);
        return -1;
    }
    return 0;
}

static int read_data(const am_py_call *call, const char *name, const DLTensor *d, am_tensor *t)
{
    const int64_t numel = am_numel(t);
    if (d->data == NULL && numel != 0) {
        PyErr_Format(PyExc_ValueError,
                     "%s: argument '%s' has %lld elements but no storage of its own (a DTensor? pass .to_local(); a "
                     "meta or fake tensor has no data)",
                     call->fname, name, (long long)numel);
        return -1;
    }
    t->data = d->data ? (char *)d->data + d->byte_offset : NULL;
    if (numel != 0 && (uintptr_t)t->data % am_dtype_size(t->dtype) != 0) {
        PyErr_Format(PyExc_ValueError, "%s: argument '%s' is not aligned to its %zu-byte elements", call->fname, name,
                     am_dtype_size(t->dtype));
        return -1;
    }
    return 0;
}

static int read_dltensor(const am_py_call *call, const char *name, const DLTensor *d, am_tensor *t)
{
    t->dtype = dtype_of(d->dtype);
    if (t->dtype == AM_NONE) {
        PyErr_Format(PyExc_TypeError,
                     "%s: argument '%s' has a dtype that is not known here (code %d, %d bits, %d lanes)", call->fname,
                     name, d->dtype.code, d->dtype.bits, d->dtype.lanes);
        return -1;
    }
    if (d->ndim < 0 || d->ndim > AM_MAX_DIMS) {
        PyErr_Format(PyExc_ValueError, "%s: argument '%s' has %d axes, at most %d are supported", call->fname, name,
                     d->ndim, AM_MAX_DIMS);
        return -1;
    }
    switch (d->device.device_type) {
    case DL_CPU:
    case DL_CUDA_HOST:
        t->dev = AM_DEV_CPU;
        t->dev_index = 0;
        break;
    case DL_CUDA:
        t->dev = AM_DEV_CUDA;
        t->dev_index = d->device.device_id;
        break;
    default:
        PyErr_Format(PyExc_ValueError,
                     "%s: argument '%s' is on a device of DLPack type %d; CPU (1) and CUDA (2) are known", call->fname,
                     name, d->device.device_type);
        return -1;
    }
    if (read_extents(call, name, d, t) < 0 || read_strides(call, name, d, t) < 0)
        return -1;
    return read_data(call, name, d, t);
}

static const DLExchangeAPI *api_of_capsule(PyObject *capsule)
{
    const DLExchangeAPI *api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    while (api != NULL && api->header.version.major != DL_MAJOR)
        api = (const DLExchangeAPI *)api->header.prev_api;
    return api;
}

enum { MAX_TYPES = 64 }; /* types made at run time are not kept for ever: a full cache starts again */

/* A new reference to the capsule of obj's type, to None when it has none, or NULL with an exception. */
static PyObject *exchange_capsule(am_py_state *state, PyObject *type)
{
    PyObject *known = PyDict_GetItemWithError(state->exchange_by_type, type);
    if (known != NULL || PyErr_Occurred())
        return Py_XNewRef(known);
    PyObject *found = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
    if (found == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError))
            return NULL;
        PyErr_Clear();
    }
    if (found == NULL || !PyCapsule_IsValid(found, "dlpack_exchange_api")) {
        Py_XDECREF(found);
        found = Py_NewRef(Py_None);
    }
    if (PyDict_Size(state->exchange_by_type) >= MAX_TYPES)
        PyDict_Clear(state->exchange_by_type);
    if (PyDict_SetItem(state->exchange_by_type, type, found) < 0)
        Py_CLEAR(found);
    return found;
}

/* The exchange table of obj's type, or NULL without an exception when it has none; *rc is -1 on an exception. */
static const DLExchangeAPI *exchange_api(am_py_state *state, PyObject *obj, int *rc)
{
    PyObject *const type = (PyObject *)Py_TYPE(obj);
    *rc = 0;
    if (type == state->last_type)
        return state->last_api;
    PyObject *capsule = exchange_capsule(state, type);
    if (capsule == NULL) {
        *rc = -1;
        return NULL;
    }
    const DLExchangeAPI *const api = capsule == Py_None ? NULL : api_of_capsule(capsule);
    PyObject *const size = PyObject_GetAttrString(type, "__basicsize__");
    const Py_ssize_t basic = size ? PyLong_AsSsize_t(size) : -1;
    Py_XDECREF(size);
    PyErr_Clear();
    state->last_wraps = basic >= (Py_ssize_t)(sizeof(PyObject) + sizeof(void *));
    PyObject *const before = state->last_type;
    state->last_type = Py_NewRef(type); /* the type keeps its capsule, and so the table */
    state->last_api = api;
    Py_DECREF(capsule);
    Py_XDECREF(before);
    return api;
}

/* The DLPack device type that obj names, or -1 with an exception. */
static long device_kind(const am_py_call *call, PyObject *obj, const char *name)
{
    PyObject *device = PyObject_CallMethod(obj, "__dlpack_device__", NULL);
    if (device == NULL && !PyErr_ExceptionMatches(PyExc_AttributeError))
        return -1;
    PyErr_Clear();
    const int is_pair = device != NULL && PyTuple_Check(device) && PyTuple_Size(device) == 2;
    const long kind = is_pair ? PyLong_AsLong(PyTuple_GetItem(device, 0)) : -1;
    Py_XDECREF(device);
    if (kind >= 0)
        return kind;
    PyErr_Clear();
    PyErr_Format(PyExc_TypeError, "%s: argument '%s': __dlpack_device__() must give (device type, index)", call->fname,
                 name);
    return -1;
}

/* obj.__dlpack__(stream=..., max_version=(1, 3)), and without keywords for producers that predate them. */
static PyObject *ask_capsule(const am_py_call *call, PyObject *obj, const char *name)
{
    PyObject *out = NULL, *kwargs = NULL, *empty = PyTuple_New(0);
    PyObject *method = PyObject_GetAttrString(obj, "__dlpack__");
    if (method == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError, "%s: argument '%s' must be a tensor (an object with __dlpack__)", call->fname,
                     name);
    }
    if (method == NULL || empty == NULL)
        goto out;
    const long kind = device_kind(call, obj, name);
    if (kind < 0)
        goto out;
    /* 1 is the legacy default stream, on which this call then runs */
    kwargs = kind == DL_CUDA ? Py_BuildValue("{s:i,s:(ii)}", "stream", 1, "max_version", DL_MAJOR, DL_MINOR)
                             : Py_BuildValue("{s:O,s:(ii)}", "stream", Py_None, "max_version", DL_MAJOR, DL_MINOR);
    if (kwargs == NULL)
        goto out;
    out = PyObject_Call(method, empty, kwargs);
    if (out == NULL && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        out = PyObject_Call(method, empty, NULL);
    }
out:
    Py_XDECREF(method);
    Py_XDECREF(kwargs);
    Py_XDECREF(empty);
    return out;
}

static int read_capsule(am_py_call *call, PyObject *obj, const char *name, int writable, am_tensor *t)
{
    PyObject *capsule = ask_capsule(call, obj, name);
    if (capsule == NULL)
        return -1;
    int rc = -1;
    const DLTensor *d = NULL;
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        DLManagedTensorVersioned *m = PyCapsule_GetPointer(capsule, "dltensor_versioned");
        if (PyCapsule_SetName(capsule, "used_dltensor_versioned") < 0 || am_py_hold_managed(call, m, 1) < 0)
            goto out;
        if (m->version.major != DL_MAJOR) {
            PyErr_Format(PyExc_BufferError, "%s: argument '%s' comes as DLPack %u.%u; major version %d is read here",
                         call->fname, name, m->version.major, m->version.minor, DL_MAJOR);
            goto out;
        }
        if (writable && (m->flags & DL_FLAG_READ_ONLY)) {
            PyErr_Format(PyExc_ValueError, "%s: argument '%s' is read-only and cannot be written", call->fname, name);
            goto out;
        }
        d = &m->dl_tensor;
    } else if (PyCapsule_IsValid(capsule, "dltensor")) {
        DLManagedTensor *m = PyCapsule_GetPointer(capsule, "dltensor");
        if (PyCapsule_SetName(capsule, "used_dltensor") < 0 || am_py_hold_managed(call, m, 0) < 0)
            goto out;
        d = &m->dl_tensor;
    } else {
        PyErr_Format(PyExc_TypeError, "%s: argument '%s': __dlpack__ gave no unused DLPack capsule", call->fname, name);
        goto out;
    }
    rc = read_dltensor(call, name, d, t);
out:
    Py_DECREF(capsule);
    return rc;
}

/* The first tensor decides where the call runs; the others must be there too. */
static int join_device(am_py_call *call, const char *name, const am_tensor *t, const DLExchangeAPI *api)
{
    am_exec *ex = &call->exec;
    if (!call->have_device) {
        call->have_device = 1;
        ex->dev = t->dev;
        ex->dev_index = t->dev_index;
    } else if (ex->dev != t->dev || ex->dev_index != t->dev_index) {
        static const char *const device_names[] = {"cpu", "cuda"};
        PyErr_Format(PyExc_ValueError, "%s: argument '%s' is on %s:%d, the tensors before it are on %s:%d", call->fname,
                     name, device_names[t->dev], t->dev_index, device_names[ex->dev], ex->dev_index);
        return -1;
    }
    if (t->dev != AM_DEV_CUDA || api == NULL || call->stream_from_producer)
        return 0;
    call->stream_from_producer = 1;
    return api->current_work_stream(DL_CUDA, t->dev_index, &ex->stream);
}

/* The producer could not describe its tensor: ValueError with the argument's name, its own exception as the cause. */
static int table_failed(const am_py_call *call, const char *name)
{
    PyObject *type, *cause, *trace, *value;
    PyErr_Fetch(&type, &cause, &trace);
    PyErr_NormalizeException(&type, &cause, &trace);
    if (cause != NULL && !PyErr_GivenExceptionMatches(cause, PyExc_RuntimeError) &&
        !PyErr_GivenExceptionMatches(cause, PyExc_BufferError)) {
        PyErr_Restore(type, cause, trace);
        return -1;
    }
    Py_XDECREF(type);
    Py_XDECREF(trace);
    PyErr_Format(PyExc_ValueError, "%s: argument '%s' has no memory that can be read here (a meta or sparse tensor?)",
                 call->fname, name);
    if (cause == NULL)
        return -1;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    PyException_SetCause(value, cause);
    PyErr_Restore(type, value, trace);
    return -1;
}

int am_py_tensor(am_py_call *call, PyObject *obj, const char *name, int writable, am_tensor *t)
{
    int rc;
    const DLExchangeAPI *const api = exchange_api(PyModule_GetState(call->module), obj, &rc);
    if (rc < 0)
        return -1;
    if (api != NULL) {
        DLTensor d;
        if (api->dltensor_from_py_object_no_sync(obj, &d) != 0)
            return table_failed(call, name);
        rc = read_dltensor(call, name, &d, t);
    } else if (am_py_is_ndarray(obj)) {
        rc = am_py_from_ndarray(call, obj, name, writable, t);
    } else {
        rc = read_capsule(call, obj, name, writable, t);
    }
    return rc < 0 ? -1 : join_device(call, name, t, api);
}
