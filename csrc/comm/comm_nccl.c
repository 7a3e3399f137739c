#include "comm.h"

#include <string.h>

#ifndef AM_WITH_CUDA
#define am_cuda_comm_id(a) am_no_cuda("comm_id")
#define am_cuda_comm_open(a) am_no_cuda("comm_open")
#define am_cuda_comm_state(a) am_no_cuda("comm_state")
#define am_cuda_comm_exchange(a, ex) am_no_cuda("comm_exchange")
#define am_cuda_comm_window(a) am_no_cuda("comm_window")
#define am_cuda_comm_attach(a) am_no_cuda("comm_attach")
#define am_cuda_comm_sum(a, ex) am_no_cuda("comm_sum")
#define am_cuda_comm_join(a, ex) am_no_cuda("comm_join")
#define am_cuda_comm_close(a) am_no_cuda("comm_close")
#endif

am_status am_comm_id(am_comm_id_args *a, const am_exec *ex)
{
    (void)ex;
    (void)a;
    return am_cuda_comm_id(a);
}

am_status am_comm_open(am_comm_open_args *a, const am_exec *ex)
{
    (void)ex;
    AM_CHECK(strlen(a->id) == 2 * AM_COMM_ID && strspn(a->id, "0123456789abcdef") == 2 * AM_COMM_ID, AM_ERR_ARG,
             "comm_open: id has %zu letters, %d hexadecimal digits are needed", strlen(a->id), 2 * AM_COMM_ID);
    AM_CHECK(a->ranks >= 1 && a->ranks <= INT32_MAX && a->rank >= 0 && a->rank < a->ranks, AM_ERR_ARG,
             "comm_open: rank is %lld of %lld", (long long)a->rank, (long long)a->ranks);
    AM_CHECK(a->device >= 0 && a->device <= INT32_MAX, AM_ERR_ARG, "comm_open: device is %lld", (long long)a->device);
    return am_cuda_comm_open(a);
}

am_status am_comm_state(am_comm_state_args *a, const am_exec *ex)
{
    (void)ex;
    (void)a;
    return am_cuda_comm_state(a);
}

static am_status check_bytes(const char *name, const am_i64_array *bytes, const char *of, const am_tensor *t)
{
    int64_t all = 0;
    for (int64_t i = 0; i < bytes->n; i++) {
        AM_CHECK(bytes->data[i] >= 0 && !__builtin_add_overflow(all, bytes->data[i], &all), AM_ERR_ARG,
                 "comm_exchange: %s[%lld] is %lld", name, (long long)i, (long long)bytes->data[i]);
    }
    const int64_t there = am_numel(t) * (int64_t)am_dtype_size(t->dtype);
    AM_CHECK(all == there, AM_ERR_SHAPE, "comm_exchange: %s are %lld in all, %s has %lld bytes", name, (long long)all,
             of, (long long)there);
    AM_CHECK(am_is_contiguous(t), AM_ERR_SHAPE, "comm_exchange: %s is not contiguous", of);
    return AM_OK;
}

am_status am_comm_exchange(const am_comm_exchange_args *a, const am_exec *ex)
{
    AM_CHECK(a->send_bytes.n == a->receive_bytes.n, AM_ERR_SHAPE,
             "comm_exchange: send_bytes has %lld numbers, receive_bytes %lld", (long long)a->send_bytes.n,
             (long long)a->receive_bytes.n);
    AM_TRY(check_bytes("send_bytes", &a->send_bytes, "sent", &a->sent));
    AM_TRY(check_bytes("receive_bytes", &a->receive_bytes, "arriving", &a->arriving));
    AM_CHECK(!am_overlaps(&a->arriving, &a->sent), AM_ERR_ARG, "comm_exchange: arriving and sent share memory");
    AM_CHECK(ex->dev == AM_DEV_CUDA, AM_ERR_UNSUPPORTED, "comm_exchange: NCCL carries what is on CUDA, not on the CPU");
    return am_cuda_comm_exchange(a, ex);
}

am_status am_comm_window(am_comm_window_args *a, const am_exec *ex)
{
    (void)ex;
    AM_CHECK(a->chunk > 0 && a->chunk % 4096 == 0 && a->chunk <= (int64_t)1 << 32, AM_ERR_ARG,
             "comm_window: chunk is %lld, a multiple of 4096 is needed", (long long)a->chunk);
    return am_cuda_comm_window(a);
}

am_status am_comm_attach(const am_comm_attach_args *a, const am_exec *ex)
{
    (void)ex;
    AM_CHECK(strlen(a->handles) % AM_COMM_HANDLE == 0, AM_ERR_ARG,
             "comm_attach: handles has %zu letters, each rank's has %d", strlen(a->handles), AM_COMM_HANDLE);
    return am_cuda_comm_attach(a);
}

am_status am_comm_sum(const am_comm_sum_args *a, const am_exec *ex)
{
    AM_TRY(am_comm_check_parts("comm_sum", "sent", &a->out, &a->sent, a->scale));
    AM_CHECK(ex->dev == AM_DEV_CUDA, AM_ERR_UNSUPPORTED, "comm_sum: windows are on CUDA, sent is on the CPU");
    return am_cuda_comm_sum(a, ex);
}

am_status am_comm_join(const am_comm_join_args *a, const am_exec *ex)
{
    (void)a;
    AM_CHECK(ex->dev == AM_DEV_CUDA, AM_ERR_UNSUPPORTED, "comm_join: arriving is on the CPU, which has no stream");
    return am_cuda_comm_join(a, ex);
}

am_status am_comm_close(const am_comm_close_args *a, const am_exec *ex)
{
    (void)ex;
    (void)a;
    return am_cuda_comm_close(a);
}
