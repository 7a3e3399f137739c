/* norm_forward.cu -- RMSNorm (with residual), gated RMSNorm, LayerNorm: y and the statistics of every row.
 *
 * kLanes neighbouring threads hold a row in registers, kChunks 16-byte words each, kRows rows at a time where rows are
 * short: one read, the sum over the lanes, one write. A row that is no whole number of aligned words, or longer than
 * kMost elements, goes to norm_plain.cu.
 *
 * Floor: x (and residual, z) read and y (and sum) written once over the copy rate of the memory. GB/s on one H200 of
 * lanes x chunks x rows, bfloat16, the copy at 4,124: gated 128: 8 x 2 x 1 3,624, 16 x 1 x 1 3,547, 16 x 1 x 4 3,015;
 * LayerNorm 1152: 32 x 5 x 2 1,704, 16 x 9 x 1 1,609, 64 x 3 x 2 1,210, 128 x 2 x 1 1,123; RMSNorm 3072: 128 x 3 x 2
 * 3,336, 256 x 2 x 2 2,835, 64 x 6 x 2 2,632; 5120: 128 x 5 x 2 3,819, 256 x 3 x 1 3,380, 256 x 3 x 2 2,887.
 */
#include "norm_rows.cuh"
#include "on_device.h"

namespace
{

using namespace norms;
using rows::kPer;

constexpr int kMost = 6144;

template <int kLanes> constexpr int kThreads = kLanes > 32 ? kLanes : 256;

template <typename T, Kind kKind, int kLanes, int kChunks, int kRows> struct Tile {
    uint4 x[kRows][kChunks], other[kRows][kKind == kRmsSum || kKind == kGated ? kChunks : 1];
    int64_t row[kRows];
    int lane, words;

    __device__ bool holds(const Forward &p, int u, int j) const { return row[u] < p.rows && lane + j * kLanes < words; }

    __device__ int word(int j) const { return lane + j * kLanes; }

    __device__ void read(const Forward &p)
    {
        const uint4 zero = make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int u = 0; u < kRows; u++)
#pragma unroll
            for (int j = 0; j < kChunks; j++) {
                const bool here = holds(p, u, j);
                x[u][j] = here ? rows::load(rows::row_of(p.axes, p.x, row[u]) + 16 * word(j)) : zero;
                if constexpr (kKind == kRmsSum)
                    other[u][j] = here ? rows::load(rows::row_of(p.axes, p.residual, row[u]) + 16 * word(j)) : zero;
                if constexpr (kKind == kGated)
                    other[u][j] = here ? rows::load(rows::row_of(p.axes, p.z, row[u]) + 16 * word(j)) : zero;
            }
    }

    /* x becomes x + residual, rounded once and written. */
    __device__ void add(const Forward &p)
    {
#pragma unroll
        for (int u = 0; u < kRows; u++)
#pragma unroll
            for (int j = 0; j < kChunks; j++) {
                float a[kPer<T>], b[kPer<T>];
                rows::unpack<T>(a, x[u][j]);
                rows::unpack<T>(b, other[u][j]);
#pragma unroll
                for (int i = 0; i < kPer<T>; i++)
                    a[i] += b[i];
                x[u][j] = rows::pack<T>(a);
                if (holds(p, u, j))
                    rows::store(rows::row_of(p.axes, p.sum, row[u]) + 16 * word(j), x[u][j]);
            }
    }
};

