/* partition.h -- host planning over ordered units: frames over ranks, documents out of a pack. Pure C, no threads.
 *
 * Frames. Unit i has p_i patches and costs p_i * (p_i + alpha). frame_partition cuts the n ordered units into `world`
 * contiguous parts, none empty, and writes the cuts [world + 1]: part r is [cuts[r], cuts[r + 1]).
 *   minimax: the least possible largest cost of a part (integer binary search over the bound, greedy check).
 *   bisect:  cut r is the number of units whose running cost is at most total * r / world, kept so that every part
 *            has a unit.
 *
 * Documents. A document is a maximal run of one nonzero id; 0 is padding.
 */
#ifndef AM_PARTITION_H
#define AM_PARTITION_H

#include "am_exec.h"

typedef struct am_frame_partition_args {
    int64_t *cuts;        /* [world + 1] out, allocated here with malloc; NULL when there are fewer units than ranks */
    am_i64_array patches; /* [n] in, p >= 0 */
    int64_t world;        /* >= 1 */
    int64_t alpha;        /* >= 0 */
    bool bisect;
} am_frame_partition_args;

typedef struct am_docs_args {
    int64_t *docs;      /* [n_docs, 2] out, start and end of each document in order; allocated here with malloc */
    int64_t n_docs;     /* out */
    am_i64_array index; /* [T] ids, or [N + 1] offsets */
} am_docs_args;

typedef struct am_index_array_args {
    am_i64_array index; /* in, and the result */
} am_index_array_args;

/* Does nothing: the doorway has copied the integers already. */
am_status am_index_array(am_index_array_args *a, const am_exec *ex);

am_status am_frame_partition(am_frame_partition_args *a, const am_exec *ex);
am_status am_docs_from_ids(am_docs_args *a, const am_exec *ex);

/* Offsets start at 0 and never decrease; a document of length 0 keeps its row. */
am_status am_docs_from_offsets(am_docs_args *a, const am_exec *ex);

#endif
