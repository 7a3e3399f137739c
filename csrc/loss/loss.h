/* loss.h -- cross-entropy of rows of logits, and the pieces of a linear layer fused with it.
 *
 *   loss = sum over t with y_t != ignore_index of (log sum_v exp l_tv - l_{t y_t}) / count
 *   dl_tv = (exp(l_tv) / sum_w exp(l_tw) - [v = y_t]) * dloss / count
 *
 * count is num_label_tokens where it is given, else the number of rows with a label; a count of 0 makes the loss and
 * every gradient 0. Rows labelled ignore_index are never read. Sums over a row are float32, sums over rows float64.
 * On the CPU a label out of range and a negative count are errors; on CUDA, where nobody waits to look at them, the
 * loss and the row's gradient become NaN. Logits are [T, V] f32 or bf16, last axis contiguous; labels [T] i32 or i64,
 * each in [0, V) or ignore_index.
 *
 * The linear layer runs over the vocabulary in chunks, outside: for each chunk, logits = hidden @ weight[chunk]^T for
 * the n rows that have a label (_product) goes through _chunk (which keeps the running maximum and sum of every row),
 * then _loss closes. Backward takes each chunk, kept or made again, _grad makes its gradient, and _product makes
 * weight's gradient of that and adds to hidden's.
 *
 * Which rows have a label the host knows on the CPU alone (_rows, _scatter). Elsewhere all T go through, targets say on
 * the device which are ignored (_targets), and these are made 0 where they are an operand (_mask).
 *
 * Where ranks share the words, each has every row and runs over the chunks of its own weight; _join makes the
 * statistics of all words of the ranks' before the loss and the gradients.
 */
#ifndef AM_LOSS_H
#define AM_LOSS_H

#include "am_exec.h"

typedef struct am_cross_entropy_args { /* forward writes loss and row_loss, backward reads dloss, writes dlogits */
    am_tensor loss;                    /* [] f32 out */
    am_tensor row_loss;                /* [T] f64 scratch */
    am_tensor stats;            /* [2, T] f32, optional on the CPU: largest logit of a row and sum of exp(l - it),
                                   which forward leaves there for backward to read the logits once */
    am_tensor count;            /* [] i64 out, optional: what the sum was divided by */
    am_tensor dlogits;          /* [T, V] out, logits' dtype, contiguous */
    am_tensor dloss;            /* [] f32 in */
    am_tensor logits;           /* [T, V] in */
    am_tensor labels;           /* [T] in */
    am_tensor num_label_tokens; /* [] i32 or i64 in, optional */
    int64_t chunk_len;          /* rows of a parallel chunk, > 0 */
    int64_t ignore_index;
} am_cross_entropy_args;

am_status am_cross_entropy_forward(am_cross_entropy_args *a, const am_exec *ex);
am_status am_cross_entropy_backward(am_cross_entropy_args *a, const am_exec *ex);

/* What stands in targets instead of a label. */
enum { AM_LOSS_IGNORED = -1, AM_LOSS_INVALID = -2 };

/* Checks the arguments of a linear_cross_entropy, and lists the rows that have a label (_rows, CPU) or says of every
 * row what its label is (_targets). */
typedef struct am_lce_rows_args {
    am_tensor rows;    /* [T] i64 out (_rows): indices of the n rows with a label, rising */
    am_tensor targets; /* [T] i64 out: their labels; _targets: every row's label, or AM_LOSS_... */
    am_tensor count;   /* [] i64 out (_targets): num_label_tokens, or the number of labels */
    int64_t n;         /* out (_rows) */
    am_tensor hidden;  /* [T, H] f32 or bf16 */
    am_tensor weight;  /* [Vr, H] hidden's dtype: all V words, or a rank's */
    am_tensor labels;  /* [T] in */
    am_tensor num_label_tokens;
    int64_t vocab; /* V */
    int64_t ignore_index;
} am_lce_rows_args;

