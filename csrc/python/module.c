/* module.c -- the extension module: its slices, its state, and what it tells about itself. */
#include "am_py.h"

#include <string.h>

#include "am_cpu.h"
#include "am_pool.h"

/* One line per slice: csrc/<slice>/<slice>_py.c defines am_<slice>_methods. */
#define AM_SLICES(X)                                                                                                   \
    X(adam) X(attention) X(comm) X(conv) X(exchange) X(gate) X(gdn) X(loss) X(mlp) X(moe) X(norm) X(partition) X(rope)

#define AM_DECLARE(slice) extern PyMethodDef am_##slice##_methods[];
AM_SLICES(AM_DECLARE)
#undef AM_DECLARE

#ifndef AM_VERSION
#error "setup.py defines AM_VERSION"
#endif
#ifndef AM_CUDA_VERSION
#define AM_CUDA_VERSION ""
#endif
#ifndef AM_SANITIZER
#define AM_SANITIZER ""
#endif

static PyObject *build_info(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
#ifdef NDEBUG
    const int debug = 0;
#else
    const int debug = 1;
#endif
#define AM_NAME_STRING(slice) #slice " "
    return Py_BuildValue("{s:s,s:s,s:s,s:s,s:s,s:O,s:s,s:O,s:s,s:i}", "version", AM_VERSION, "slices",
                         AM_SLICES(AM_NAME_STRING), "compiler", __VERSION__, "isa", am_cpu_isa_name(), "best_isa",
                         am_cpu_best_isa_name(), "cuda", AM_CUDA_VERSION[0] ? Py_True : Py_False, "cuda_version",
                         AM_CUDA_VERSION, "debug", debug ? Py_True : Py_False, "sanitizer", AM_SANITIZER, "num_threads",
                         am_num_threads());
#undef AM_NAME_STRING
}

static PyObject *set_isa(PyObject *module, PyObject *name)
{
    (void)module;
    Py_ssize_t length = 0;
    const char *text = PyUnicode_Check(name) ? PyUnicode_AsUTF8AndSize(name, &length) : NULL;
    if (text == NULL) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "set_isa: the name must be a str");
        return NULL;
    }
    const am_status st = am_cpu_set_isa(strlen(text) == (size_t)length ? text : "");
    if (st != AM_OK) {
        am_py_raise(st);
        return NULL;
    }
    return Py_NewRef(Py_None);
}

static PyObject *set_num_threads(PyObject *module, PyObject *count)
{
    (void)module;
    if (PyBool_Check(count) || !PyLong_Check(count)) {
        PyErr_SetString(PyExc_TypeError, "set_num_threads: the count must be an int");
        return NULL;
    }
    int overflow;
    const long n = PyLong_AsLongAndOverflow(count, &overflow);
    if (overflow) {
        PyErr_SetString(PyExc_ValueError, "set_num_threads: the count does not fit in 64 bits");
        return NULL;
    }
    if (n < 1 || n > AM_MAX_THREADS) {
        PyErr_Format(PyExc_ValueError, "set_num_threads: %ld is not between 1 and %d", n, AM_MAX_THREADS);
        return NULL;
    }
    am_set_num_threads((int)n);
    return Py_NewRef(Py_None);
}

static PyMethodDef own_methods[] = {
    {"build_info", build_info, METH_NOARGS,
     "build_info()\n--\n\nHow this extension was built and what it chose: a dict with version, slices, compiler, "
     "isa (in use), best_isa (of this CPU), cuda, cuda_version, debug, sanitizer, num_threads."},
    {"set_isa", set_isa, METH_O,
     "set_isa(name)\n--\n\nUse the CPU kernels of 'scalar', 'avx2', 'avx512', 'avx512_bf16' or 'amx_bf16'. For tests and "
     "benchmarks; not while an operator runs. ValueError: no such name. NotImplementedError: this CPU has it not."},
    {"set_num_threads", set_num_threads, METH_O,
     "set_num_threads(n)\n--\n\nThreads of the CPU kernels, 1 to 256, the calling one included. Results do not "
     "depend on it."},
    {NULL, NULL, 0, NULL},
};

static int exec_module(PyObject *module)
{
    am_py_state *const state = PyModule_GetState(module);
    state->exchange_by_type = PyDict_New();
    if (state->exchange_by_type == NULL || am_py_numpy_init() < 0)
        return -1;
#define AM_ADD(slice)                                                                                                  \
    if (PyModule_AddFunctions(module, am_##slice##_methods) < 0)                                                       \
        return -1;
    AM_SLICES(AM_ADD)
#undef AM_ADD
    return PyModule_AddFunctions(module, own_methods);
}

static int traverse(PyObject *module, visitproc visit, void *arg)
{
    am_py_state *const state = PyModule_GetState(module);
    if (state == NULL)
        return 0;
    Py_VISIT(state->exchange_by_type);
    Py_VISIT(state->last_type);
    return 0;
}

static int clear(PyObject *module)
{
    am_py_state *const state = PyModule_GetState(module);
    if (state == NULL)
        return 0;
    Py_CLEAR(state->exchange_by_type);
    Py_CLEAR(state->last_type);
    state->last_api = NULL;
    return 0;
}

/* The limited API of 3.11 has one slot. Python 3.12 and newer also ask about subinterpreters: slot 3, whose value 0
 * says "not supported" (the thread pool and the exchange-table cache are one per process). */
static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)exec_module}, {0, NULL}, {0, NULL}};
enum { SLOT_MULTIPLE_INTERPRETERS = 3 };

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "automodel_c._amcore",
    .m_doc = "C operators of automodel_c. Tensors of any DLPack producer and NumPy arrays, on the CPU or CUDA.",
    .m_size = sizeof(am_py_state),
    .m_slots = slots,
    .m_traverse = traverse,
    .m_clear = clear,
};

PyMODINIT_FUNC PyInit__amcore(void)
{
    if (Py_Version >= 0x030c0000)
        slots[1].slot = SLOT_MULTIPLE_INTERPRETERS;
    return PyModuleDef_Init(&definition);
}
