/* conv_forward.cu -- packed causal convolution: y of every row.
 *
 *   block = kThreads * kPer channels of one run of rows; thread: kPer channels (16 bytes), filter and the last inputs
 *   in registers, kAhead rows asked for in advance whatever document they belong to
 *     kAhead rows that lie inside one document, with all that they look back on: no question asked
 *     others: row by row, documents' edges looked at
 *
 * Floor: x read and y written once over the copy rate of the memory; a run reads width - 1 rows before it again.
 */
#include "conv.cuh"
#include "on_device.h"

namespace
{

using namespace convs;

template <typename T, int kPer, int kWidth, typename Inputs>
__device__ void put(const Call &p, const Filter<kPer, kWidth> &filter, const Inputs &inputs, char *to)
{
    float z[kPer];
    filter.apply(z, inputs);
    if (p.silu)
#pragma unroll
        for (int c = 0; c < kPer; c++)
            z[c] *= sigmoid<T>(z[c]);
    Lanes<T, kPer> y;
    y.set(z);
    y.write(to);
}

template <int kPer, int kWidth> __device__ void push(float (&u)[kWidth][kPer], const float (&newest)[kPer])
{
#pragma unroll
    for (int c = 0; c < kPer; c++) {
#pragma unroll
        for (int j = 1; j < kWidth; j++)
            u[j - 1][c] = u[j][c];
        u[kWidth - 1][c] = newest[c];
    }
}

template <typename T, int kPer, int kWidth>
__global__ void __launch_bounds__(kThreads, kWidth < kAnyWidth ? 4 : 2)
    conv_forward_kernel(const __grid_constant__ Call p)
{
    const int first = static_cast<int>(blockIdx.x / p.columns) * p.run;
    const int stop = first + p.run < p.rows ? first + p.run : p.rows;
    const int channel = (static_cast<int>(blockIdx.x % p.columns) * kThreads + static_cast<int>(threadIdx.x)) * kPer;
    if (channel >= p.channels)
        return;
    const char *const x = p.x + channel * sizeof(T);
    char *const y = p.out + channel * sizeof(T);

    Lanes<T, kPer> ahead[kAhead];
    float u[kWidth][kPer] = {}, newest[kPer];
#pragma unroll
    for (int i = 0; i < kAhead; i++)
        ahead[i].read(x, p.x_stride, first + i, 0, stop);
#pragma unroll
    for (int j = 1; j < kWidth; j++) {
        Lanes<T, kPer> before;
        before.read(x, p.x_stride, first - kWidth + j, 0, stop);
        before.get(u[j]);
    }
    Filter<kPer, kWidth> filter;
    filter.read(p, channel);
    Cursor at;
    at.seek(p.docs, first);

    for (int row = first; row < stop; row += kAhead) {
        if (row - (kWidth - 1) >= at.start && row + kAhead <= at.end && row + kAhead <= stop) {
#pragma unroll
            for (int i = 0; i < kAhead; i++) {
                ahead[i].get(newest);
                ahead[i].read(x, p.x_stride, row + i + kAhead, 0, stop);
                push(u, newest);
                put<T>(p, filter, Inside<kPer, kWidth>{u}, y + (row + i) * p.out_stride);
            }
            continue;
        }
#pragma unroll 1
        for (int r = row; r < row + kAhead && r < stop; r++) {
            ahead[0].get(newest);
            push(u, newest);
#pragma unroll
            for (int i = 1; i < kAhead; i++)
                ahead[i - 1] = ahead[i];
            ahead[kAhead - 1].read(x, p.x_stride, r + kAhead, 0, stop);
            at.up(p.docs, r);
            if (r >= at.start)
                put<T>(p, filter, AtEdge<kPer, kWidth>{u, p, at, r, channel}, y + r * p.out_stride);
            else
                clear<T, kPer>(y + r * p.out_stride);
        }
    }
}

template <typename T, int kPer, int kWidth> am_status launch(Call p, cudaStream_t stream)
{
    constexpr int64_t kWide = int64_t{kThreads} * kPer;
    int processors = 1;
    AM_TRY(multiprocessors(&processors));
    p.columns = static_cast<int>((p.channels + kWide - 1) / kWide);
    /* A dozen blocks for every one that has room at a time; rows before a run cost from 19 % (of 16) to 2 % of x. */
    const int64_t even = int64_t{p.rows} * p.columns / (12 * 4 * int64_t{processors});
    p.run = even < 16 ? 16 : even > 128 ? 128 : static_cast<int>(even + kAhead - 1) / kAhead * kAhead;
    const int64_t blocks = int64_t{(p.rows + p.run - 1) / p.run} * p.columns;
    AM_CHECK(blocks <= INT32_MAX, AM_ERR_UNSUPPORTED, "causal_conv1d: %lld blocks, CUDA takes up to %d",
             (long long)blocks, INT32_MAX);
    conv_forward_kernel<T, kPer, kWidth><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

template <typename T> am_status launch_by_width(const Call &p, cudaStream_t stream)
{
    constexpr int kPer = rows::kPer<T>;
    if (!on_words<T, kPer>(p))
        return launch<T, 1, kAnyWidth>(p, stream);
    switch (p.width) {
    case 2: return launch<T, kPer, 2>(p, stream);
    case 3: return launch<T, kPer, 3>(p, stream);
    case 4: return launch<T, kPer, 4>(p, stream);
    default: return launch<T, kPer, kAnyWidth>(p, stream);
    }
}

am_status forward(const am_conv_args *a, cudaStream_t stream)
{
    Call p = {};
    AM_TRY(call_of(a, &p));
    if (p.channels == 0)
        return AM_OK;
    if (p.rows > 0)
        AM_TRY(a->x.dtype == AM_BF16 ? launch_by_width<__nv_bfloat16>(p, stream) : launch_by_width<float>(p, stream));
    return rows::given(a->final_state) ? states(a, p, stream) : AM_OK;
}

} // namespace

extern "C" am_status am_cuda_causal_conv1d_forward(const am_conv_args *a, const am_exec *ex)
{
    return on_device(forward, a, ex);
}
