/* conv_backward.cu -- packed causal convolution: dx of every row, dweight and dbias over all of them.
 *
 *   block = kThreads * kPer channels of one run of the sums, its rows from the last to the first
 *     thread: kPer channels (8 bytes); filter, sums, the inputs of a row and the slopes dz of the rows after it in
 * registers; kAhead rows of x and dy asked for in advance kAhead rows well inside one document: no question asked;
 * others: row by row, edges looked at it begins width - 1 rows after the run, whose dz the run's dx needs sums: float32
 * over 32 rows, float64 in the thread's own shared memory, then the runs one after another by a second kernel: one
 * order, same bits.
 *
 * Floor: x and dy read and dx written once over the copy rate of the memory.
 */
#include "conv.cuh"
#include "on_device.h"

namespace
{

using namespace convs;

template <typename T> constexpr int kPerThread = 8 / static_cast<int>(sizeof(T)); /* channels */
constexpr int kGroups = 32 / kAhead;                                              /* summed in float32 */

template <int kPer, int kWidth> struct Sums {
    float sum[kWidth + 1][kPer]; /* dbias is last */

    template <typename Inputs>
    __device__ void add(const Filter<kPer, kWidth> &filter, const float (&dz)[kPer], const Inputs &inputs)
    {
#pragma unroll
        for (int j = 0; j < kWidth; j++)
            if (filter.has(j)) {
                float u[kPer];
                inputs(u, j);
#pragma unroll
                for (int c = 0; c < kPer; c++)
                    sum[j][c] = fmaf(dz[c], u[c], sum[j][c]);
            }
#pragma unroll
        for (int c = 0; c < kPer; c++)
            sum[kWidth][c] += dz[c];
    }
    /* Moves the sums into the thread's float64 ones. */
    __device__ void flush(double (*total)[kPer][kThreads])
    {
#pragma unroll
        for (int j = 0; j <= kWidth; j++)
#pragma unroll
            for (int c = 0; c < kPer; c++) {
                total[j][c][threadIdx.x] += static_cast<double>(sum[j][c]);
                sum[j][c] = 0.0f;
            }
    }
};

/* dz of a row from its inputs and dy. */
template <typename T, int kPer, int kWidth, typename Inputs>
__device__ void slopes(float (&dz)[kPer], const Call &p, const Filter<kPer, kWidth> &filter, const Inputs &inputs,
                       const Lanes<T, kPer> &dy)
{
    dy.get(dz);
    if (!p.silu)
        return;
    float z[kPer];
    filter.apply(z, inputs);
#pragma unroll
    for (int c = 0; c < kPer; c++)
        dz[c] *= slope<T>(z[c]);
}

/* dx = dx + weight[width - 1] dz + weight[width - 2] dz of the next row + .. */
template <typename T, int kPer, int kWidth>
__device__ void put(float (&dx)[kPer], const Filter<kPer, kWidth> &filter, const float (&dz)[kPer],
                    const float (&later)[kWidth - 1][kPer], char *to)
{
#pragma unroll
    for (int c = 0; c < kPer; c++) {
        dx[c] = fmaf(filter.weight[kWidth - 1][c], dz[c], dx[c]);
#pragma unroll
        for (int j = 1; j < kWidth; j++)
            if (filter.has(kWidth - 1 - j))
                dx[c] = fmaf(filter.weight[kWidth - 1 - j][c], later[j - 1][c], dx[c]);
    }
    Lanes<T, kPer> out;
    out.set(dx);
    out.write(to);
}

/* Puts a row's numbers in front of those of the rows after it. */
template <int kPer, int kRows> __device__ void push(float (&rows)[kRows][kPer], const float (&front)[kPer])
{
#pragma unroll
    for (int c = 0; c < kPer; c++) {
#pragma unroll
        for (int j = kRows - 1; j > 0; j--)
            rows[j][c] = rows[j - 1][c];
        rows[0][c] = front[c];
    }
}

template <typename T, int kPer, int kWidth>
__global__ void __launch_bounds__(kThreads, kWidth < kAnyWidth ? 4 : 2)
    conv_backward_kernel(const __grid_constant__ Call p)
{
    constexpr int kBack = kWidth - 1;
    __shared__ double total[kWidth + 1][kPer][kThreads];
    const int64_t run = blockIdx.x / p.columns;
    const int first = static_cast<int>(run * p.rows / p.runs), stop = static_cast<int>((run + 1) * p.rows / p.runs);
    const int channel = (static_cast<int>(blockIdx.x % p.columns) * kThreads + static_cast<int>(threadIdx.x)) * kPer;
    if (channel >= p.channels)
        return;
    const char *const x = p.x + channel * sizeof(T), *const dy = p.dy + channel * sizeof(T);
    char *const dx = p.out + channel * sizeof(T);
    const int top = (stop + p.width - 1 < p.rows ? stop + p.width - 1 : p.rows) - 1;
    const int low = first - kBack > 0 ? first - kBack : 0;

    Lanes<T, kPer> ahead_x[kAhead], ahead_dy[kAhead]; /* of row t: x of row t - kBack */
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
        ahead_x[i].read(x, p.x_stride, top - kBack - i, low, p.rows);
        ahead_dy[i].read(dy, p.dy_stride, top - i, first, p.rows);
    }
    float u[kWidth][kPer] = {}, later[kBack][kPer] = {}, front[kPer];
#pragma unroll
    for (int j = 0; j < kBack; j++) {
        Lanes<T, kPer> after;
        after.read(x, p.x_stride, top - kBack + 1 + j, low, p.rows);
        after.get(u[j]);
    }
    const Inside<kPer, kWidth> inside{u};
    Filter<kPer, kWidth> filter;
    filter.read(p, channel);
    Sums<kPer, kWidth> sums = {};
#pragma unroll
    for (int j = 0; j <= kWidth; j++)
#pragma unroll
        for (int c = 0; c < kPer; c++)
            total[j][c][threadIdx.x] = 0.0;
    Cursor at;
    at.seek(p.docs, top);