typedef struct am_lce_chunk_args {
    am_tensor loss;    /* [] f32 out (_loss) */
    am_tensor stats;   /* [3, T] f32 in/out: running maximum (first -infinity), sum of exp(l - maximum) (first 0), logit
                          of the label; columns of a longer one will do */
    am_tensor dloss;   /* [] f32 in (_grad) */
    am_tensor logits;  /* [n, Vc] in */
    am_tensor dlogits; /* [n, Vc] out (_grad), logits' dtype; may be the logits */
    am_tensor targets; /* [T] i64 in, the first n count: labels, or AM_LOSS_... */
    am_tensor num_label_tokens; /* must be given on CUDA */
    int64_t first;              /* vocabulary index of column 0 */
    int64_t n;                  /* rows (_loss) */
} am_lce_chunk_args;

/* Statistics of ranks that share the words, joined in the order of ranks, so that all of them have the same bits. */
typedef struct am_lce_join_args {
    am_tensor stats; /* [3, T] f32 out, as am_lce_chunk_args has them */
    am_tensor parts; /* [R, 3, T] f32 in, contiguous; the logit of a label that is no word of a rank's is 0 there */
} am_lce_join_args;

am_status am_lce_rows(am_lce_rows_args *a, const am_exec *ex);
am_status am_lce_targets(am_lce_rows_args *a, const am_exec *ex);
am_status am_lce_chunk(am_lce_chunk_args *a, const am_exec *ex);
am_status am_lce_join(am_lce_join_args *a, const am_exec *ex);
am_status am_lce_loss(am_lce_chunk_args *a, const am_exec *ex);
am_status am_lce_grad(am_lce_chunk_args *a, const am_exec *ex);

/* out = left right, or out += left right: the three products of the layer. Any strides with one axis contiguous, on
 * CUDA (cuBLASLt) the other's no less than a line; the blocks are as small as they need be for the threads, and change
 * no bit. Sums are float32. */
typedef struct am_lce_product_args {
    am_tensor out;       /* [M, N] f32, or left's dtype without add; last axis contiguous */
    am_tensor workspace; /* [workspace_bytes] u8 scratch; with less room fewer threads work */
    am_tensor left;      /* [M, K] f32 or bf16 */
    am_tensor right;     /* [K, N] left's dtype */
    int64_t workspace_bytes;
    bool add;
} am_lce_product_args;

am_status am_lce_product_workspace(am_lce_product_args *a, const am_exec *ex);
am_status am_lce_product(am_lce_product_args *a, const am_exec *ex);

/* The sum's n rows go home, other rows become 0. */
typedef struct am_lce_collect_args {
    am_tensor dhidden; /* [T, H] f32 or bf16 out */
    am_tensor sum;     /* [n, H] f32 in */
    am_tensor rows;    /* [T] i64 in, the first n count, rising */
} am_lce_collect_args;

am_status am_lce_scatter(am_lce_collect_args *a, const am_exec *ex);

/* out = rows, 0 where targets say AM_LOSS_IGNORED. */
typedef struct am_lce_mask_args {
    am_tensor out;     /* [T, H] f32 or bf16 out, contiguous */
    am_tensor rows;    /* [T, H] f32 or out's dtype in, last axis contiguous */
    am_tensor targets; /* [T] i64 in */
} am_lce_mask_args;

am_status am_lce_mask(am_lce_mask_args *a, const am_exec *ex);

/* The CUDA launchers: everything checked, sizes may be 0. */
am_status am_cuda_cross_entropy_forward(const am_cross_entropy_args *a, const am_exec *ex);
am_status am_cuda_cross_entropy_backward(const am_cross_entropy_args *a, const am_exec *ex);
am_status am_cuda_lce_targets(const am_lce_rows_args *a, const am_exec *ex);
am_status am_cuda_lce_chunk(const am_lce_chunk_args *a, const am_exec *ex);
am_status am_cuda_lce_join(const am_lce_join_args *a, const am_exec *ex);
am_status am_cuda_lce_loss(const am_lce_chunk_args *a, const am_exec *ex);
am_status am_cuda_lce_grad(const am_lce_chunk_args *a, const am_exec *ex);
am_status am_cuda_lce_mask(const am_lce_mask_args *a, const am_exec *ex);
am_status am_cuda_lce_product(const am_lce_product_args *a, const am_exec *ex);
am_status am_cuda_lce_product_workspace(am_lce_product_args *a);

#endif
