/* py_args.c -- from Python arguments to the fields of an args struct, by table. */
#include "am_py.h"

#include <string.h>

#include "am_block.h"
#include "dlpack_abi.h"

struct am_py_hold { /* either memory of our own behind the header, or a producer's managed tensor */
    am_py_hold *next;
    void *managed;
    int versioned;
    PyObject *object; /* strong */
};

static am_py_hold *hold_new(am_py_call *call, size_t extra)
{
    am_py_hold *h = extra > SIZE_MAX - sizeof *h ? NULL : am_block_take(sizeof *h + extra);
    if (h == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    *h = (am_py_hold){.next = call->holds};
    call->holds = h;
    return h;
}

void *am_py_alloc(am_py_call *call, size_t bytes)
{
    if (bytes <= AM_PY_ROOM - call->room_used) {
        void *const at = call->room + call->room_used;
        call->room_used += (bytes + 15) / 16 * 16;
        return at;
    }
    am_py_hold *h = hold_new(call, bytes ? bytes : 1);
    return h ? (void *)(h + 1) : NULL;
}

static void delete_managed(void *managed, int versioned)
{
    if (versioned) {
        DLManagedTensorVersioned *m = managed;
        if (m->deleter)
            m->deleter(m);
    } else {
        DLManagedTensor *m = managed;
        if (m->deleter)
            m->deleter(m);
    }
}

int am_py_hold_managed(am_py_call *call, void *managed, int versioned)
{
    am_py_hold *h = hold_new(call, 0);
    if (h == NULL) {
        delete_managed(managed, versioned);
        return -1;
    }
    h->managed = managed;
    h->versioned = versioned;
    return 0;
}

void am_py_release(am_py_call *call)
{
    while (call->holds) {
        am_py_hold *h = call->holds;
        call->holds = h->next;
        if (h->managed) { /* a deleter may run Python code: keep the exception that is under way */
            PyObject *type, *value, *trace;
            PyErr_Fetch(&type, &value, &trace);
            delete_managed(h->managed, h->versioned);
            PyErr_Restore(type, value, trace);
        }
        Py_XDECREF(h->object);
        am_block_give(h);
    }
}

/* "$|name" -> "name"; sets what the prefix says. */
static const char *bare_name(const char *name, int *keyword_only, int *optional)
{
    *optional = 0;
    for (;; name++) {
        if (*name == '$')
            *keyword_only = 1;
        else if (*name == '|')
            *optional = 1;
        else
            return name;
    }
}

static int sig_init(am_py_sig *sig, const am_py_spec *spec, int n)
{
    if (sig->ready)
        return 0;
    for (int i = 0; i < n; i++) {
        int keyword_only = 0, optional;
        if (sig->names[i] == NULL)
            sig->names[i] = PyUnicode_InternFromString(bare_name(spec[i].name, &keyword_only, &optional));
        if (sig->names[i] == NULL)
            return -1;
    }
    sig->ready = 1;
    return 0;
}

static int find_keyword(const am_py_sig *sig, int n, PyObject *key)
{
    for (int i = 0; i < n; i++)
        if (sig->names[i] == key)
            return i;
    for (int i = 0; i < n; i++)
        if (PyUnicode_Compare(sig->names[i], key) == 0)
            return i;
    return -1;
}

static int count_positional(const am_py_spec *spec, int n)
{
    int keyword_only = 0, optional;
    for (int i = 0; i < n; i++) {
        (void)bare_name(spec[i].name, &keyword_only, &optional);
        if (keyword_only)
            return i;
    }
    return n;
}

static int place_arguments(am_py_call *call, const am_py_sig *sig, const am_py_spec *spec, int n, PyObject *const *argv,
                           Py_ssize_t argc, PyObject *kwnames, PyObject **values)
{
    const int positional = count_positional(spec, n);
    if (argc > positional) {
        PyErr_Format(PyExc_TypeError, "%s() takes at most %d positional arguments but %zd were given", call->fname,
                     positional, argc);
        return -1;
    }
    for (Py_ssize_t i = 0; i < argc; i++)
        values[i] = argv[i];
    const Py_ssize_t n_keywords = kwnames ? PyTuple_Size(kwnames) : 0;
    for (Py_ssize_t k = 0; k < n_keywords; k++) {
        PyObject *const key = PyTuple_GetItem(kwnames, k);
        const int i = find_keyword(sig, n, key);
        if (i < 0 || values[i] != NULL) {
            PyErr_Format(PyExc_TypeError,
                         i < 0 ? "%s() got an unexpected keyword argument '%U'" : "%s() got multiple values for '%U'",
                         call->fname, key);
            return -1;
        }
        values[i] = argv[argc + k];
    }
    return 0;
}

static int wrong_kind(const am_py_call *call, const char *name, const char *wanted, PyObject *obj)
{
    PyObject *type_name = PyObject_GetAttrString((PyObject *)Py_TYPE(obj), "__name__");
    if (type_name)
        PyErr_Format(PyExc_TypeError, "%s: argument '%s' must be %s, not %U", call->fname, name, wanted, type_name);
    Py_XDECREF(type_name);
    return -1;
}

/* Writes "i]" and the closing zero: snprintf would cost as much as reading the tensor. */
static void put_index(char *at, Py_ssize_t i)
{
    int digits = 1;
    for (Py_ssize_t rest = i; rest > 9; rest /= 10)
        digits++;
    at[digits] = ']';
    at[digits + 1] = 0;
    for (; digits > 0; i /= 10)
        at[--digits] = (char)('0' + i % 10);
}

enum { AHEAD = 16 }; /* tensors of a long list that are not in the cache are read one after another */

/* A hint and no more: `soon`, of a type with an exchange table, has a pointer to what it wraps behind its header. */
static void prefetch(const am_py_call *call, PyObject *later, PyObject *soon)
{
    const am_py_state *const state = PyModule_GetState(call->module);
    __builtin_prefetch(later);
    if (state->last_api == NULL || !state->last_wraps || (PyObject *)Py_TYPE(soon) != state->last_type)
        return;
    const char *wrapped;
    memcpy(&wrapped, (const char *)soon + sizeof(PyObject), sizeof wrapped);
    for (int line = 0; line < 4; line++)
        __builtin_prefetch((const void *)((uintptr_t)wrapped + 64 * (uintptr_t)line));
}

static int parse_list(am_py_call *call, PyObject *obj, const char *name, int writable, am_tensor_list *out)
{
    if (!PyList_Check(obj) && !PyTuple_Check(obj))
        return wrong_kind(call, name, "a list or tuple of tensors", obj);
    PyObject *const list = PyList_Check(obj) ? obj : NULL;
    if (list != NULL) { /* a list may change while a tensor is read, or while the GIL is away: hold its items */
        am_py_hold *const h = hold_new(call, 0);
        obj = h ? h->object = PyList_AsTuple(obj) : NULL;
        if (obj == NULL)
            return -1;
    }
    const Py_ssize_t n = PyTuple_Size(obj);
    out->n = n;
    out->items = am_py_alloc(call, (size_t)n * sizeof *out->items);
    if (out->items == NULL)
        return -1;
    char indexed[96];
    size_t length = strlen(name);
    length = length < sizeof indexed - 24 ? length : sizeof indexed - 24;
    memcpy(indexed, name, length);
    indexed[length] = '[';
    char *const index = indexed + length + 1;
    for (Py_ssize_t i = 0; i < n; i++) {
        if (list != NULL && PyList_GetItem(list, i) == NULL)
            return -1; /* shorter by now */
        if (i + AHEAD < n)
            prefetch(call, PyTuple_GetItem(obj, i + AHEAD), PyTuple_GetItem(obj, i + AHEAD / 2));
        put_index(index, i);
        if (am_py_tensor(call, PyTuple_GetItem(obj, i), indexed, writable, &out->items[i]) < 0)
            return -1;
    }
    return 0;
}

static int parse_i64(const am_py_call *call, PyObject *obj, const char *name, int64_t *out)
{
    if (PyBool_Check(obj) || !PyIndex_Check(obj))
        return wrong_kind(call, name, "an int", obj);
    PyObject *index = PyNumber_Index(obj);
    if (index == NULL)
        return -1;
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(index, &overflow);
    Py_DECREF(index);
    if (overflow) {
        PyErr_Format(PyExc_ValueError, "%s: argument '%s' does not fit in 64 bits", call->fname, name);
        return -1;
    }
    *out = value;
    return value == -1 && PyErr_Occurred() ? -1 : 0;
}

static int parse_f64(const am_py_call *call, PyObject *obj, const char *name, double *out)
{
    if (PyBool_Check(obj))
        return wrong_kind(call, name, "a real number", obj);
    *out = PyFloat_AsDouble(obj);
    if (*out != -1.0 || !PyErr_Occurred())
        return 0;
    if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "%s: argument '%s' does not fit in a double", call->fname, name);
    } else if (PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        (void)wrong_kind(call, name, "a real number", obj);
    }
    return -1;
}

