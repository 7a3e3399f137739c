#include "partition.h"

#include <stdlib.h>

#include "am_py.h"

static PyObject *cuts_result(am_frame_partition_args *a)
{
    PyObject *out = NULL;
    if (!PyErr_Occurred())
        out = a->cuts ? am_py_new_i64(a->cuts, 1, (int64_t[]){a->world + 1}) : Py_NewRef(Py_None);
    free(a->cuts);
    return out;
}

static PyObject *docs_result(am_docs_args *a)
{
    PyObject *out = PyErr_Occurred() ? NULL : am_py_new_i64(a->docs, 2, (int64_t[]){a->n_docs, 2});
    free(a->docs);
    return out;
}

static PyObject *index_result(am_index_array_args *a)
{
    return PyErr_Occurred() ? NULL : am_py_new_i64(a->index.data, 1, &a->index.n);
}

AM_PY_OP_RESULT(index_array, am_index_array, am_index_array_args, index_result, {"index", AM_PY_INDEX, &a.index})
AM_PY_OP_RESULT(frame_partition, am_frame_partition, am_frame_partition_args, cuts_result,
                {"patches", AM_PY_INDEX, &a.patches}, {"world", AM_PY_I64, &a.world}, {"$alpha", AM_PY_I64, &a.alpha},
                {"$bisect", AM_PY_BOOL, &a.bisect})
AM_PY_OP_RESULT(docs_from_ids, am_docs_from_ids, am_docs_args, docs_result, {"doc_ids", AM_PY_INDEX, &a.index})
AM_PY_OP_RESULT(docs_from_offsets, am_docs_from_offsets, am_docs_args, docs_result,
                {"cu_seqlens", AM_PY_INDEX, &a.index})

PyMethodDef am_partition_methods[] = {
    AM_PY_METHOD(index_array, "index_array(index)\n--\n\nA fresh int64 copy of host integers: list, NumPy array or CPU "
                              "tensor, int32 or int64."),
    AM_PY_METHOD(frame_partition, "frame_partition(patches, world, *, alpha, bisect)\n--\n\nint64 [world + 1] cuts, or "
                                  "None when there are fewer frames than ranks."),
    AM_PY_METHOD(docs_from_ids, "docs_from_ids(doc_ids)\n--\n\nint64 [N, 2]: start and end of each run of one nonzero "
                                "id."),
    AM_PY_METHOD(docs_from_offsets,
                 "docs_from_offsets(cu_seqlens)\n--\n\nint64 [N, 2]: start and end of each document; "
                 "ValueError unless the offsets start at 0 and never decrease."),
    {NULL, NULL, 0, NULL},
};
