/* window.h -- memory of one GPU that the other ranks of a machine write into, for nccl.cu.
 *
 * A rank's window has kSlots places for messages from each of the others. Into the next of them a rank puts its message
 * with a copy over NVLink, then raises the number of messages that have arrived there; the receiver's stream waits for
 * that number, takes the message out and raises the number taken, which the sender waits for before the place is used
 * again. A sum's pieces stay on the rank that has them, in as many places beside, and the receiver reads them there
 * with the same numbers. The numbers lie in host memory that all ranks of the machine map, so that the host can end any
 * wait. The waiting is the stream's own (cuStreamWaitValue32): no kernel spins and no multiprocessor is held.
 *
 * Puts are on one stream, takes on another, and are begun in turn: where both streams share a queue of the device, no
 * put stands before the take that its peer's next put waits for.
 */
#ifndef WINDOW_H
#define WINDOW_H

#include <stddef.h>
#include <stdint.h>

#include <cuda_runtime.h>

extern "C" {
#include "comm.h"
}

namespace window
{

constexpr int kMaxRanks = 16, kSlots = 4;
constexpr size_t kName = 64;                                       /* where the numbers are, padded */
constexpr size_t kHandle = 2 * sizeof(cudaIpcMemHandle_t) + kName; /* letters that another rank needs */
static_assert(kHandle == AM_COMM_HANDLE, "a handle is so many letters");

/* Where puts are begun, and takes. */
struct Streams {
    cudaStream_t put, take;
};

struct Window;

/* This rank's, whose places hold `chunk` bytes each; `handle` gets kHandle letters and an end. The device is current.
 */
am_status make(int rank, int ranks, int64_t chunk, Window **out, char *handle);

/* Maps the others'. handles: kHandle letters a rank, side by side. */
am_status attach(Window *w, const char *handles);

/* Nothing travels through it after all. */
void leave(Window *w);

/* Whether attach was called; before that nothing travels. */
bool is_attached(const Window *w);

/* comm_exchange: messages to and from every rank, in pieces of a place; what arrives is copied out. */
am_status exchange(Window *w, const am_comm_exchange_args *a, const Streams &streams);

/* Whether every message is short, and the same for those: one stream, two kernels, no copy engine. */
bool is_short(const Window *w, const am_comm_exchange_args *a);
am_status exchange_short(Window *w, const am_comm_exchange_args *a, cudaStream_t stream);

/* comm_sum: each rank's part of the sum is lent in pieces; the rank that adds reads the others' over NVLink, in the
 * order of ranks. */
am_status sum(Window *w, const am_comm_sum_args *a, const Streams &streams);

/* Ends every wait of this rank, now and from now on; what is read then is anybody's guess. From any thread. */
void release(Window *w);

/* Unmaps the others' windows and frees this one. */
void destroy(Window *w);

} // namespace window

#endif
