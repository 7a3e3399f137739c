/* nccl.cu -- communicators of NCCL, which is looked up at the first call.
 *
 * A communicator is opened in a thread of its own. NCCL's own way of not waiting would start a thread for every later
 * group of calls as well; this way a group is launched by the caller, in some microseconds. So that a group launched by
 * one thread can be ended by another, which finds that a peer is gone, `users` counts who is inside NCCL with it.
 *
 * The exchange: ready is recorded on the caller's stream, the side stream waits for it, sends and receives, and records
 * done, which comm_join has the caller's stream wait for. All exchanges of a communicator are on its one side stream,
 * in the order of the calls, so that one event of each kind is enough. With a window (window.h) its puts take that
 * stream, and what arrives is taken on a second one; short messages that the caller waits for at once take the caller's
 * own stream, which saves six of the host's calls and two ways between streams. Nothing waits on the host and nothing
 * spins but NCCL's own kernel while its bytes travel.
 */
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "nccl_abi.h"
#include "on_device.h"
#include "window.h"

extern "C" {
#include "am_dl.h"
#include "comm.h"
}

#if __has_include(<nccl.h>)
#include <nccl.h>
static_assert(sizeof(ncclUniqueId) == sizeof(nccl_id), "an id is 128 bytes");
static_assert(static_cast<int>(ncclInProgress) == NCCL_IN_PROGRESS, "ncclInProgress");
static_assert(static_cast<int>(ncclUint8) == NCCL_BYTE, "ncclUint8");
#endif

static_assert(sizeof(nccl_id) == AM_COMM_ID, "an id in hexadecimal holds an id");

