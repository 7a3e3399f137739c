#include "loss.h"

#include "am_py.h"

static PyObject *rows_result(am_lce_rows_args *a) { return PyErr_Occurred() ? NULL : PyLong_FromLongLong(a->n); }

static PyObject *bytes_result(am_lce_product_args *a)
{
    return PyErr_Occurred() ? NULL : PyLong_FromLongLong(a->workspace_bytes);
}

AM_PY_OP(cross_entropy_forward, am_cross_entropy_forward, am_cross_entropy_args, {"loss", AM_PY_OUT, &a.loss},
         {"row_loss", AM_PY_OUT, &a.row_loss}, {"logits", AM_PY_IN, &a.logits}, {"labels", AM_PY_IN, &a.labels},
         {"|num_label_tokens", AM_PY_IN, &a.num_label_tokens}, {"|stats", AM_PY_OUT, &a.stats},
         {"|count", AM_PY_OUT, &a.count}, {"$chunk_len", AM_PY_I64, &a.chunk_len},
         {"$ignore_index", AM_PY_I64, &a.ignore_index})
AM_PY_OP(cross_entropy_backward, am_cross_entropy_backward, am_cross_entropy_args, {"dlogits", AM_PY_OUT, &a.dlogits},
         {"dloss", AM_PY_IN, &a.dloss}, {"logits", AM_PY_IN, &a.logits}, {"labels", AM_PY_IN, &a.labels},
         {"|num_label_tokens", AM_PY_IN, &a.num_label_tokens}, {"|stats", AM_PY_IN, &a.stats},
         {"$chunk_len", AM_PY_I64, &a.chunk_len}, {"$ignore_index", AM_PY_I64, &a.ignore_index})
AM_PY_OP_RESULT(linear_cross_entropy_rows, am_lce_rows, am_lce_rows_args, rows_result, {"rows", AM_PY_OUT, &a.rows},
                {"targets", AM_PY_OUT, &a.targets}, {"hidden", AM_PY_IN, &a.hidden}, {"weight", AM_PY_IN, &a.weight},
                {"labels", AM_PY_IN, &a.labels}, {"|num_label_tokens", AM_PY_IN, &a.num_label_tokens},
                {"$vocab", AM_PY_I64, &a.vocab}, {"$ignore_index", AM_PY_I64, &a.ignore_index})
AM_PY_OP(linear_cross_entropy_targets, am_lce_targets, am_lce_rows_args, {"targets", AM_PY_OUT, &a.targets},
         {"count", AM_PY_OUT, &a.count}, {"hidden", AM_PY_IN, &a.hidden}, {"weight", AM_PY_IN, &a.weight},
         {"labels", AM_PY_IN, &a.labels}, {"|num_label_tokens", AM_PY_IN, &a.num_label_tokens},
         {"$vocab", AM_PY_I64, &a.vocab}, {"$ignore_index", AM_PY_I64, &a.ignore_index})
AM_PY_OP(linear_cross_entropy_chunk, am_lce_chunk, am_lce_chunk_args, {"stats", AM_PY_OUT, &a.stats},
         {"logits", AM_PY_IN, &a.logits}, {"targets", AM_PY_IN, &a.targets}, {"$first", AM_PY_I64, &a.first})
AM_PY_OP(linear_cross_entropy_join, am_lce_join, am_lce_join_args, {"stats", AM_PY_OUT, &a.stats},
         {"parts", AM_PY_IN, &a.parts})
AM_PY_OP(linear_cross_entropy_loss, am_lce_loss, am_lce_chunk_args, {"loss", AM_PY_OUT, &a.loss},
         {"stats", AM_PY_IN, &a.stats}, {"targets", AM_PY_IN, &a.targets},
         {"|num_label_tokens", AM_PY_IN, &a.num_label_tokens}, {"$n", AM_PY_I64, &a.n})
AM_PY_OP(linear_cross_entropy_grad, am_lce_grad, am_lce_chunk_args, {"dlogits", AM_PY_OUT, &a.dlogits},
         {"dloss", AM_PY_IN, &a.dloss}, {"logits", AM_PY_IN, &a.logits}, {"stats", AM_PY_IN, &a.stats},
         {"targets", AM_PY_IN, &a.targets}, {"|num_label_tokens", AM_PY_IN, &a.num_label_tokens},
         {"$first", AM_PY_I64, &a.first})
