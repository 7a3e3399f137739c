/* hostile.c -- DLPack producers as an old, foreign, careless or malicious library makes them, for test_hostile.py.
 *
 * Producer(address, shape, strides, code, bits, kind): `kind` names what is odd, an entry of KINDS. Table(...) is the
 * same behind a C exchange table. counts() gives (given out, deleted once, deleted again): managed tensors are kept
 * after their deleter ran, so that a second call is counted, not a crash.
 */
#include <Python.h>

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "dlpack_abi.h"

enum { MAX_AXES = 16 };
static const char *const KINDS[] = {
    /* by the letter of the standard */
    "legacy", "versioned", "minor", "copied", "offset", "null_strides", "no_deleter", "old_keywords",
    /* not what this extension reads */
    "major", "used", "used_versioned", "other_name", "no_capsule", "raising", "read_only", "negative_strides",
    "huge_extent", "huge_product", "huge_product_empty", "huge_strides", "negative_extent", "no_data", "unaligned",
    "lanes", "code", "device", "no_axes", "many_axes", "negative_axes", "no_shape", "cuda"};
enum { N_KINDS = sizeof KINDS / sizeof *KINDS };

static atomic_long given, deleted, again;

typedef struct managed { /* of either version; the parts that a consumer sees are inside */
    DLManagedTensorVersioned versioned;
    DLManagedTensor legacy;
    int64_t shape[MAX_AXES], strides[MAX_AXES];
    atomic_int gone;
} managed;

typedef struct producer {
    PyObject_HEAD void *data;
    int ndim, code, bits;
    const char *kind;
    int64_t shape[MAX_AXES], strides[MAX_AXES];
} producer;

static int is(const producer *p, const char *kind) { return strcmp(p->kind, kind) == 0; }

static void count(managed *m) { atomic_fetch_add(atomic_exchange(&m->gone, 1) ? &again : &deleted, 1); }

static void delete_versioned(DLManagedTensorVersioned *v) { count(v->manager_ctx); }

static void delete_legacy(DLManagedTensor *l) { count(l->manager_ctx); }

/* Writes an odd tensor; shape and strides are arrays of MAX_AXES that outlive it. */
static void fill(const producer *p, DLTensor *t, int64_t *shape, int64_t *strides)
{
    memcpy(shape, p->shape, sizeof p->shape);
    memcpy(strides, p->strides, sizeof p->strides);
    *t = (DLTensor){p->data, {DL_CPU, 0}, p->ndim, {(uint8_t)p->code, (uint8_t)p->bits, 1}, shape, strides, 0};
    const int last = p->ndim - 1;
    if (is(p, "null_strides"))
        t->strides = NULL;
    if (is(p, "offset")) {
        t->data = (char *)p->data - 64;
        t->byte_offset = 64;
    }
    for (int i = 0; i < p->ndim && is(p, "negative_strides"); i++)
        strides[i] = -strides[i] - 1;
    if (p->ndim && is(p, "huge_extent"))
        shape[0] = INT64_MAX;
    for (int i = 0; i < p->ndim && (is(p, "huge_product") || is(p, "huge_product_empty")); i++)
        shape[i] = (int64_t)1 << 62;
    if (p->ndim && is(p, "huge_product_empty"))
        shape[last] = 0;
    for (int i = 0; i < p->ndim && is(p, "huge_strides"); i++)
        strides[i] = INT64_MAX;
    if (p->ndim && is(p, "negative_extent"))
        shape[last] = -shape[last] - 1;
    if (is(p, "no_data"))
        t->data = NULL;
    if (is(p, "unaligned"))
        t->byte_offset = 1;
    if (is(p, "lanes"))
        t->dtype.lanes = 4;
    if (is(p, "code"))
        t->dtype.code = 201;
    if (is(p, "device"))
        t->device.device_type = 99;
    if (is(p, "cuda"))
        t->device.device_type = DL_CUDA;
    if (is(p, "no_axes"))
        t->ndim = 0;
    if (is(p, "many_axes"))
        t->ndim = INT32_MAX;
    if (is(p, "negative_axes"))
        t->ndim = INT32_MIN;
    if (is(p, "no_shape"))
        t->shape = NULL;
}

/* What nobody has taken is deleted with its capsule. */
static void drop(PyObject *capsule)
{
    if (!PyCapsule_IsValid(capsule, "dltensor") && !PyCapsule_IsValid(capsule, "dltensor_versioned"))
        return;
    managed *const m = PyCapsule_GetContext(capsule);
    if (m != NULL && (m->versioned.deleter || m->legacy.deleter))
        count(m);
}