template <typename T, Kind kKind, int kLanes, int kChunks, int kRows>
__global__ void __launch_bounds__(kThreads<kLanes>) norm_forward_kernel(const __grid_constant__ Forward p)
{
    constexpr int kGroups = kThreads<kLanes> / kLanes;
    constexpr int kSums = kKind == kLayer ? 2 : 1;
    __shared__ float shared[2][kMostWarps][1], shared_layer[2][kMostWarps][kSums];
    Tile<T, kKind, kLanes, kChunks, kRows> t;
    t.lane = threadIdx.x % kLanes;
    t.words = p.n / kPer<T>;
#pragma unroll
    for (int u = 0; u < kRows; u++)
        t.row[u] = (static_cast<int64_t>(blockIdx.x) * kRows + u) * kGroups + threadIdx.x / kLanes;
    t.read(p);
    float w[kChunks][kPer<T>], b[kKind == kLayer ? kChunks : 1][kPer<T>]; /* under way before the sums, which wait */
#pragma unroll
    for (int j = 0; j < kChunks; j++)
        if (t.word(j) < t.words) {
            weights<T>(w[j], p.weight, t.word(j), p.weight_bf16);
            if constexpr (kKind == kLayer)
                weights<T>(b[j], p.bias, t.word(j), p.bias_bf16);
        }
    if constexpr (kKind == kRmsSum)
        t.add(p);

    float rstd[kRows], mean[kRows], rest[kRows];
#pragma unroll
    for (int u = 0; u < kRows; u++) {
        float sum[1] = {0.0f}, squares[kSums] = {0.0f};
#pragma unroll
        for (int j = 0; j < kChunks; j++) {
            float x[kPer<T>];
            rows::unpack<T>(x, t.x[u][j]);
#pragma unroll
            for (int i = 0; i < kPer<T>; i++)
                sum[0] += kKind == kLayer ? x[i] : x[i] * x[i];
        }
        sum_lanes<kLanes>(sum, shared, u % 2);
        mean[u] = rest[u] = 0.0f;
        if constexpr (kKind == kLayer) { /* the float32 mean is off by half an ulp of itself: take away what is left */
            mean[u] = sum[0] / static_cast<float>(p.n);
#pragma unroll
            for (int j = 0; j < kChunks; j++) {
                float x[kPer<T>];
                rows::unpack<T>(x, t.x[u][j]);
#pragma unroll
                for (int i = 0; i < kPer<T>; i++) {
                    const float c = t.word(j) < t.words ? x[i] - mean[u] : 0.0f;
                    squares[0] += c * c;
                    squares[kSums - 1] += c;
                }
            }
            sum_lanes<kLanes>(squares, shared_layer, u % 2);
            rest[u] = squares[1] / static_cast<float>(p.n);
            sum[0] = squares[0] - rest[u] * squares[1];
        }
        rstd[u] = __frsqrt_rn(sum[0] / static_cast<float>(p.n) + p.eps);
        if (t.lane == 0 && t.row[u] < p.rows) {
            p.rstd[t.row[u]] = rstd[u];
            if constexpr (kKind == kLayer)
                p.mean[t.row[u]] = mean[u];
        }
    }

#pragma unroll
    for (int j = 0; j < kChunks; j++) {
        if (t.word(j) >= t.words)
            break;
#pragma unroll
        for (int u = 0; u < kRows; u++) {
            if (t.row[u] >= p.rows)
                continue;
            float x[kPer<T>], z[kPer<T>];
            rows::unpack<T>(x, t.x[u][j]);
            if constexpr (kKind == kGated)
                rows::unpack<T>(z, t.other[u][j]);
#pragma unroll
            for (int i = 0; i < kPer<T>; i++) {
                if constexpr (kKind == kLayer)
                    x[i] = ((x[i] - mean[u]) - rest[u]) * rstd[u] * w[j][i] + b[j][i];
                else if constexpr (kKind == kGated)
                    x[i] = scaled<T>(x[i], rstd[u], w[j][i], p.weight_bf16) * (z[i] * sigmoid<T>(z[i]));
                else
                    x[i] = x[i] * rstd[u] * (w[j][i] + p.shift);
            }
            rows::store(rows::row_of(p.axes, p.y, t.row[u]) + 16 * t.word(j), rows::pack<T>(x));
        }
    }
}

