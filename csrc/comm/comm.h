/* comm.h -- bytes between the GPUs of several ranks, by NCCL, and the arithmetic of a reduction whose parts have
 * arrived.
 *
 * comm_reduce_parts.   out[i] = scale * (((parts[0][i] + parts[1][i]) + parts[2][i]) + ... + parts[R-1][i])
 *
 * Summed in float32, rank 0 first, scaled once and rounded once into out: the same bits for every thread count, every
 * instruction set, every device and every caller. Whoever owns a slice computes what an all-reduce would put there.
 * n == 0 is a legal shard. Nothing moves between ranks here: the caller exchanges the parts.
 *
 * Communicators. libnccl is looked up at the first call: the one that torch loaded, else the wheel's, else the
 * system's. One rank makes an id and tells it to the others; every rank opens a communicator with it, in a thread of
 * its own, so that nobody waits for a rank that never comes: comm_state tells when it is ready, and what NCCL found
 * wrong since. comm_exchange sends and receives on the communicator's own stream, behind what is on the caller's stream
 * so far, and does not wait; comm_join has the caller's stream wait for that. Any thread may close a communicator at
 * any time: aborted, what is under way ends, and whoever waits for it goes on.
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

enum { AM_COMM_ID = 128, AM_COMM_HANDLE = 192, AM_COMM_WINDOW_RANKS = 16 };

typedef struct am_comm_id_args {
    char id[2 * AM_COMM_ID + 1]; /* out: hexadecimal */
} am_comm_id_args;

typedef struct am_comm_open_args {
    int64_t comm;        /* out: names the communicator; never comes again */
    const char *id;      /* of comm_id, the same on every rank */
    int64_t rank, ranks; /* rank in [0, ranks) */
    int64_t device;      /* CUDA device of this rank; no two ranks share one */
} am_comm_open_args;

typedef struct am_comm_state_args {
    int64_t comm;
    bool ready;   /* out: it is open */
    bool pending; /* out: what comm_exchange sent or receives is under way still */
} am_comm_state_args;

typedef struct am_comm_exchange_args {
    am_tensor arriving;         /* out: from each rank so many bytes, in the order of ranks; contiguous */
    am_tensor sent;             /* in: to each rank so many bytes, in the order of ranks; contiguous */
    am_i64_array send_bytes;    /* [ranks], none to the rank itself; what the peer receives */
    am_i64_array receive_bytes; /* [ranks] */
    int64_t comm;
    bool joined; /* the caller's stream waits at once, as after comm_join */
} am_comm_exchange_args;

typedef struct am_comm_window_args {
    int64_t comm, chunk;             /* chunk: bytes, a positive multiple of 4,096 */
    char handle[AM_COMM_HANDLE + 1]; /* out */
} am_comm_window_args;

typedef struct am_comm_attach_args {
    int64_t comm;
    const char *handles; /* of all ranks, side by side, this one's among them; "": no windows after all */
} am_comm_attach_args;

/* out[i] = scale * sum over ranks of their sent[rank of this one][i], as comm_reduce_parts adds. */
typedef struct am_comm_sum_args {
    am_tensor out;  /* [n] f32 or bf16, contiguous, out; shares no memory with sent */
    am_tensor sent; /* [ranks, n] f32 or bf16, last axis contiguous, in; n the same on every rank */
    int64_t comm;
    double scale;
} am_comm_sum_args;

typedef struct am_comm_join_args {
    am_tensor arriving; /* tells the stream */
    int64_t comm;
} am_comm_join_args;

typedef struct am_comm_close_args {
    int64_t comm; /* one that is closed already is no error */
    bool abort;   /* do not wait for what is under way; else for five seconds */
} am_comm_close_args;

/* Where there is no CUDA in the build, or no NCCL to be found: AM_ERR_UNSUPPORTED. What NCCL refuses: AM_ERR_CUDA. */
am_status am_comm_id(am_comm_id_args *a, const am_exec *ex);
am_status am_comm_open(am_comm_open_args *a, const am_exec *ex);
am_status am_comm_state(am_comm_state_args *a, const am_exec *ex);
am_status am_comm_exchange(const am_comm_exchange_args *a, const am_exec *ex);
am_status am_comm_window(am_comm_window_args *a, const am_exec *ex);
am_status am_comm_attach(const am_comm_attach_args *a, const am_exec *ex);
am_status am_comm_sum(const am_comm_sum_args *a, const am_exec *ex);
am_status am_comm_join(const am_comm_join_args *a, const am_exec *ex);
am_status am_comm_close(const am_comm_close_args *a, const am_exec *ex);

/* What comm_reduce_parts and comm_sum ask of their tensors. */
am_status am_comm_check_parts(const char *fn, const char *name, const am_tensor *out, const am_tensor *parts,
                              double scale);

am_status am_cuda_comm_reduce_parts(const am_comm_reduce_parts_args *a, const am_exec *ex);
am_status am_cuda_comm_id(am_comm_id_args *a);
am_status am_cuda_comm_open(am_comm_open_args *a);
am_status am_cuda_comm_state(am_comm_state_args *a);
am_status am_cuda_comm_exchange(const am_comm_exchange_args *a, const am_exec *ex);
am_status am_cuda_comm_window(am_comm_window_args *a);
am_status am_cuda_comm_attach(const am_comm_attach_args *a);
am_status am_cuda_comm_sum(const am_comm_sum_args *a, const am_exec *ex);
am_status am_cuda_comm_join(const am_comm_join_args *a, const am_exec *ex);
am_status am_cuda_comm_close(const am_comm_close_args *a);

#endif