static PyObject *capsule_of(producer *self, PyObject *args, PyObject *kwargs)
{
    (void)args;
    if (is(self, "raising"))
        return PyErr_Format(PyExc_BufferError, "no");
    if (is(self, "old_keywords") && kwargs != NULL && PyDict_Size(kwargs))
        return PyErr_Format(PyExc_TypeError, "unexpected keyword");
    if (is(self, "no_capsule"))
        return PyLong_FromLong(3);
    managed *const m = calloc(1, sizeof *m);
    if (m == NULL)
        return PyErr_NoMemory();
    const int old = is(self, "legacy") || is(self, "used") || is(self, "old_keywords");
    fill(self, &m->versioned.dl_tensor, m->shape, m->strides);
    m->legacy.dl_tensor = m->versioned.dl_tensor;
    m->versioned.version = (DLVersion){is(self, "major") ? 2 : 1, is(self, "minor") ? 99 : 0};
    m->versioned.flags = is(self, "read_only") ? DL_FLAG_READ_ONLY : is(self, "copied") ? 2 : 0;
    m->versioned.manager_ctx = m->legacy.manager_ctx = m;
    if (!is(self, "no_deleter")) {
        m->versioned.deleter = delete_versioned;
        m->legacy.deleter = delete_legacy;
        atomic_fetch_add(&given, 1);
    }
    const char *name = is(self, "used")             ? "used_dltensor"
                       : is(self, "used_versioned") ? "used_dltensor_versioned"
                       : is(self, "other_name")     ? "tensor"
                       : old                        ? "dltensor"
                                                    : "dltensor_versioned";
    PyObject *capsule = PyCapsule_New(old ? (void *)&m->legacy : (void *)&m->versioned, name, drop);
    if (capsule == NULL)
        return NULL;
    PyCapsule_SetContext(capsule, m);
    if (!PyCapsule_IsValid(capsule, "dltensor") && !PyCapsule_IsValid(capsule, "dltensor_versioned") &&
        !is(self, "no_deleter"))
        count(m); /* its owner, whoever that is, has it back already: a consumer that deletes it does so again */
    return capsule;
}

static PyObject *device_of(producer *self, PyObject *args)
{
    (void)args;
    return Py_BuildValue("(ii)", is(self, "cuda") ? DL_CUDA : is(self, "device") ? 99 : DL_CPU, 0);
}

static int init(producer *self, PyObject *args, PyObject *kwargs)
{
    (void)kwargs;
    unsigned long long address;
    PyObject *shape, *strides, *kind;
    if (!PyArg_ParseTuple(args, "KO!O!iiU", &address, &PyTuple_Type, &shape, &PyTuple_Type, &strides, &self->code,
                          &self->bits, &kind))
        return -1;
    self->data = (void *)(uintptr_t)address;
    self->ndim = (int)PyTuple_Size(shape);
    self->kind = NULL;
    for (int i = 0; i < N_KINDS; i++)
        if (PyUnicode_CompareWithASCIIString(kind, KINDS[i]) == 0)
            self->kind = KINDS[i];
    if (self->kind == NULL || self->ndim > MAX_AXES || PyTuple_Size(strides) != self->ndim) {
        PyErr_SetString(PyExc_ValueError, "no such kind, or no such shape");
        return -1;
    }
    for (int i = 0; i < self->ndim; i++) {
        self->shape[i] = PyLong_AsLongLong(PyTuple_GetItem(shape, i));
        self->strides[i] = PyLong_AsLongLong(PyTuple_GetItem(strides, i));
    }
    return PyErr_Occurred() ? -1 : 0;
}

static int from_table(void *object, DLTensor *out)
{
    static _Thread_local int64_t axes[64][2][MAX_AXES]; /* borrowed until the call ends, which takes fewer tensors */
    static _Thread_local unsigned turn;
    producer *const self = object;
    if (is(self, "raising")) {
        PyErr_SetString(PyExc_BufferError, "no");
        return -1;
    }
    turn = (turn + 1) % 64;
    fill(self, out, axes[turn][0], axes[turn][1]);
    return 0;
}

static int stream_of(int32_t device_type, int32_t device_id, void **stream)
{
    (void)device_type, (void)device_id;
    *stream = NULL;
    return 0;
}

static DLExchangeAPI newer = {.header = {{DL_MAJOR + 1, 0}, NULL}};
static DLExchangeAPI table = {
    .header = {{DL_MAJOR, 0}, NULL}, .dltensor_from_py_object_no_sync = from_table, .current_work_stream = stream_of};

static PyMethodDef methods[] = {
    {"__dlpack__", (PyCFunction)(void (*)(void))capsule_of, METH_VARARGS | METH_KEYWORDS, ""},
    {"__dlpack_device__", (PyCFunction)device_of, METH_NOARGS, ""},
    {NULL, NULL, 0, NULL}};
static PyType_Slot slots[] = {{Py_tp_methods, methods}, {Py_tp_init, init}, {0, NULL}};
static PyType_Spec producer_spec = {"hostile.Producer", sizeof(producer), 0, Py_TPFLAGS_DEFAULT, slots};
static PyType_Spec table_spec = {"hostile.Table", sizeof(producer), 0, Py_TPFLAGS_DEFAULT, slots};

static PyObject *counts(PyObject *module, PyObject *args)
{
    (void)module, (void)args;
    return Py_BuildValue("(lll)", atomic_load(&given), atomic_load(&deleted), atomic_load(&again));
}

static PyMethodDef functions[] = {{"counts", counts, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "hostile", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_hostile(void)
{
    PyObject *module = PyModule_Create(&definition), *kinds = PyTuple_New(N_KINDS);
    PyObject *type = PyType_FromSpec(&producer_spec), *behind = PyType_FromSpec(&table_spec);
    if (module == NULL || kinds == NULL || type == NULL || behind == NULL)
        return NULL;
    for (int i = 0; i < N_KINDS; i++)
        PyTuple_SetItem(kinds, i, PyUnicode_FromString(KINDS[i]));
    newer.header.prev_api = &table.header; /* a consumer goes back to the version that it knows */
    PyObject *capsule = PyCapsule_New(&newer, "dlpack_exchange_api", NULL);
    if (capsule == NULL || PyObject_SetAttrString(behind, "__dlpack_c_exchange_api__", capsule) < 0)
        return NULL;
    Py_DECREF(capsule);
    if (PyModule_AddObject(module, "Producer", type) < 0 || PyModule_AddObject(module, "Table", behind) < 0 ||
        PyModule_AddObject(module, "KINDS", kinds) < 0)
        return NULL;
    return module;
}