template <typename T, Kind kKind, int kLanes, int kChunks, int kRows>
am_status launch(const Forward &p, cudaStream_t stream)
{
    constexpr int kBlock = kRows * kThreads<kLanes> / kLanes;
    const int64_t blocks = (p.rows + kBlock - 1) / kBlock;
    AM_CHECK(blocks <= INT32_MAX, AM_ERR_UNSUPPORTED, "norm: %lld rows, CUDA takes up to %lld", (long long)p.rows,
             (long long)INT32_MAX * kBlock);
    norm_forward_kernel<T, kKind, kLanes, kChunks, kRows>
        <<<static_cast<unsigned>(blocks), kThreads<kLanes>, 0, stream>>>(p);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

template <typename T, Kind kKind> am_status launch_by_length(const Forward &p, cudaStream_t stream)
{
    /* rows: enough bytes under way, until their registers leave too few threads */
    constexpr int kMore = kKind == kRms ? 2 : 1, kShort = kKind == kRmsSum ? 2 : kKind == kGated ? 1 : 4;
    const int words = p.n / kPer<T>;
    if constexpr (kKind != kLayer) {
        if (words <= 16)
            return launch<T, kKind, kKind == kGated ? 8 : 16, kKind == kGated ? 2 : 1, kShort>(p, stream);
        if (words <= 32)
            return launch<T, kKind, 32, 1, kShort>(p, stream);
        if (words <= 64)
            return launch<T, kKind, 32, 2, kMore>(p, stream);
    }
    if constexpr (kKind != kGated) {
        if (words <= 128)
            return launch<T, kKind, 64, 2, kMore>(p, stream);
        if constexpr (kKind == kLayer)
            if (words <= 160)
                return launch<T, kKind, 32, 5, 2>(p, stream);
        if (words <= 256)
            return launch<T, kKind, 128, 2, kMore>(p, stream);
        if (words <= 384)
            return launch<T, kKind, 128, 3, kMore>(p, stream);
        if (words <= 640)
            return launch<T, kKind, 128, 5, kMore>(p, stream);
        if (words <= 768)
            return launch<T, kKind, 256, 3, kMore>(p, stream);
        if constexpr (sizeof(T) == 4 && kKind != kLayer)
            return launch<T, kKind, 512, 3, 1>(p, stream);
    }
    return forward_plain(p, kKind, sizeof(T) == 2, stream);
}

bool fits(const Forward &p, Kind kind, bool bf16)
{
    bool fine = p.n <= kMost && p.n % (bf16 ? 8 : 4) == 0;
    for (const rows::Rows *r : {&p.x, &p.y, &p.sum, &p.residual, &p.z})
        fine = fine && (r->data == nullptr || rows::aligned(p.axes, *r, 16));
    for (const void *v : {p.weight, p.bias})
        fine = fine && reinterpret_cast<uintptr_t>(v) % 16 == 0;
    return fine && (kind != kLayer || p.n > 64 * (bf16 ? 8 : 4));
}

template <typename T> am_status launch_by_kind(const Forward &p, Kind kind, cudaStream_t stream)
{
    switch (kind) {
    case kRms: return launch_by_length<T, kRms>(p, stream);
    case kRmsSum: return launch_by_length<T, kRmsSum>(p, stream);
    case kGated: return launch_by_length<T, kGated>(p, stream);
    default: return launch_by_length<T, kLayer>(p, stream);
    }
}

am_status forward(const am_norm_args *a, cudaStream_t stream)
{
    const am_tensor *const tensors[] = {&a->x, &a->y, &a->sum, &a->residual, &a->z};
    rows::Rows r[5];
    Forward p = {};
    p.axes = rows::merge(tensors, 5, r);
    p.x = r[0];
    p.y = r[1];
    p.sum = r[2];
    p.residual = r[3];
    p.z = r[4];
    p.weight = a->weight.data;
    p.bias = rows::given(a->bias) ? a->bias.data : nullptr;
    p.rstd = static_cast<float *>(a->rstd.data);
    p.mean = rows::given(a->mean) ? static_cast<float *>(a->mean.data) : nullptr;
    p.rows = rows::count(a->x);
    const int64_t n = a->x.shape[a->x.ndim - 1];
    AM_CHECK(n <= INT32_MAX, AM_ERR_UNSUPPORTED, "norm: rows of %lld elements, CUDA takes up to %d", (long long)n,
             INT32_MAX);
    p.n = static_cast<int>(n);
    p.eps = static_cast<float>(a->eps);
    p.shift = a->kind == AM_NORM_RMS && a->zero_centered ? 1.0f : 0.0f;
    p.weight_bf16 = a->weight.dtype == AM_BF16;
    p.bias_bf16 = a->bias.dtype == AM_BF16;
    const Kind kind = a->kind == AM_NORM_GATED   ? kGated
                      : a->kind == AM_NORM_LAYER ? kLayer
                      : p.sum.data               ? kRmsSum
                                                 : kRms;
    const bool bf16 = a->x.dtype == AM_BF16;
    if (p.rows == 0)
        return AM_OK;
    if (!fits(p, kind, bf16))
        return forward_plain(p, kind, bf16, stream);
    return bf16 ? launch_by_kind<__nv_bfloat16>(p, kind, stream) : launch_by_kind<float>(p, kind, stream);
}

} // namespace

extern "C" am_status am_cuda_norm_forward(const am_norm_args *a, const am_exec *ex)
{
    return on_device(forward, a, ex);
}
