/* window.cu -- the windows of window.h: mapped with CUDA's IPC handles, numbers in memory files.
 *
 * Floor of a message: its bytes at NVLink's rate, 400 GB/s a direction, and the copy out of the window, read and
 * written at 4.3 TB/s; about 6 us for two stream operations, a copy and an event on each side.
 *
 * Measured between two H200s, put, news, taken, joined: 28 to 57 us for 1 MiB (NCCL 19 to 59, on the same hosts), 77,
 * 239 and 866 us for 16, 64 and 256 MiB (NCCL 92, 259 and 907): 310 GB/s; on a host with slower words in its memory
 * 103, 329 and 1,149 (NCCL 93, 300 and 937), and 1 MiB as a short message 49 (NCCL 62). A kernel of 16, 48 or 132
 * blocks that writes in the copy engine's place: 1,032, 959 and 942 us for 256 MiB. A sum of 64 MiB, of which half
 * travels, written into the window and added there 172 us (NCCL's reduce-scatter 161), of 256 MiB 595 (559). Read from
 * the other's memory, on the slower host: 178 to 199 (NCCL 178 to 182) and 534 to 581 (567 to 583), 280 GB/s while it
 * reads; 32 blocks 223 and 721, 64 184 and 570, 264 184 and 534; a first piece as long as all others 200.
 */
#include "window.h"

#include "copies.h"
#include "reduce.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cuda.h>

#include "cuda_check.h"