static int parse_f64s(am_py_call *call, PyObject *obj, const char *name, am_f64_array *out)
{
    const int is_list = PyList_Check(obj), is_tuple = PyTuple_Check(obj);
    const Py_ssize_t n = is_list ? PyList_Size(obj) : is_tuple ? PyTuple_Size(obj) : 1;
    double *const data = am_py_alloc(call, (size_t)n * sizeof *data);
    if (data == NULL)
        return -1;
    for (Py_ssize_t i = 0; i < n; i++) { /* reading one may run Python code: hold it */
        PyObject *item = is_list ? PyList_GetItem(obj, i) : is_tuple ? PyTuple_GetItem(obj, i) : obj;
        if (item == NULL)
            return -1;
        Py_INCREF(item);
        const int rc = parse_f64(call, item, name, &data[i]);
        Py_DECREF(item);
        if (rc < 0)
            return -1;
    }
    *out = (am_f64_array){data, n};
    return 0;
}

static int parse_str(am_py_call *call, PyObject *obj, const char *name, const char **out)
{
    if (!PyUnicode_Check(obj))
        return wrong_kind(call, name, "a str", obj);
    Py_ssize_t length;
    *out = PyUnicode_AsUTF8AndSize(obj, &length);
    if (*out != NULL && strlen(*out) != (size_t)length) {
        PyErr_Format(PyExc_ValueError, "%s: argument '%s' holds a null character", call->fname, name);
        return -1;
    }
    return *out ? 0 : -1;
}

