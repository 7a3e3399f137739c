/* norm_plain.cu -- the norms for rows of any length, stride and alignment: a block a row, read again for every pass.
 *
 * Backward: block b does the rows b, b + runs, .. and adds their weight gradients to its run in memory, in float64;
 * a thread owns its columns.
 */
#include "norm_rows.cuh"

namespace
{

using namespace norms;

constexpr int kThreads = 256;

template <typename T> __device__ float at(const rows::Axes &axes, const rows::Rows &r, int64_t row, int i)
{
    return rows::to_float(reinterpret_cast<const T *>(rows::row_of(axes, r, row))[i]);
}

template <typename T> __device__ void put(const rows::Axes &axes, const rows::Rows &r, int64_t row, int i, float x)
{
    rows::from_float(reinterpret_cast<T *>(rows::row_of(axes, r, row)) + i, x);
}

/* The same bits on every thread. */
__device__ float block_sum(float value)
{
    __shared__ float shared[kThreads];
    __syncthreads();
    shared[threadIdx.x] = value;
    for (int half = kThreads / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half)
            shared[threadIdx.x] += shared[threadIdx.x + half];
    }
    __syncthreads();
    return shared[0];
}

template <typename T, Kind kKind> __device__ void forward_row(const Forward &p, int64_t row)
{
    const rows::Rows &in = kKind == kRmsSum ? p.sum : p.x;
    const float n = static_cast<float>(p.n);
    float mean = 0.0f, rest = 0.0f, squares = 0.0f;
    if constexpr (kKind == kRmsSum) /* a thread reads back what it wrote itself */
        for (int i = threadIdx.x; i < p.n; i += kThreads)
            put<T>(p.axes, p.sum, row, i, at<T>(p.axes, p.x, row, i) + at<T>(p.axes, p.residual, row, i));
    if constexpr (kKind == kLayer) {
        for (int i = threadIdx.x; i < p.n; i += kThreads)
            mean += at<T>(p.axes, in, row, i);
        mean = block_sum(mean) / n;
    }
    for (int i = threadIdx.x; i < p.n; i += kThreads) {
        const float c = at<T>(p.axes, in, row, i) - mean;
        squares += c * c;
        rest += c;
    }
    squares = block_sum(squares);
    rest = kKind == kLayer ? block_sum(rest) / n : 0.0f;
    const float rstd = __frsqrt_rn(squares / n - rest * rest + p.eps);
    if (threadIdx.x == 0) {
        p.rstd[row] = rstd;
        if constexpr (kKind == kLayer)
            p.mean[row] = mean;
    }
    for (int i = threadIdx.x; i < p.n; i += kThreads) {
        const float x = at<T>(p.axes, in, row, i), w = element(p.weight, i, p.weight_bf16);
        float y;
        if constexpr (kKind == kLayer) {
            y = ((x - mean) - rest) * rstd * w + element(p.bias, i, p.bias_bf16);
        } else if constexpr (kKind == kGated) {
            const float z = at<T>(p.axes, p.z, row, i);
            y = scaled<T>(x, rstd, w, p.weight_bf16) * (z * sigmoid<T>(z));
        } else {
            y = x * rstd * (w + p.shift);
        }
        put<T>(p.axes, p.y, row, i, y);
    }
}

template <typename T, Kind kKind>
__global__ void __launch_bounds__(kThreads) norm_forward_plain_kernel(const __grid_constant__ Forward p)
{
    for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x)
        forward_row<T, kKind>(p, row);
}