namespace window
{

namespace
{

constexpr size_t kLine = 16;          /* numbers of a cache line */
constexpr uint32_t kEnd = 0x3fffffff; /* beyond all that is ever waited for */
constexpr size_t kPage = 4096;
constexpr int64_t kShort = 2 << 20; /* bytes of a message that a kernel copies */
constexpr int64_t kFirst = 4; /* the first piece of a sum is so much shorter, for the next to be copied under it */

/* What others tell a rank: messages that have arrived from each, its own that each has taken. */
struct Numbers {
    uint32_t arrived[kMaxRanks * kLine], taken[kMaxRanks * kLine];
};
static_assert(sizeof(Numbers) <= kPage, "the numbers of a rank are a page");

struct Peer {
    char *memory;
    Numbers *numbers;
    uint32_t put, taken; /* messages to it, and from it, so far */
};

struct Stream { /* the driver's calls */
    CUresult (*wait)(CUstream, CUdeviceptr, cuuint32_t, unsigned);
    CUresult (*write)(CUstream, CUdeviceptr, cuuint32_t, unsigned);
};

} // namespace

struct Window {
    int rank, ranks;
    int64_t chunk;
    bool attached;
    int file;              /* of its numbers */
    Peer peers[kMaxRanks]; /* its own memory and numbers among them */
    Stream stream;
};

namespace
{

am_status find(const char *name, void **at)
{
    cudaDriverEntryPointQueryResult found;
    AM_CUDA(cudaGetDriverEntryPointByVersion(name, at, 12000, cudaEnableDefault, &found));
    AM_CHECK(found == cudaDriverEntryPointSuccess && *at != nullptr, AM_ERR_CUDA, "the CUDA driver has no %s", name);
    return AM_OK;
}

/* The page in an open file, seen by the device too. */
am_status map_numbers(int file, Numbers **out)
{
    void *const at = file < 0 ? MAP_FAILED : mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    AM_CHECK(at != MAP_FAILED, AM_ERR_UNSUPPORTED, "comm_window: no memory that ranks share: %s", strerror(errno));
    const cudaError_t wrong = cudaHostRegister(at, kPage, cudaHostRegisterPortable | cudaHostRegisterMapped);
    if (wrong != cudaSuccess) {
        (void)munmap(at, kPage);
        AM_CUDA(wrong);
    }
    *out = static_cast<Numbers *>(at);
    return AM_OK;
}

/* A page without a name but that of this process's file, which ends with those that have it, however they end. */
am_status make_numbers(Window *w)
{
    w->file = memfd_create("automodel_c", MFD_CLOEXEC);
    if (w->file >= 0 && ftruncate(w->file, kPage) == 0)
        return map_numbers(w->file, &w->peers[w->rank].numbers);
    return am_fail(AM_ERR_UNSUPPORTED, "comm_window: memfd_create: %s", strerror(errno));
}

void unmap_numbers(Numbers *numbers)
{
    if (numbers == nullptr)
        return;
    (void)cudaHostUnregister(numbers);
    (void)munmap(numbers, kPage);
}

/* Of the places that others write into; as many follow that others read from, and the words of `copy_and_tell`. */
int64_t bytes_of(const Window *w) { return w->chunk * kSlots * (w->ranks - 1); }

/* The place of message n to or from another rank in the first half of an owner's window. */
char *place(const Window *w, int owner, int other, uint32_t n)
{
    const int64_t index = other - (other > owner), slot = index * kSlots + n % kSlots;
    return w->peers[owner].memory + slot * w->chunk;
}

char *lent_place(const Window *w, int owner, int reader, uint32_t n)
{
    return place(w, owner, reader, n) + bytes_of(w);
}

unsigned *words_of(const Window *w) { return reinterpret_cast<unsigned *>(w->peers[w->rank].memory + 2 * bytes_of(w)); }

am_status driver(CUresult wrong, const char *what)
{
    AM_CHECK(wrong == CUDA_SUCCESS, AM_ERR_CUDA, "%s: error %d", what, static_cast<int>(wrong));
    return AM_OK;
}

am_status wait_for(const Window *w, const uint32_t *number, uint32_t least, cudaStream_t stream)
{
    return driver(w->stream.wait(stream, reinterpret_cast<CUdeviceptr>(number), least, CU_STREAM_WAIT_VALUE_GEQ),
                  "cuStreamWaitValue32");
}

am_status tell(const Window *w, uint32_t *number, uint32_t value, cudaStream_t stream)
{
    return driver(w->stream.write(stream, reinterpret_cast<CUdeviceptr>(number), value, CU_STREAM_WRITE_VALUE_DEFAULT),
                  "cuStreamWriteValue32");
}

am_status fill(Window *w, char *handle)
{
    cudaIpcMemHandle_t memory;
    AM_TRY(find("cuStreamWaitValue32", reinterpret_cast<void **>(&w->stream.wait)));
    AM_TRY(find("cuStreamWriteValue32", reinterpret_cast<void **>(&w->stream.write)));
    void *at = nullptr;
    AM_CUDA(cudaMalloc(&at, 2 * static_cast<size_t>(bytes_of(w)) + kPage));
    w->peers[w->rank].memory = static_cast<char *>(at);
    AM_CUDA(cudaMemset(words_of(w), 0, kPage));
    AM_CUDA(cudaIpcGetMemHandle(&memory, at));
    AM_TRY(make_numbers(w));
    char name[kName + 1];
    (void)snprintf(name, sizeof name, "/proc/%ld/fd/%d", static_cast<long>(getpid()), w->file);
    for (size_t i = 0; i < sizeof memory; i++)
        (void)snprintf(handle + 2 * i, 3, "%02x",
                       static_cast<unsigned>(static_cast<unsigned char>(memory.reserved[i])));
    (void)snprintf(handle + 2 * sizeof memory, kName + 1, "%-64s", name);
    return AM_OK;
}

am_status map_peer(Window *w, int peer, const char *handle)
{
    cudaIpcMemHandle_t memory;
    char name[kName + 1] = {};
    for (size_t i = 0; i < sizeof memory; i++) {
        unsigned byte = 0;
        (void)sscanf(handle + 2 * i, "%2x", &byte);
        memory.reserved[i] = static_cast<char>(byte);
    }
    (void)sscanf(handle + 2 * sizeof memory, "%64s", name);
    void *at = nullptr;
    AM_CUDA(cudaIpcOpenMemHandle(&at, memory, cudaIpcMemLazyEnablePeerAccess));
    w->peers[peer].memory = static_cast<char *>(at);
    const int file = open(name, O_RDWR | O_CLOEXEC);
    const am_status st = map_numbers(file, &w->peers[peer].numbers);
    if (file >= 0)
        (void)close(file);
    return st;
}

/* The number of the next message to a rank, once the stream has waited for its place. */
am_status next_number(Window *w, int to, uint32_t *n, cudaStream_t stream)
{
    const uint32_t *const taken = &w->peers[w->rank].numbers->taken[to * kLine];
    *n = w->peers[to].put++;
    if (*n < kSlots || __atomic_load_n(taken, __ATOMIC_ACQUIRE) >= *n - kSlots + 1)
        return AM_OK;
    return wait_for(w, taken, *n - kSlots + 1, stream);
}

uint32_t *arrived_at(const Window *w, int to) { return &w->peers[to].numbers->arrived[w->rank * kLine]; }

/* Sends a piece to a rank, or lends it to be read: the copy, and the news of it. */
am_status put(Window *w, int to, const void *from, int64_t bytes, bool lent, cudaStream_t stream)
{
    uint32_t n = 0;
    AM_TRY(next_number(w, to, &n, stream));
    char *const at = lent ? lent_place(w, w->rank, to, n) : place(w, to, w->rank, n);
    AM_CUDA(cudaMemcpyAsync(at, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream));
    return tell(w, arrived_at(w, to), n + 1, stream);
}

/* Has the stream wait for the next piece of a rank, and tells where it lies. */
am_status arrived(Window *w, int from, bool lent, const void **at, cudaStream_t stream)
{
    Peer *const peer = &w->peers[from];
    const uint32_t n = peer->taken;
    *at = lent ? lent_place(w, from, w->rank, n) : place(w, w->rank, from, n);
    return wait_for(w, &w->peers[w->rank].numbers->arrived[from * kLine], n + 1, stream);
}

/* Tells that rank that its piece has been read. */
am_status took(Window *w, int from, cudaStream_t stream)
{
    Peer *const peer = &w->peers[from];
    return tell(w, &peer->numbers->taken[w->rank * kLine], ++peer->taken, stream);
}

int64_t sum_before(const int64_t *numbers, int end)
{
    int64_t sum = 0;
    for (int i = 0; i < end; i++)
        sum += numbers[i];
    return sum;
}

int64_t most(const am_i64_array *numbers)
{
    int64_t found = 0;
    for (int64_t i = 0; i < numbers->n; i++)
        found = numbers->data[i] > found ? numbers->data[i] : found;
    return found;
}

/* Bytes [begin, begin + size) of a message, as far as it goes. */
int64_t piece(int64_t bytes, int64_t begin, int64_t size)
{
    const int64_t left = bytes - begin;
    return left < 0 ? 0 : left < size ? left : size;
}

am_status copy_out(Window *w, int from, char *to, int64_t bytes, cudaStream_t stream)
{
    const void *at = nullptr;
    AM_TRY(arrived(w, from, false, &at, stream));
    AM_CUDA(cudaMemcpyAsync(to, at, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream));
    return took(w, from, stream);
}

am_status add(Window *w, const am_comm_sum_args *a, int64_t begin, int64_t n, cudaStream_t stream)
{
    const int64_t size = static_cast<int64_t>(am_dtype_size(a->sent.dtype)), part = a->sent.stride[0] * size;
    const char *const own = static_cast<const char *>(a->sent.data) + w->rank * part + begin * size;
    Listed parts = {};
    for (int rank = 0; rank < w->ranks; rank++) {
        parts.at[rank] = own;
        if (rank != w->rank)
            AM_TRY(arrived(w, rank, true, &parts.at[rank], stream));
    }
    char *const out = static_cast<char *>(a->out.data) + begin * static_cast<int64_t>(am_dtype_size(a->out.dtype));
    AM_TRY(reduce_listed(out, a->out.dtype, parts, a->sent.dtype, n, w->ranks, static_cast<float>(a->scale), stream));
    for (int rank = 0; rank < w->ranks; rank++)
        if (rank != w->rank)
            AM_TRY(took(w, rank, stream));
    return AM_OK;
}

/* What went wrong is told; CUDA would tell it again at the next launch, which is fine. */
am_status told(am_status st)
{
    if (st != AM_OK)
        (void)cudaGetLastError();
    return st;
}

} // namespace

am_status make(int rank, int ranks, int64_t chunk, Window **out, char *handle)
{
    Window *const w = static_cast<Window *>(calloc(1, sizeof(Window)));
    AM_CHECK(w != nullptr, AM_ERR_NOMEM, "comm_window: no memory");
    w->rank = rank;
    w->ranks = ranks;
    w->chunk = chunk;
    w->file = -1;
    const am_status st = fill(w, handle);
    if (st != AM_OK)
        destroy(w);
    else
        *out = w;
    return told(st);
}

am_status attach(Window *w, const char *handles)
{
    for (int peer = 0; peer < w->ranks; peer++)
        if (peer != w->rank)
            AM_TRY(told(map_peer(w, peer, handles + static_cast<size_t>(peer) * kHandle)));
    w->attached = true;
    return AM_OK;
}

void leave(Window *w) { w->attached = false; }

bool is_attached(const Window *w) { return w != nullptr && w->attached; }

am_status exchange(Window *w, const am_comm_exchange_args *a, const Streams &streams)
{
    const int64_t *const sends = a->send_bytes.data, *const receives = a->receive_bytes.data;
    const int64_t to_most = most(&a->send_bytes), from_most = most(&a->receive_bytes);
    for (int64_t begin = 0; begin < (to_most > from_most ? to_most : from_most); begin += w->chunk) {
        for (int n = 1; n < w->ranks; n++) {
            const int to = (w->rank + n) % w->ranks;
            const char *const from = static_cast<const char *>(a->sent.data) + sum_before(sends, to) + begin;
            if (const int64_t bytes = piece(sends[to], begin, w->chunk))
                AM_TRY(put(w, to, from, bytes, false, streams.put));
        }
        for (int n = 1; n < w->ranks; n++) {
            const int from = (w->rank - n + w->ranks) % w->ranks;
            char *const to = static_cast<char *>(a->arriving.data) + sum_before(receives, from) + begin;
            if (const int64_t bytes = piece(receives[from], begin, w->chunk))
                AM_TRY(copy_out(w, from, to, bytes, streams.take));
        }
    }
    return AM_OK;
}

bool is_short(const Window *w, const am_comm_exchange_args *a)
{
    const int64_t to = most(&a->send_bytes), from = most(&a->receive_bytes), all = to > from ? to : from;
    return all <= w->chunk && all <= kShort;
}

am_status exchange_short(Window *w, const am_comm_exchange_args *a, cudaStream_t stream)
{
    Copies puts = {}, takes = {};
    puts.done = words_of(w);
    takes.done = puts.done + kMaxRanks;
    for (int n = 1; n < w->ranks; n++) {
        const int to = (w->rank + n) % w->ranks;
        const int64_t bytes = a->send_bytes.data[to];
        uint32_t number = 0;
        if (bytes == 0)
            continue;
        AM_TRY(next_number(w, to, &number, stream));
        const char *const from = static_cast<const char *>(a->sent.data) + sum_before(a->send_bytes.data, to);
        puts.at[puts.n++] = {place(w, to, w->rank, number), from, bytes, arrived_at(w, to), number + 1};
    }
    AM_TRY(copy_and_tell(puts, stream));
    for (int n = 1; n < w->ranks; n++) {
        const int from = (w->rank - n + w->ranks) % w->ranks;
        const int64_t bytes = a->receive_bytes.data[from];
        const void *at = nullptr;
        if (bytes == 0)
            continue;
        AM_TRY(arrived(w, from, false, &at, stream));
        Peer *const peer = &w->peers[from];
        char *const to = static_cast<char *>(a->arriving.data) + sum_before(a->receive_bytes.data, from);
        takes.at[takes.n++] = {to, at, bytes, &peer->numbers->taken[w->rank * kLine], ++peer->taken};
    }
    return copy_and_tell(takes, stream);
}

am_status sum(Window *w, const am_comm_sum_args *a, const Streams &streams)
{
    const int64_t size = static_cast<int64_t>(am_dtype_size(a->sent.dtype)), all = a->out.shape[0];
    const int64_t part = a->sent.stride[0] * size;
    int64_t n = 0;
    for (int64_t begin = 0; begin < all; begin += n) {
        n = piece(all, begin, w->chunk / size / (begin == 0 ? kFirst : 1));
        for (int step = 1; step < w->ranks; step++) {
            const int to = (w->rank + step) % w->ranks;
            const char *const from = static_cast<const char *>(a->sent.data) + to * part + begin * size;
            AM_TRY(put(w, to, from, n * size, true, streams.put));
        }
        AM_TRY(add(w, a, begin, n, streams.take));
    }
    return AM_OK;
}

void release(Window *w)
{
    Numbers *const own = w->peers[w->rank].numbers;
    if (own == nullptr)
        return;
    for (int i = 0; i < w->ranks; i++) {
        __atomic_store_n(&own->arrived[i * kLine], kEnd, __ATOMIC_RELEASE);
        __atomic_store_n(&own->taken[i * kLine], kEnd, __ATOMIC_RELEASE);
    }
}

void destroy(Window *w)
{
    for (int peer = 0; peer < w->ranks; peer++) {
        char *const memory = w->peers[peer].memory;
        unmap_numbers(w->peers[peer].numbers);
        if (memory != nullptr)
            (void)(peer == w->rank ? cudaFree(memory) : cudaIpcCloseMemHandle(memory));
    }
    if (w->file >= 0)
        (void)close(w->file);
    free(w);
}

} // namespace window