    int groups = 0;
    for (int t = first < stop ? top : first - 1; t >= first; t -= kAhead) {
        const int least = t - kAhead + 1; /* the group's first row */
        if (t < stop && least >= first && t <= at.end - kWidth && least - kBack >= at.start) {
#pragma unroll
            for (int i = 0; i < kAhead; i++) {
                float dz[kPer], out[kPer] = {};
                ahead_x[i].get(front);
                ahead_x[i].read(x, p.x_stride, t - i - kAhead - kBack, low, p.rows);
                push(u, front);
                slopes(dz, p, filter, inside, ahead_dy[i]);
                ahead_dy[i].read(dy, p.dy_stride, t - i - kAhead, first, p.rows);
                sums.add(filter, dz, inside);
                put<T>(out, filter, dz, later, dx + (t - i) * p.out_stride);
                push(later, dz);
            }
        } else {
#pragma unroll 1
            for (int r = t; r >= least && r >= first; r--) {
                float dz[kPer], out[kPer] = {};
                ahead_x[0].get(front);
                push(u, front);
                const Lanes<T, kPer> upstream = ahead_dy[0];
#pragma unroll
                for (int i = 1; i < kAhead; i++) {
                    ahead_x[i - 1] = ahead_x[i];
                    ahead_dy[i - 1] = ahead_dy[i];
                }
                ahead_x[kAhead - 1].read(x, p.x_stride, r - kAhead - kBack, low, p.rows);
                ahead_dy[kAhead - 1].read(dy, p.dy_stride, r - kAhead, first, p.rows);
                at.down(p.docs, r);
                if (r < at.start) {
                    if (r < stop)
                        clear<T, kPer>(dx + r * p.out_stride);
                    continue;
                }
                if (r == at.end - 1)
#pragma unroll
                    for (int j = 0; j < kBack; j++)
#pragma unroll
                        for (int c = 0; c < kPer; c++)
                            later[j][c] = 0.0f;
                const AtEdge<kPer, kWidth> own{u, p, at, r, channel};
                slopes(dz, p, filter, own, upstream);
                if (r < stop) {
                    const int late = r - at.end + p.width - 1; /* the row's place in the final state */
                    if (late >= 0 && p.dfinal.data != nullptr)
#pragma unroll
                        for (int c = 0; c < kPer; c++)
                            out[c] = p.dfinal.at(at.doc, channel + c, late);
                    sums.add(filter, dz, own);
                    put<T>(out, filter, dz, later, dx + r * p.out_stride);
                }
                push(later, dz);
            }
        }
        if (++groups % kGroups == 0)
            sums.flush(total);
    }
    if (p.partials == nullptr)
        return;
    sums.flush(total);
    double *const to = p.partials + run * (p.width + 1) * p.channels + channel;
#pragma unroll
    for (int j = 0; j <= kWidth; j++)
        if (filter.has(j))
#pragma unroll
            for (int c = 0; c < kPer; c++)
                to[static_cast<int64_t>(j - filter.lead) * p.channels + c] = total[j][c][threadIdx.x];
}