AM_PY_OP_RESULT(linear_cross_entropy_product_workspace, am_lce_product_workspace, am_lce_product_args, bytes_result,
                {"left", AM_PY_IN, &a.left})
AM_PY_OP(linear_cross_entropy_product, am_lce_product, am_lce_product_args, {"out", AM_PY_OUT, &a.out},
         {"workspace", AM_PY_OUT, &a.workspace}, {"left", AM_PY_IN, &a.left}, {"right", AM_PY_IN, &a.right},
         {"$add", AM_PY_BOOL, &a.add})
AM_PY_OP(linear_cross_entropy_scatter, am_lce_scatter, am_lce_collect_args, {"dhidden", AM_PY_OUT, &a.dhidden},
         {"sum", AM_PY_IN, &a.sum}, {"rows", AM_PY_IN, &a.rows})
AM_PY_OP(linear_cross_entropy_mask, am_lce_mask, am_lce_mask_args, {"out", AM_PY_OUT, &a.out},
         {"rows", AM_PY_IN, &a.rows}, {"targets", AM_PY_IN, &a.targets})

PyMethodDef am_loss_methods[] = {
    AM_PY_METHOD(
        cross_entropy_forward,
        "cross_entropy_forward(loss, row_loss, logits, labels, num_label_tokens=None, stats=None, count=None, *, "
        "chunk_len, ignore_index)\n--\n\nLoss of rows of logits; row_loss is float64 scratch of one element a "
        "row, stats [2, T] and count [] are left for backward."),
    AM_PY_METHOD(
        cross_entropy_backward,
        "cross_entropy_backward(dlogits, dloss, logits, labels, num_label_tokens=None, stats=None, *, chunk_len, "
        "ignore_index)\n--\n\nGradient of cross_entropy_forward, on the CPU from the logits alone."),
    AM_PY_METHOD(
        linear_cross_entropy_rows,
        "linear_cross_entropy_rows(rows, targets, hidden, weight, labels, num_label_tokens=None, *, "
        "vocab, ignore_index)\n--\n\nChecks a linear_cross_entropy's arguments, lists the rows that have a label "
        "and those labels, in [0, vocab), and returns how many."),
    AM_PY_METHOD(
        linear_cross_entropy_targets,
        "linear_cross_entropy_targets(targets, count, hidden, weight, labels, num_label_tokens=None, *, "
        "vocab, ignore_index)\n--\n\nChecks the same and leaves every row's label where the tensors are: -1 for "
        "ignore_index, -2 for one out of range; and the count."),
    AM_PY_METHOD(linear_cross_entropy_chunk,
                 "linear_cross_entropy_chunk(stats, logits, targets, *, first)\n--\n\nJoins one chunk of logits [n, "
                 "Vc] to stats [3, T]: running maximum, sum of exponentials, logit of the label."),
    AM_PY_METHOD(
        linear_cross_entropy_join,
        "linear_cross_entropy_join(stats, parts)\n--\n\nStatistics [3, T] of all words from those of ranks that "
        "share them, [R, 3, T]."),
    AM_PY_METHOD(
        linear_cross_entropy_loss,
        "linear_cross_entropy_loss(loss, stats, targets, num_label_tokens=None, *, n)\n--\n\nThe loss of n rows."),
    AM_PY_METHOD(linear_cross_entropy_grad,
                 "linear_cross_entropy_grad(dlogits, dloss, logits, stats, targets, num_label_tokens=None, *, first)\n"
                 "--\n\nThe gradient of a chunk of logits; dlogits may be the logits themselves."),
    AM_PY_METHOD(linear_cross_entropy_product_workspace,
                 "linear_cross_entropy_product_workspace(left)\n--\n\nBytes of scratch that a product needs."),
    AM_PY_METHOD(linear_cross_entropy_product,
                 "linear_cross_entropy_product(out, workspace, left, right, *, add)\n--\n\nout = left @ right, or with "
                 "add out += left @ right; add needs a float32 out."),
    AM_PY_METHOD(linear_cross_entropy_scatter,
                 "linear_cross_entropy_scatter(dhidden, sum, rows)\n--\n\nRow i of sum becomes row rows[i] of dhidden; "
                 "all others become 0."),
    AM_PY_METHOD(linear_cross_entropy_mask,
                 "linear_cross_entropy_mask(out, rows, targets)\n--\n\nout = rows, 0 where targets are -1."),
    {NULL, NULL, 0, NULL},
};