template <typename T, Kind kKind> __device__ void backward_row(const Backward &p, int64_t row, double *run)
{
    const float n = static_cast<float>(p.n), rstd = p.rstd[row], center = kKind == kLayer ? p.mean[row] : 0.0f;
    float mean = 0.0f, rest = 0.0f, slope = 0.0f;
    for (int i = threadIdx.x; i < p.n; i += kThreads) {
        const float dy = at<T>(p.axes, p.dy, row, i), x = at<T>(p.axes, p.x, row, i);
        float g = dy;
        if constexpr (kKind == kGated) {
            const float z = at<T>(p.axes, p.z, row, i);
            g *= z * sigmoid<T>(z);
        }
        g *= element(p.weight, i, p.weight_bf16) + p.shift; /* the same roundings as below */
        mean += g;
        rest += x - center;
        slope += g * (x - center);
    }
    slope = block_sum(slope);
    if constexpr (kKind == kLayer) {
        mean = block_sum(mean);
        rest = block_sum(rest) / n;
        slope -= rest * mean;
        mean /= n;
    }
    slope = slope * rstd / n;
    for (int i = threadIdx.x; i < p.n; i += kThreads) {
        const float dy = at<T>(p.axes, p.dy, row, i), x = at<T>(p.axes, p.x, row, i);
        const float w = element(p.weight, i, p.weight_bf16) + p.shift;
        const float normed = kKind == kLayer ? ((x - center) - rest) * rstd : x * rstd;
        float gate = 1.0f;
        if constexpr (kKind == kGated) {
            const float z = at<T>(p.axes, p.z, row, i), sigma = sigmoid<T>(z);
            gate = z * sigma;
            put<T>(p.axes, p.dz, row, i, dy * scaled<T>(x, rstd, w, p.weight_bf16) * (sigma + gate * (1.0f - sigma)));
        }
        float dx = rstd * (dy * gate * w - (kKind == kLayer ? mean : 0.0f) - normed * slope);
        if constexpr (kKind == kRmsSum)
            dx += at<T>(p.axes, p.dsum, row, i);
        put<T>(p.axes, p.dx, row, i, dx);
        run[i] += static_cast<double>(dy * gate * normed);
        if constexpr (kKind == kLayer)
            run[p.n + static_cast<int64_t>(i)] += static_cast<double>(dy);
    }
}

template <typename T, Kind kKind>
__global__ void __launch_bounds__(kThreads) norm_backward_plain_kernel(const __grid_constant__ Backward p)
{
    double *const run = p.partials + static_cast<int64_t>(blockIdx.x) * p.sums * p.n;
    for (int i = threadIdx.x; i < p.n; i += kThreads)
        for (int s = 0; s < p.sums; s++)
            run[static_cast<int64_t>(s) * p.n + i] = 0.0;
    for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x)
        backward_row<T, kKind>(p, row, run);
}

template <typename T> am_status forward(const Forward &p, Kind kind, cudaStream_t stream)
{
    const unsigned blocks = static_cast<unsigned>(p.rows < INT32_MAX ? p.rows : INT32_MAX);
    switch (kind) {
    case kRms: norm_forward_plain_kernel<T, kRms><<<blocks, kThreads, 0, stream>>>(p); break;
    case kRmsSum: norm_forward_plain_kernel<T, kRmsSum><<<blocks, kThreads, 0, stream>>>(p); break;
    case kGated: norm_forward_plain_kernel<T, kGated><<<blocks, kThreads, 0, stream>>>(p); break;
    default: norm_forward_plain_kernel<T, kLayer><<<blocks, kThreads, 0, stream>>>(p);
    }
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

template <typename T> am_status backward(const Backward &p, Kind kind, int runs, cudaStream_t stream)
{
    const unsigned blocks = static_cast<unsigned>(runs);
    switch (kind) {
    case kRms: norm_backward_plain_kernel<T, kRms><<<blocks, kThreads, 0, stream>>>(p); break;
    case kRmsSum: norm_backward_plain_kernel<T, kRmsSum><<<blocks, kThreads, 0, stream>>>(p); break;
    case kGated: norm_backward_plain_kernel<T, kGated><<<blocks, kThreads, 0, stream>>>(p); break;
    default: norm_backward_plain_kernel<T, kLayer><<<blocks, kThreads, 0, stream>>>(p);
    }
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

} // namespace

am_status norms::forward_plain(const Forward &p, Kind kind, bool bf16, cudaStream_t stream)
{
    return bf16 ? forward<__nv_bfloat16>(p, kind, stream) : forward<float>(p, kind, stream);
}

am_status norms::backward_plain(const Backward &p, Kind kind, bool bf16, int runs, cudaStream_t stream)
{
    return bf16 ? backward<__nv_bfloat16>(p, kind, runs, stream) : backward<float>(p, kind, runs, stream);
}