constexpr int kColumns = 32, kParts = 32;

/* Column x of a block adds every kParts-th run in y's order, then the parts one after another. */
__global__ void __launch_bounds__(kColumns *kParts)
    conv_total_kernel(View dweight, View dbias, const double *partials, int runs, int channels, int width)
{
    __shared__ double part[kParts][kColumns + 1];
    const int channel = blockIdx.x * kColumns + threadIdx.x, which = blockIdx.y;
    double total = 0.0;
    if (channel < channels)
        for (int run = threadIdx.y; run < runs; run += kParts)
            total += partials[(static_cast<int64_t>(run) * (width + 1) + which) * channels + channel];
    part[threadIdx.y][threadIdx.x] = total;
    __syncthreads();
    if (threadIdx.y != 0 || channel >= channels)
        return;
    for (int y = 1; y < kParts; y++)
        total += part[y][threadIdx.x];
    const View to = which < width ? dweight : dbias;
    if (to.data != nullptr)
        to.set(channel, which < width ? which : 0, 0, static_cast<float>(total));
}

template <typename T, int kPer, int kWidth> am_status launch(Call p, cudaStream_t stream)
{
    constexpr int64_t kWide = int64_t{kThreads} * kPer;
    p.columns = static_cast<int>((p.channels + kWide - 1) / kWide);
    const int64_t blocks = int64_t{p.runs} * p.columns;
    AM_CHECK(blocks <= INT32_MAX, AM_ERR_UNSUPPORTED, "causal_conv1d: %lld blocks, CUDA takes up to %d",
             (long long)blocks, INT32_MAX);
    conv_backward_kernel<T, kPer, kWidth><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

template <typename T> am_status launch_by_width(const Call &p, cudaStream_t stream)
{
    constexpr int kPer = kPerThread<T>;
    if (!on_words<T, kPer>(p))
        return launch<T, 1, kAnyWidth>(p, stream);
    switch (p.width) {
    case 2: return launch<T, kPer, 2>(p, stream);
    case 3: return launch<T, kPer, 3>(p, stream);
    case 4: return launch<T, kPer, 4>(p, stream);
    default: return launch<T, kPer, kAnyWidth>(p, stream);
    }
}

am_status backward(const am_conv_args *a, cudaStream_t stream)
{
    Call p = {};
    AM_TRY(call_of(a, &p));
    if (p.channels == 0)
        return AM_OK;
    AM_TRY(a->x.dtype == AM_BF16 ? launch_by_width<__nv_bfloat16>(p, stream) : launch_by_width<float>(p, stream));
    if (rows::given(a->dstate))
        AM_TRY(states(a, p, stream));
    if (p.partials == nullptr)
        return AM_OK;
    const dim3 grid(static_cast<unsigned>((p.channels + int64_t{kColumns} - 1) / kColumns),
                    static_cast<unsigned>(p.width + 1));
    conv_total_kernel<<<grid, dim3(kColumns, kParts), 0, stream>>>(view(a->dweight), view(a->dbias), p.partials, p.runs,
                                                                   p.channels, p.width);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

} // namespace

extern "C" am_status am_cuda_causal_conv1d_backward(const am_conv_args *a, const am_exec *ex)
{
    return on_device(backward, a, ex);
}
