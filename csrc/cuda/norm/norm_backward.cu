/* norm_backward.cu -- gradients of the norms: dx (and dz) of every row, dweight and dbias over all of them.
 *
 *   block = one run of the weight gradients, a multiprocessor each: partials' first extent many
 *     group of kLanes threads: rows run, run + runs, ..: kRows at a time in registers, the next ones on their way
 *       (the gradient of the sum is needed last: it is asked for when its row begins, and saves registers)
 *       thread: kChunks 16-byte words of every row, its columns' sums in float32 registers
 *   sums of a block's groups in float64, group by group, then of the runs by a second kernel: one order, same bits.
 *
 * Floor: dy, x (dsum, z) read and dx (dz) written once over the copy rate of the memory.
 */
#include "norm_rows.cuh"
#include "on_device.h"

namespace
{

using namespace norms;
using rows::kPer;

constexpr int kMost = 6144;
constexpr int kThreads = 512;

template <Kind kKind> constexpr bool kThird = kKind == kRmsSum || kKind == kGated;
template <Kind kKind> constexpr int kSums = kKind == kLayer ? 3 : 1;
template <Kind kKind> constexpr int kGradients = kKind == kLayer ? 2 : 1;

/* kRows rows of one group: what is read of them. */
template <typename T, Kind kKind, int kLanes, int kChunks, int kRows> struct Tile {
    uint4 dy[kRows][kChunks], x[kRows][kChunks], third[kRows][kThird<kKind> ? kChunks : 1]; /* dsum or z */
    float rstd[kRows], mean[kKind == kLayer ? kRows : 1];

    __device__ void read(const Backward &p, int64_t base)
    {
        const uint4 zero = make_uint4(0, 0, 0, 0);
        const int lane = threadIdx.x % kLanes, words = p.n / kPer<T>;
#pragma unroll
        for (int u = 0; u < kRows; u++) {
            const int64_t row = base + u * (kThreads / kLanes);
            const bool real = row < p.rows;
#pragma unroll
            for (int j = 0; j < kChunks; j++) {
                const int word = lane + j * kLanes;
                const bool here = real && word < words;
                dy[u][j] = here ? rows::load(rows::row_of(p.axes, p.dy, row) + 16 * word) : zero;
                x[u][j] = here ? rows::load(rows::row_of(p.axes, p.x, row) + 16 * word) : zero;
                if constexpr (kKind == kGated)
                    third[u][j] = here ? rows::load(rows::row_of(p.axes, p.z, row) + 16 * word) : zero;
            }
            rstd[u] = real ? __ldg(p.rstd + row) : 0.0f;
            if constexpr (kKind == kLayer)
                mean[u] = real ? __ldg(p.mean + row) : 0.0f;
        }
    }

    __device__ void read_dsum(const Backward &p, int64_t base)
    {
        const int lane = threadIdx.x % kLanes, words = p.n / kPer<T>;
#pragma unroll
        for (int u = 0; u < kRows; u++)
#pragma unroll
            for (int j = 0; j < kChunks; j++) {
                const int64_t row = base + u * (kThreads / kLanes);
                if (row < p.rows && lane + j * kLanes < words)
                    third[u][j] = rows::load(rows::row_of(p.axes, p.dsum, row) + 16 * (lane + j * kLanes));
            }
    }
};

template <typename T> __device__ void vector_at(float (&to)[kPer<T>], const float *shared, int word)
{
#pragma unroll
    for (int i = 0; i < kPer<T>; i += 4) {
        const float4 four = *reinterpret_cast<const float4 *>(shared + word * kPer<T> + i);
        to[i] = four.x;
        to[i + 1] = four.y;
        to[i + 2] = four.z;
        to[i + 3] = four.w;
    }
}

/* What a row's sums leave for its elements: those of dy w (silu(z)), of x - mean and of their product. */
struct RowSums {
    float mean, rest, slope;
};

/* The first pass over a row; `gate` keeps sigmoid(z). */
template <typename T, Kind kKind, int kLanes, int kChunks, int kRows>
__device__ RowSums row_sums(const Backward &p, const Tile<T, kKind, kLanes, kChunks, kRows> &t, int u,
                            const float *weight, float (&gate)[kKind == kGated ? kChunks : 1][kPer<T>],
                            float (*shared)[kMostWarps][kSums<kKind>], int turn)
{
    const int lane = threadIdx.x % kLanes, words = p.n / kPer<T>;
    const float rstd = t.rstd[u], center = kKind == kLayer ? t.mean[kKind == kLayer ? u : 0] : 0.0f;
    float total[kSums<kKind>] = {0.0f};
#pragma unroll
    for (int j = 0; j < kChunks; j++) {
        const int word = lane + j * kLanes;
        if (word >= words)
            break;
        float dy[kPer<T>], x[kPer<T>], w[kPer<T>], z[kPer<T>];
        rows::unpack<T>(dy, t.dy[u][j]);
        rows::unpack<T>(x, t.x[u][j]);
        vector_at<T>(w, weight, word);
        if constexpr (kKind == kGated)
            rows::unpack<T>(z, t.third[u][j]);
#pragma unroll
        for (int i = 0; i < kPer<T>; i++) {
            if constexpr (kKind == kGated) {
                gate[j][i] = sigmoid<T>(z[i]);
                total[0] += dy[i] * (z[i] * gate[j][i]) * w[i] * x[i];
            } else if constexpr (kKind == kLayer) {
                total[0] += dy[i] * w[i];
                total[1] += x[i] - center;
                total[2] += dy[i] * w[i] * (x[i] - center);
            } else {
                total[0] += dy[i] * w[i] * x[i];
            }
        }
    }
    sum_lanes<kLanes>(total, shared, turn);
    const float n = static_cast<float>(p.n);
    if constexpr (kKind == kLayer) {
        const float rest = total[1] / n;
        return {total[0] / n, rest, (total[2] - rest * total[0]) * rstd / n};
    }
    return {0.0f, 0.0f, total[0] * rstd / n};
}

/* One row: dx (and dz) written, its part of dweight (and dbias) added to `sums`. */
template <typename T, Kind kKind, int kLanes, int kChunks, int kRows>
__device__ void row_gradient(const Backward &p, const Tile<T, kKind, kLanes, kChunks, kRows> &t, int u, int64_t row,
                             const float *weight, float (&sums)[kGradients<kKind>][kChunks][kPer<T>],
                             float (*shared)[kMostWarps][kSums<kKind>], int turn)
{
    const int lane = threadIdx.x % kLanes, words = p.n / kPer<T>;
    const float rstd = t.rstd[u], center = kKind == kLayer ? t.mean[kKind == kLayer ? u : 0] : 0.0f;
    float gate[kKind == kGated ? kChunks : 1][kPer<T>];
    const RowSums of = row_sums<T, kKind, kLanes, kChunks, kRows>(p, t, u, weight, gate, shared, turn);
#pragma unroll
    for (int j = 0; j < kChunks; j++) {
        const int word = lane + j * kLanes;
        if (word >= words)
            break;
        float dy[kPer<T>], x[kPer<T>], w[kPer<T>], third[kPer<T>], dx[kPer<T>];
        rows::unpack<T>(dy, t.dy[u][j]);
        rows::unpack<T>(x, t.x[u][j]);
        vector_at<T>(w, weight, word);
        if constexpr (kThird<kKind>)
            rows::unpack<T>(third, t.third[u][j]);
#pragma unroll
        for (int i = 0; i < kPer<T>; i++) {
            if constexpr (kKind == kGated) {
                const float sigma = gate[j][i], silu = third[i] * sigma;
                dx[i] = rstd * (dy[i] * silu * w[i] - x[i] * rstd * of.slope);
                sums[0][j][i] += dy[i] * silu * (x[i] * rstd);
                third[i] = dy[i] * scaled<T>(x[i], rstd, w[i], p.weight_bf16) * (sigma + silu * (1.0f - sigma));
            } else if constexpr (kKind == kLayer) {
                const float normed = ((x[i] - center) - of.rest) * rstd;
                dx[i] = rstd * (dy[i] * w[i] - of.mean - normed * of.slope);
                sums[0][j][i] += dy[i] * normed;
                sums[kGradients<kKind> - 1][j][i] += dy[i];
            } else {
                dx[i] = rstd * (dy[i] * w[i] - x[i] * rstd * of.slope);
                if constexpr (kKind == kRmsSum)
                    dx[i] += third[i];
                sums[0][j][i] += dy[i] * (x[i] * rstd);
            }
        }
        if (row < p.rows) {
            rows::store(rows::row_of(p.axes, p.dx, row) + 16 * word, rows::pack<T>(dx));
            if constexpr (kKind == kGated)
                rows::store(rows::row_of(p.axes, p.dz, row) + 16 * word, rows::pack<T>(third));
        }
    }
}

/* The groups' sums of every column, in their order, to this block's run. */
template <typename T, Kind kKind, int kLanes, int kChunks>
__device__ void write_run(const Backward &p, const float (&sums)[kGradients<kKind>][kChunks][kPer<T>])
{
    constexpr int kWide = kLanes * kPer<T>; /* columns a chunk */
    __shared__ float all[kThreads * kPer<T>];
    double *const run = p.partials + static_cast<int64_t>(blockIdx.x) * p.sums * p.n;
#pragma unroll
    for (int s = 0; s < kGradients<kKind>; s++)
#pragma unroll
        for (int j = 0; j < kChunks; j++) {
            __syncthreads();
#pragma unroll
            for (int i = 0; i < kPer<T>; i++)
                all[threadIdx.x * kPer<T> + i] = sums[s][j][i];
            __syncthreads();
            for (int column = threadIdx.x; column < kWide && column + j * kWide < p.n; column += kThreads) {
                double total = 0.0;
                for (int group = 0; group < kThreads / kLanes; group++)
                    total += static_cast<double>(all[group * kWide + column]);
                run[static_cast<int64_t>(s) * p.n + j * kWide + column] = total;
            }
        }
}

template <typename T, Kind kKind, int kLanes, int kChunks, int kRows>
__global__ void __launch_bounds__(kThreads, 1) norm_backward_kernel(const __grid_constant__ Backward p)
{
    constexpr int kGroups = kThreads / kLanes;
    extern __shared__ float4 weight_words[];
    __shared__ float shared[2][kMostWarps][kSums<kKind>];
    float *const weight = reinterpret_cast<float *>(weight_words);
    for (int i = threadIdx.x; i < p.n; i += kThreads)
        weight[i] = element(p.weight, i, p.weight_bf16) + p.shift;
    __syncthreads();

    float sums[kGradients<kKind>][kChunks][kPer<T>] = {};
    Tile<T, kKind, kLanes, kChunks, kRows> now, next;
    const int64_t step = static_cast<int64_t>(gridDim.x) * kRows * kGroups;
    int64_t block = static_cast<int64_t>(blockIdx.x) * kRows * kGroups; /* its first row, the same for all threads */
    int turn = 0;
    now.read(p, block + threadIdx.x / kLanes);
    for (; block < p.rows; block += step) {
        const int64_t base = block + threadIdx.x / kLanes;
        if constexpr (kKind == kRmsSum)
            now.read_dsum(p, base);
        next.read(p, base + step);
#pragma unroll
        for (int u = 0; u < kRows; u++, turn ^= 1)
            row_gradient<T, kKind, kLanes, kChunks, kRows>(p, now, u, base + u * kGroups, weight, sums, shared, turn);
        now = next;
    }
    write_run<T, kKind, kLanes, kChunks>(p, sums);
}

constexpr int kColumns = 32, kParts = 32;

/* Column x of a block adds every kParts-th run in y's order, then the parts one after another. */
__global__ void __launch_bounds__(kColumns *kParts)
    norm_total_kernel(void *dweight, void *dbias, const double *partials, int runs, int n, bool weight_bf16,
                      bool bias_bf16)
{
    __shared__ double part[kParts][kColumns + 1];
    const int column = blockIdx.x * kColumns + threadIdx.x;
    void *const out = blockIdx.y == 0 ? dweight : dbias;
    if (out == nullptr)
        return;
    double total = 0.0;
    if (column < n)
        for (int run = threadIdx.y; run < runs; run += kParts)
            total += partials[(static_cast<int64_t>(run) * gridDim.y + blockIdx.y) * n + column];
    part[threadIdx.y][threadIdx.x] = total;
    __syncthreads();
    if (threadIdx.y != 0 || column >= n)
        return;
    for (int y = 1; y < kParts; y++)
        total += part[y][threadIdx.x];
    if (blockIdx.y == 0 ? weight_bf16 : bias_bf16)
        static_cast<__nv_bfloat16 *>(out)[column] = __float2bfloat16_rn(static_cast<float>(total));
    else
        static_cast<float *>(out)[column] = static_cast<float>(total);
}

template <typename T, Kind kKind, int kLanes, int kChunks, int kRows>
am_status launch(const Backward &p, int runs, cudaStream_t stream)
{
    norm_backward_kernel<T, kKind, kLanes, kChunks, kRows>
        <<<static_cast<unsigned>(runs), kThreads, static_cast<size_t>(p.n) * sizeof(float), stream>>>(p);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

template <typename T, Kind kKind> am_status launch_by_length(const Backward &p, int runs, cudaStream_t stream)
{
    const int words = p.n / kPer<T>;
    if constexpr (kKind != kLayer) {
        if (words <= 16)
            return launch<T, kKind, 16, 1, kKind == kRms ? 4 : 2>(p, runs, stream);
        if (words <= 32)
            return launch<T, kKind, 32, 1, kKind == kRms ? 4 : 2>(p, runs, stream);
        if (words <= 64)
            return launch<T, kKind, 32, 2, kKind == kRms ? 2 : 1>(p, runs, stream);
    }
    if constexpr (kKind != kGated) {
        if (words <= 128)
            return launch<T, kKind, 64, 2, 1>(p, runs, stream);
        if (words <= 256)
            return launch<T, kKind, 128, 2, 1>(p, runs, stream);
        if constexpr (sizeof(T) == 4 || kKind != kLayer)
            if (words <= 384)
                return launch<T, kKind, 128, 3, 1>(p, runs, stream);
        if constexpr (kKind != kLayer)
            if (words <= 768)
                return launch<T, kKind, 256, 3, 1>(p, runs, stream);
        if constexpr (sizeof(T) == 4 && kKind != kLayer)
            return launch<T, kKind, 512, 3, 1>(p, runs, stream);
    }
    return backward_plain(p, kKind, sizeof(T) == 2, runs, stream);
}

bool fits(const Backward &p, Kind kind, bool bf16)
{
    bool fine = p.n <= kMost && p.n % (bf16 ? 8 : 4) == 0;
    for (const rows::Rows *r : {&p.dx, &p.dz, &p.dy, &p.dsum, &p.x, &p.z})
        fine = fine && (r->data == nullptr || rows::aligned(p.axes, *r, 16));
    return fine && (kind != kLayer || p.n > 64 * (bf16 ? 8 : 4));
}

template <typename T> am_status launch_by_kind(const Backward &p, Kind kind, int runs, cudaStream_t stream)
{
    switch (kind) {
    case kRms: return launch_by_length<T, kRms>(p, runs, stream);
    case kRmsSum: return launch_by_length<T, kRmsSum>(p, runs, stream);
    case kGated: return launch_by_length<T, kGated>(p, runs, stream);
    default: return launch_by_length<T, kLayer>(p, runs, stream);
    }
}

am_status rows_of(const am_norm_grad_args *a, Backward *p)
{
    const am_tensor *const tensors[] = {&a->x, &a->dx, &a->dz, &a->dy, &a->dsum, &a->z};
    rows::Rows r[6];
    p->axes = rows::merge(tensors, 6, r);
    p->x = r[0];
    p->dx = r[1];
    p->dz = r[2];
    p->dy = r[3];
    p->dsum = r[4];
    p->z = r[5];
    p->weight = a->weight.data;
    p->rstd = static_cast<const float *>(a->rstd.data);
    p->mean = rows::given(a->mean) ? static_cast<const float *>(a->mean.data) : nullptr;
    p->partials = static_cast<double *>(a->partials.data);
    p->rows = rows::count(a->x);
    const int64_t n = a->x.shape[a->x.ndim - 1];
    AM_CHECK(n <= INT32_MAX, AM_ERR_UNSUPPORTED, "norm: rows of %lld elements, CUDA takes up to %d", (long long)n,
             INT32_MAX);
    AM_CHECK(a->partials.shape[0] <= INT32_MAX, AM_ERR_UNSUPPORTED, "norm: %lld runs, CUDA takes up to %d",
             (long long)a->partials.shape[0], INT32_MAX);
    p->n = static_cast<int>(n);
    p->sums = static_cast<int>(a->partials.shape[1]);
    p->shift = a->kind == AM_NORM_RMS && a->zero_centered ? 1.0f : 0.0f;
    p->weight_bf16 = a->weight.dtype == AM_BF16;
    return AM_OK;
}

am_status backward(const am_norm_grad_args *a, cudaStream_t stream)
{
    Backward p = {};
    AM_TRY(rows_of(a, &p));
    const int runs = static_cast<int>(a->partials.shape[0]);
    const Kind kind = a->kind == AM_NORM_GATED   ? kGated
                      : a->kind == AM_NORM_LAYER ? kLayer
                      : p.dsum.data              ? kRmsSum
                                                 : kRms;
    const bool bf16 = a->x.dtype == AM_BF16;
    if (!fits(p, kind, bf16))
        AM_TRY(backward_plain(p, kind, bf16, runs, stream));
    else if (bf16)
        AM_TRY(launch_by_kind<__nv_bfloat16>(p, kind, runs, stream));
    else
        AM_TRY(launch_by_kind<float>(p, kind, runs, stream));
    void *const dweight = rows::given(a->dweight) ? a->dweight.data : nullptr;
    void *const dbias = rows::given(a->dbias) ? a->dbias.data : nullptr;
    if (dweight == nullptr && dbias == nullptr)
        return AM_OK;
    const dim3 grid(static_cast<unsigned>((p.n + int64_t{kColumns} - 1) / kColumns), static_cast<unsigned>(p.sums));
    norm_total_kernel<<<grid, dim3(kColumns, kParts), 0, stream>>>(
        dweight, dbias, p.partials, runs, p.n, a->dweight.dtype == AM_BF16, a->dbias.dtype == AM_BF16);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

} // namespace

extern "C" am_status am_cuda_norm_backward(const am_norm_grad_args *a, const am_exec *ex)
{
    return on_device(backward, a, ex);
}
