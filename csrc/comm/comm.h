/* comm.h -- the arithmetic of a reduction whose parts have arrived.
 *
 *   out[i] = scale * (((parts[0][i] + parts[1][i]) + parts[2][i]) + ... + parts[R-1][i])
 *
 * Summed in float32, rank 0 first, scaled once and rounded once into out: the same bits for every thread count, every
 * instruction set and every caller. Whoever owns a slice computes what an all-reduce would put there. n == 0 is a legal
 * shard. Nothing moves between ranks here: the caller exchanges the parts.
 */
#ifndef AM_COMM_H
#define AM_COMM_H

#include "am_exec.h"

typedef struct am_comm_reduce_parts_args {
    am_tensor out;   /* [n] f32 or bf16, contiguous, out; shares no memory with parts */
    am_tensor parts; /* [R, n] f32 or bf16, R >= 1, last axis contiguous, in */
    double scale;    /* finite, rounded to float32 */
} am_comm_reduce_parts_args;

am_status am_comm_reduce_parts(const am_comm_reduce_parts_args *a, const am_exec *ex);

#endif