static int convert(am_py_call *call, const am_py_spec *s, const char *name, PyObject *obj)
{
    switch (s->kind) {
    case AM_PY_IN:
    case AM_PY_OUT: return am_py_tensor(call, obj, name, s->kind == AM_PY_OUT, s->target);
    case AM_PY_INS:
    case AM_PY_OUTS: return parse_list(call, obj, name, s->kind == AM_PY_OUTS, s->target);
    case AM_PY_INDEX: return am_py_index(call, obj, name, s->target);
    case AM_PY_I64: return parse_i64(call, obj, name, s->target);
    case AM_PY_F64: return parse_f64(call, obj, name, s->target);
    case AM_PY_F64S: return parse_f64s(call, obj, name, s->target);
    case AM_PY_STR: return parse_str(call, obj, name, s->target);
    case AM_PY_BOOL:
        if (!PyBool_Check(obj))
            return wrong_kind(call, name, "a bool", obj);
        *(bool *)s->target = obj == Py_True;
        return 0;
    }
    PyErr_SetString(PyExc_SystemError, "am_py_spec: unknown kind");
    return -1;
}

int am_py_parse(am_py_call *call, am_py_sig *sig, const am_py_spec *spec, int n, PyObject *const *argv, Py_ssize_t argc,
                PyObject *kwnames)
{
    PyObject *values[AM_PY_MAX_ARGS] = {NULL};
    if (n > AM_PY_MAX_ARGS) {
        PyErr_Format(PyExc_SystemError, "%s: %d arguments, AM_PY_MAX_ARGS is %d", call->fname, n, AM_PY_MAX_ARGS);
        return -1;
    }
    if (sig_init(sig, spec, n) < 0 || place_arguments(call, sig, spec, n, argv, argc, kwnames, values) < 0)
        return -1;
    for (int i = 0; i < n; i++) {
        int keyword_only = 0, optional;
        const char *const name = bare_name(spec[i].name, &keyword_only, &optional);
        if (optional && (values[i] == NULL || values[i] == Py_None))
            continue;
        if (values[i] == NULL) {
            PyErr_Format(PyExc_TypeError, "%s() missing required argument '%s'", call->fname, name);
            return -1;
        }
        if (convert(call, &spec[i], name, values[i]) < 0)
            return -1;
    }
    return 0;
}