namespace
{

constexpr int kComms = 256;
constexpr int kPolls = 1000, kPatience = 5000; /* milliseconds that a close waits for those inside NCCL, for rows */

enum State { kFree, kOpening, kReady, kFailed, kClosing };

struct Comm {
    State state;
    int64_t number;
    int users, rank, ranks, device;
    bool sent;       /* done was recorded */
    bool apart;      /* the last exchange was on streams of its own */
    cudaStream_t on; /* else on this one */
    nccl_id id;
    nccl_handle handle;
    cudaStream_t side, take;
    cudaEvent_t ready, done, taken;
    window::Window *window;
    char trouble[256];
};

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
nccl_functions nccl;
bool loaded;
Comm comms[kComms];
int64_t last_number;

am_status load()
{
    if (loaded)
        return AM_OK;
    void *library = nullptr;
    AM_TRY(am_dl_open(&library, NCCL_LIBRARY, NCCL_WHEEL, NCCL_PACKAGE));
    const struct {
        const char *name;
        void **at;
    } wanted[] = {{"ncclGetUniqueId", reinterpret_cast<void **>(&nccl.make_id)},
                  {"ncclCommInitRank", reinterpret_cast<void **>(&nccl.open)},
                  {"ncclCommGetAsyncError", reinterpret_cast<void **>(&nccl.state)},
                  {"ncclCommDestroy", reinterpret_cast<void **>(&nccl.destroy)},
                  {"ncclCommAbort", reinterpret_cast<void **>(&nccl.end)},
                  {"ncclGroupStart", reinterpret_cast<void **>(&nccl.group_start)},
                  {"ncclGroupEnd", reinterpret_cast<void **>(&nccl.group_end)},
                  {"ncclSend", reinterpret_cast<void **>(&nccl.send)},
                  {"ncclRecv", reinterpret_cast<void **>(&nccl.receive)},
                  {"ncclGetErrorString", reinterpret_cast<void **>(&nccl.text)},
                  {"ncclGetLastError", reinterpret_cast<void **>(&nccl.last_words)}};
    for (const auto &w : wanted)
        AM_TRY(am_dl_find(w.at, library, w.name));
    loaded = true;
    return AM_OK;
}

am_status load_once()
{
    pthread_mutex_lock(&lock);
    const am_status st = load();
    pthread_mutex_unlock(&lock);
    return st;
}

am_status failed(const char *what, nccl_status status)
{
    const char *const more = nccl.last_words(nullptr);
    return am_fail(AM_ERR_CUDA, "%s: error %d: %s%s%s", what, status, nccl.text(status), more && *more ? ": " : "",
                   more ? more : "");
}

#define NCCL(call)                                                                                                     \
    do {                                                                                                               \
        const nccl_status nccl_status_ = (call);                                                                       \
        if (nccl_status_ != 0)                                                                                         \
            return failed(#call, nccl_status_);                                                                        \
    } while (0)

/* With the lock held. */
Comm *find(int64_t number)
{
    for (Comm &c : comms)
        if (c.state != kFree && c.number == number)
            return &c;
    return nullptr;
}

/* The communicator, in which the caller is from now on a user, until `release`. */
am_status acquire(const char *fn, int64_t number, Comm **out)
{
    pthread_mutex_lock(&lock);
    Comm *const c = find(number);
    am_status st = AM_OK;
    if (c == nullptr || c->state == kClosing)
        st = am_fail(AM_ERR_ARG, "%s: there is no communicator %lld (closed?)", fn, (long long)number);
    else if (c->state == kFailed)
        st = am_fail(AM_ERR_CUDA, "%s: %s", fn, c->trouble);
    else
        c->users++;
    pthread_mutex_unlock(&lock);
    *out = c;
    return st;
}

void release(Comm *c)
{
    pthread_mutex_lock(&lock);
    c->users--;
    pthread_mutex_unlock(&lock);
}

am_status make_streams(Comm *c)
{
    int low = 0, high = 0;
    AM_CUDA(cudaDeviceGetStreamPriorityRange(&low, &high));
    AM_CUDA(cudaStreamCreateWithPriority(&c->side, cudaStreamNonBlocking, high));
    AM_CUDA(cudaStreamCreateWithPriority(&c->take, cudaStreamNonBlocking, high));
    AM_CUDA(cudaEventCreateWithFlags(&c->ready, cudaEventDisableTiming));
    AM_CUDA(cudaEventCreateWithFlags(&c->done, cudaEventDisableTiming));
    AM_CUDA(cudaEventCreateWithFlags(&c->taken, cudaEventDisableTiming));
    return AM_OK;
}

am_status open_now(Comm *c)
{
    AM_CUDA(cudaSetDevice(c->device));
    AM_TRY(make_streams(c));
    NCCL(nccl.open(&c->handle, c->ranks, c->id, c->rank));
    return AM_OK;
}

bool wait_for_users(Comm *c)
{
    const timespec pause = {0, 1000000};
    for (int n = 0; n < kPolls; n++) {
        pthread_mutex_lock(&lock);
        const bool none = c->users == 0;
        pthread_mutex_unlock(&lock);
        if (none)
            return true;
        (void)nanosleep(&pause, nullptr);
    }
    return false;
}

/* Of an event, from a thread that may be another than one that captures a graph, which a query would spoil. */
cudaError_t query(cudaEvent_t event)
{
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    const cudaError_t found = cudaEventQuery(event);
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    return found;
}

/* Of what was begun last; what was taken counts where all was put. */
cudaError_t query_both(const Comm *c)
{
    const cudaError_t found = query(c->done);
    return found == cudaSuccess ? query(c->taken) : found;
}

/* Of a communicator that is being closed, and frees its slot. Errors say nothing that its user would not have met. */
void destroy(Comm *c, bool abort)
{
    (void)cudaSetDevice(c->device);
    if (c->handle)
        (void)(abort ? nccl.end(c->handle) : nccl.destroy(c->handle));
    if (!wait_for_users(c))
        return; /* one that NCCL does not let go has the rest, slot included, for good */
    /* where a stream may look at it still, or others' work may hang that freeing would wait for, it stays */
    if (c->window && !abort && (!c->sent || query_both(c) == cudaSuccess))
        window::destroy(c->window);
    for (const cudaEvent_t event : {c->ready, c->done, c->taken})
        if (event)
            (void)cudaEventDestroy(event);
    for (const cudaStream_t stream : {c->side, c->take})
        if (stream)
            (void)cudaStreamDestroy(stream);
    pthread_mutex_lock(&lock);
    *c = {};
    pthread_mutex_unlock(&lock);
}

void *opener(void *at)
{
    Comm *const c = static_cast<Comm *>(at);
    const am_status st = open_now(c);
    pthread_mutex_lock(&lock);
    const bool left = c->state == kClosing; /* meanwhile it was closed */
    if (st != AM_OK)
        (void)snprintf(c->trouble, sizeof c->trouble, "%s", am_last_error());
    if (!left)
        c->state = st == AM_OK ? kReady : kFailed;
    pthread_mutex_unlock(&lock);
    if (left)
        destroy(c, true);
    return nullptr;
}

/* A slot with the arguments in it. */
am_status reserve(const am_comm_open_args *a, Comm **out)
{
    am_status st = AM_ERR_NOMEM;
    pthread_mutex_lock(&lock);
    for (Comm &c : comms) {
        if (c.state != kFree)
            continue;
        c = {};
        c.state = kOpening;
        c.number = ++last_number;
        c.rank = static_cast<int>(a->rank);
        c.ranks = static_cast<int>(a->ranks);
        c.device = static_cast<int>(a->device);
        for (int i = 0; i < AM_COMM_ID; i++) {
            unsigned byte = 0;
            (void)sscanf(a->id + 2 * i, "%2x", &byte);
            c.id.data[i] = static_cast<char>(byte);
        }
        *out = &c;
        st = AM_OK;
        break;
    }
    pthread_mutex_unlock(&lock);
    return st == AM_OK ? AM_OK : am_fail(st, "comm_open: %d communicators are open", kComms);
}

/* All receives and sends of a group, nearest ranks first. */
am_status post(const am_comm_exchange_args *a, Comm *c)
{
    const int64_t *const sends = a->send_bytes.data, *const receives = a->receive_bytes.data;
    for (int n = 1; n < c->ranks; n++) {
        const int to = (c->rank + n) % c->ranks, from = (c->rank - n + c->ranks) % c->ranks;
        int64_t before_to = 0, before_from = 0;
        for (int peer = 0; peer < to; peer++)
            before_to += sends[peer];
        for (int peer = 0; peer < from; peer++)
            before_from += receives[peer];
        if (receives[from] > 0)
            NCCL(nccl.receive(static_cast<char *>(a->arriving.data) + before_from, static_cast<size_t>(receives[from]),
                              NCCL_BYTE, from, c->handle, c->side));
        if (sends[to] > 0)
            NCCL(nccl.send(static_cast<const char *>(a->sent.data) + before_to, static_cast<size_t>(sends[to]),
                           NCCL_BYTE, to, c->handle, c->side));
    }
    return AM_OK;
}

am_status check_capture(cudaStream_t stream)
{
    cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
    AM_CUDA(cudaStreamIsCapturing(stream, &capturing));
    AM_CHECK(capturing == cudaStreamCaptureStatusNone, AM_ERR_UNSUPPORTED,
             "what travels between ranks cannot be captured in a CUDA graph");
    return AM_OK;
}

/* What is on the caller's stream so far comes before what is begun now. */
am_status begin(Comm *c, cudaStream_t stream)
{
    const bool behind = c->sent && !c->apart && c->on != stream;
    AM_TRY(check_capture(stream));
    AM_CUDA(cudaEventRecord(c->ready, stream));
    for (const cudaStream_t own : {c->side, c->take}) {
        if (own == c->take && !c->window)
            continue;
        AM_CUDA(cudaStreamWaitEvent(own, c->ready, 0));
        if (behind)
            AM_CUDA(cudaStreamWaitEvent(own, c->done, 0));
    }
    return AM_OK;
}

am_status ended(Comm *c)
{
    AM_CUDA(cudaEventRecord(c->done, c->side));
    AM_CUDA(cudaEventRecord(c->taken, c->take));
    c->sent = true;
    c->apart = true;
    return AM_OK;
}

/* The caller's stream waits for all that was begun. */
am_status join(Comm *c, cudaStream_t stream)
{
    if (!c->sent || (!c->apart && c->on == stream))
        return AM_OK;
    AM_CUDA(cudaStreamWaitEvent(stream, c->done, 0));
    if (c->apart)
        AM_CUDA(cudaStreamWaitEvent(stream, c->taken, 0));
    return AM_OK;
}

/* On the caller's own stream, which goes on when all is there. */
am_status exchange_here(const am_comm_exchange_args *a, Comm *c, cudaStream_t stream)
{
    AM_TRY(check_capture(stream));
    AM_TRY(join(c, stream));
    AM_TRY(window::exchange_short(c->window, a, stream));
    AM_CUDA(cudaEventRecord(c->done, stream));
    c->sent = true;
    c->apart = false;
    c->on = stream;
    return AM_OK;
}

am_status exchange_apart(const am_comm_exchange_args *a, Comm *c, cudaStream_t stream)
{
    AM_TRY(begin(c, stream));
    if (window::is_attached(c->window)) {
        AM_TRY(window::exchange(c->window, a, {c->side, c->take}));
        return ended(c);
    }
    NCCL(nccl.group_start());
    const am_status st = post(a, c);
    const nccl_status status = nccl.group_end();
    AM_TRY(st);
    if (status != 0)
        return failed("ncclGroupEnd", status);
    return ended(c);
}

am_status exchange(const am_comm_exchange_args *a, Comm *c, cudaStream_t stream)
{
    if (a->joined && window::is_attached(c->window) && window::is_short(c->window, a))
        return exchange_here(a, c, stream);
    AM_TRY(exchange_apart(a, c, stream));
    return a->joined ? join(c, stream) : AM_OK;
}

am_status sum(const am_comm_sum_args *a, Comm *c, cudaStream_t stream)
{
    AM_TRY(begin(c, stream));
    AM_TRY(window::sum(c->window, a, {c->side, c->take}));
    return ended(c);
}

am_status check_open(const char *fn, const Comm *c)
{
    AM_CHECK(c->state == kReady, AM_ERR_ARG, "%s: communicator %lld is not open yet", fn, (long long)c->number);
    return AM_OK;
}

am_status check_device(const char *fn, const char *name, const Comm *c, const am_exec *ex)
{
    AM_CHECK(ex->dev_index == c->device, AM_ERR_DEVICE, "%s: %s is on cuda:%d, the communicator on %d", fn, name,
             ex->dev_index, c->device);
    return AM_OK;
}

am_status check_exchange(const am_comm_exchange_args *a, const Comm *c, const am_exec *ex)
{
    AM_TRY(check_open("comm_exchange", c));
    AM_CHECK(a->send_bytes.n == c->ranks, AM_ERR_SHAPE,
             "comm_exchange: send_bytes has %lld numbers, there are %d ranks", (long long)a->send_bytes.n, c->ranks);
    AM_CHECK(a->send_bytes.data[c->rank] == 0 && a->receive_bytes.data[c->rank] == 0, AM_ERR_ARG,
             "comm_exchange: rank %d sends to itself", c->rank);
    return check_device("comm_exchange", "arriving", c, ex);
}

am_status check_sum(const am_comm_sum_args *a, const Comm *c, const am_exec *ex)
{
    AM_TRY(check_open("comm_sum", c));
    AM_CHECK(window::is_attached(c->window), AM_ERR_UNSUPPORTED, "comm_sum: communicator %lld has no windows",
             (long long)a->comm);
    AM_CHECK(a->sent.shape[0] == c->ranks, AM_ERR_SHAPE, "comm_sum: sent has %lld rows, there are %d ranks",
             (long long)a->sent.shape[0], c->ranks);
    return check_device("comm_sum", "sent", c, ex);
}

template <typename Call> am_status with_device(const Comm *c, const Call &call)
{
    int before = 0;
    AM_CUDA(cudaGetDevice(&before));
    if (before == c->device)
        return call();
    AM_CUDA(cudaSetDevice(c->device));
    const am_status st = call();
    AM_CUDA(cudaSetDevice(before));
    return st;
}

am_status make_window(am_comm_window_args *a, Comm *c)
{
    AM_TRY(check_open("comm_window", c));
    AM_CHECK(c->window == nullptr, AM_ERR_ARG, "comm_window: communicator %lld has one", (long long)a->comm);
    AM_CHECK(c->ranks >= 2 && c->ranks <= AM_COMM_WINDOW_RANKS, AM_ERR_UNSUPPORTED,
             "comm_window: %d ranks; 2 to %d share windows", c->ranks, AM_COMM_WINDOW_RANKS);
    return with_device(c, [&] { return window::make(c->rank, c->ranks, a->chunk, &c->window, a->handle); });
}

am_status attach(const am_comm_attach_args *a, Comm *c)
{
    AM_TRY(check_open("comm_attach", c));
    AM_CHECK(c->window != nullptr && (!*a->handles || !window::is_attached(c->window)), AM_ERR_ARG,
             "comm_attach: communicator %lld has no window, or is attached", (long long)a->comm);
    if (!*a->handles) {
        window::leave(c->window); /* it goes with the communicator, which another thread may be closing */
        return AM_OK;
    }
    AM_CHECK(strlen(a->handles) == static_cast<size_t>(c->ranks) * AM_COMM_HANDLE, AM_ERR_SHAPE,
             "comm_attach: handles has %zu letters, %d ranks have %d each", strlen(a->handles), c->ranks,
             AM_COMM_HANDLE);
    return with_device(c, [&] { return window::attach(c->window, a->handles); });
}

template <typename Args, typename Call> am_status using_comm(const char *fn, const Args *a, const Call &call)
{
    Comm *c;
    AM_TRY(acquire(fn, a->comm, &c));
    const am_status st = call(c);
    release(c);
    return st;
}

am_status look(am_comm_state_args *a, Comm *c)
{
    a->ready = c->state == kReady;
    if (!a->ready)
        return AM_OK;
    nccl_status wrong = 0;
    NCCL(nccl.state(c->handle, &wrong));
    if (wrong != 0 && wrong != NCCL_IN_PROGRESS)
        return failed("ncclCommGetAsyncError", wrong);
    if (c->sent) {
        const cudaError_t found = query_both(c);
        a->pending = found == cudaErrorNotReady;
        if (!a->pending)
            AM_CUDA(found);
    }
    return AM_OK;
}

/* Whether the caller is to destroy it: not where it is gone, being closed, or being opened, whose thread will. */
bool claim(int64_t number, Comm **out)
{
    pthread_mutex_lock(&lock);
    Comm *const c = *out = find(number);
    const bool mine = c && (c->state == kReady || c->state == kFailed);
    if (c)
        c->state = kClosing;
    pthread_mutex_unlock(&lock);
    return mine;
}

/* Whether what it sent has arrived, in the end; `give_up`: with every wait of a window ended, again and again, since a
 * peer may still tell of its messages. */
bool settle(const Comm *c, bool give_up)
{
    const timespec pause = {0, 1000000};
    cudaError_t found = c->sent ? cudaErrorNotReady : cudaSuccess;
    for (int n = 0; n < kPatience && found == cudaErrorNotReady; n++) {
        if (give_up)
            window::release(c->window);
        found = query_both(c);
        if (found == cudaErrorNotReady)
            (void)nanosleep(&pause, nullptr);
    }
    return found == cudaSuccess;
}

} // namespace

extern "C" am_status am_cuda_comm_id(am_comm_id_args *a)
{
    nccl_id id;
    AM_TRY(load_once());
    NCCL(nccl.make_id(&id));
    for (int i = 0; i < AM_COMM_ID; i++)
        (void)snprintf(a->id + 2 * i, 3, "%02x", static_cast<unsigned>(static_cast<unsigned char>(id.data[i])));
    return AM_OK;
}

extern "C" am_status am_cuda_comm_open(am_comm_open_args *a)
{
    Comm *c = nullptr;
    pthread_t thread;
    AM_TRY(load_once());
    AM_TRY(reserve(a, &c));
    a->comm = c->number;
    const int wrong = pthread_create(&thread, nullptr, opener, c);
    if (wrong == 0) {
        (void)pthread_detach(thread);
        return AM_OK;
    }
    pthread_mutex_lock(&lock);
    *c = {};
    pthread_mutex_unlock(&lock);
    return am_fail(AM_ERR_NOMEM, "comm_open: no thread: %s", strerror(wrong));
}

extern "C" am_status am_cuda_comm_state(am_comm_state_args *a)
{
    return using_comm("comm_state", a, [&](Comm *c) { return look(a, c); });
}

extern "C" am_status am_cuda_comm_exchange(const am_comm_exchange_args *a, const am_exec *ex)
{
    return using_comm("comm_exchange", a, [&](Comm *c) {
        AM_TRY(check_exchange(a, c, ex));
        return with_device(c, [&] { return exchange(a, c, static_cast<cudaStream_t>(ex->stream)); });
    });
}

extern "C" am_status am_cuda_comm_sum(const am_comm_sum_args *a, const am_exec *ex)
{
    return using_comm("comm_sum", a, [&](Comm *c) {
        AM_TRY(check_sum(a, c, ex));
        return with_device(c, [&] { return sum(a, c, static_cast<cudaStream_t>(ex->stream)); });
    });
}

extern "C" am_status am_cuda_comm_window(am_comm_window_args *a)
{
    return using_comm("comm_window", a, [&](Comm *c) { return make_window(a, c); });
}

extern "C" am_status am_cuda_comm_attach(const am_comm_attach_args *a)
{
    return using_comm("comm_attach", a, [&](Comm *c) { return attach(a, c); });
}

extern "C" am_status am_cuda_comm_join(const am_comm_join_args *a, const am_exec *ex)
{
    return using_comm("comm_join", a, [&](Comm *c) { return join(c, static_cast<cudaStream_t>(ex->stream)); });
}

extern "C" am_status am_cuda_comm_close(const am_comm_close_args *a)
{
    Comm *c;
    if (!claim(a->comm, &c))
        return AM_OK;
    int before = 0;
    const bool known = cudaGetDevice(&before) == cudaSuccess;
    if (a->abort && c->window)
        (void)settle(c, true);
    const bool left = wait_for_users(c); /* one that NCCL keeps is let go by the abort */
    destroy(c, a->abort || !left || !settle(c, false));
    if (known)
        (void)cudaSetDevice(before);
    return AM_OK;
}
