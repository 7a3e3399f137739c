/* clip.cu -- sum of squares and scaling of a list of gradients.
 *
 * As in adam.cu the table of tensors is a kernel parameter. The sum: block b of every launch adds its chunks of that
 * launch's elements to parts[b] in float64, in one order whatever the timing; a last block adds the parts. Elements are
 * read in words of 16 bytes, kUnroll of them under way a thread; those before a tensor's first whole word of a part and
 * after its last go one by one.
 *
 * Floor: 4 bytes an element for the sum, 8 for scaling (float32), over the read and copy rates of the memory.
 */
#include "on_device.h"
#include "rows.cuh"

extern "C" {
#include "clip.h"
}

namespace
{

constexpr int kThreads = 256, kUnroll = 4;
constexpr int64_t kTile = 8192; /* elements that a scaling block takes at a time */
constexpr int kChunk = 16384;   /* of the sum: block b takes chunks b, b + AM_SUMSQ_PARTS, .. of a launch's line */
constexpr int kTensors = 1024;

struct Row {
    void *data;
    int64_t begin; /* of this tensor in the launch's line */
    bool bf16;
};

struct Table {
    Row rows[kTensors];
    int64_t total;
    int n_rows;
};
static_assert(sizeof(Table) <= 32000, "the table and the scalars fit in the 32,764 bytes of kernel parameters");

__device__ int row_at(const Table &t, int64_t at)
{
    int low = 0, high = t.n_rows - 1;
    while (low < high) {
        const int middle = low + (high - low + 1) / 2;
        if (t.rows[middle].begin <= at)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

__device__ int64_t end_of(const Table &t, int row) { return row + 1 < t.n_rows ? t.rows[row + 1].begin : t.total; }

/* Elements first, .. last of a tensor as words of 16 bytes and the single ones around them. */
template <typename T> struct Span {
    static constexpr int kPer = rows::kPer<T>;
    T *data;
    int64_t head, words, tail; /* single elements, whole words, single elements */

    __device__ Span(const Row &row, int64_t first, int64_t last) : data(static_cast<T *>(row.data) + first)
    {
        const int64_t n = last - first;
        const int64_t before = static_cast<int64_t>((16 - reinterpret_cast<uintptr_t>(data) % 16) % 16 / sizeof(T));
        head = before < n ? before : n;
        words = (n - head) / kPer;
        tail = n - head - words * kPer;
    }

    __device__ char *word(int64_t at) const { return reinterpret_cast<char *>(data + head) + 16 * at; }
    /* the single element of this thread, or null */
    __device__ T *single() const
    {
        const int thread = static_cast<int>(threadIdx.x);
        if (thread < head)
            return data + thread;
        return thread - head < tail ? data + words * kPer + thread : nullptr;
    }
};

template <typename T> __device__ double sum_of_squares(const Row &row, int64_t first, int64_t last)
{
    const Span<T> span(row, first, last);
    double sum = 0.0;
    for (int64_t at = threadIdx.x; at < span.words; at += kThreads * kUnroll) {
        uint4 raw[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; u++)
            raw[u] = at + u * kThreads < span.words ? rows::load(span.word(at + u * kThreads)) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int u = 0; u < kUnroll; u++) {
            float x[rows::kPer<T>];
            rows::unpack<T>(x, raw[u]);
#pragma unroll
            for (int i = 0; i < rows::kPer<T>; i++)
                sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
        }
    }
    if (const T *const one = span.single()) {
        const double x = static_cast<double>(rows::to_float(*one));
        sum += x * x;
    }
    return sum;
}

template <typename T> __device__ void scale_elements(const Row &row, int64_t first, int64_t last, double factor)
{
    const Span<T> span(row, first, last);
    for (int64_t at = threadIdx.x; at < span.words; at += kThreads * kUnroll) {
        uint4 raw[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; u++)
            if (at + u * kThreads < span.words)
                raw[u] = rows::load(span.word(at + u * kThreads));
#pragma unroll
        for (int u = 0; u < kUnroll; u++) {
            if (at + u * kThreads >= span.words)
                continue;
            float x[rows::kPer<T>];
            rows::unpack<T>(x, raw[u]);
#pragma unroll
            for (int i = 0; i < rows::kPer<T>; i++)
                x[i] = static_cast<float>(static_cast<double>(x[i]) * factor);
            rows::store(span.word(at + u * kThreads), rows::pack<T>(x));
        }
    }
    if (T *const one = span.single())
        rows::from_float(one, static_cast<float>(static_cast<double>(rows::to_float(*one)) * factor));
}

__device__ double block_sum(double mine)
{
    __shared__ double all[kThreads];
    all[threadIdx.x] = mine;
    for (int half = kThreads / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half)
            all[threadIdx.x] += all[threadIdx.x + half];
    }
    return threadIdx.x == 0 ? all[0] : 0.0; /* thread 0 wrote it last; nobody else looks */
}

__global__ void __launch_bounds__(kThreads)
    clip_sumsq_part_kernel(const __grid_constant__ Table t, double *parts, bool first)
{
    double sum = 0.0;
    for (int64_t chunk = blockIdx.x; chunk * kChunk < t.total; chunk += AM_SUMSQ_PARTS) {
        const int64_t end = t.total - chunk * kChunk > kChunk ? (chunk + 1) * kChunk : t.total;
        for (int64_t at = chunk * kChunk; at < end;) {
            const int row = row_at(t, at);
            const Row &r = t.rows[row];
            const int64_t stop = end_of(t, row) < end ? end_of(t, row) : end;
            sum += r.bf16 ? sum_of_squares<__nv_bfloat16>(r, at - r.begin, stop - r.begin)
                          : sum_of_squares<float>(r, at - r.begin, stop - r.begin);
            at = stop;
        }
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0)
        parts[blockIdx.x] = first ? sum : parts[blockIdx.x] + sum;
}

__global__ void __launch_bounds__(kThreads) clip_sumsq_total_kernel(const double *parts, double *sumsq)
{
    double sum = 0.0;
    for (int i = threadIdx.x; i < AM_SUMSQ_PARTS; i += kThreads)
        sum += parts[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0)
        *sumsq = sum;
}

__global__ void __launch_bounds__(kThreads) clip_scale_kernel(const __grid_constant__ Table t, const double *factor)
{
    const double f = *factor;
    if (f == 1.0)
        return;
    for (int64_t begin = blockIdx.x * kTile; begin < t.total; begin += gridDim.x * kTile) {
        const int64_t end = t.total - begin > kTile ? begin + kTile : t.total;
        for (int64_t at = begin; at < end;) {
            const int row = row_at(t, at);
            const Row &r = t.rows[row];
            const int64_t stop = end_of(t, row) < end ? end_of(t, row) : end;
            if (r.bf16)
                scale_elements<__nv_bfloat16>(r, at - r.begin, stop - r.begin, f);
            else
                scale_elements<float>(r, at - r.begin, stop - r.begin, f);
            at = stop;
        }
    }
}

/* Fills the table with tensors from *at on, as many as fit, and moves *at past them. */
void fill(Table &t, const am_tensor_list &list, int64_t *at)
{
    t.n_rows = 0;
    t.total = 0;
    for (; *at < list.n && t.n_rows < kTensors; ++*at) {
        const am_tensor &x = list.items[*at];
        t.rows[t.n_rows].data = x.data;
        t.rows[t.n_rows].begin = t.total;
        t.rows[t.n_rows++].bf16 = x.dtype == AM_BF16;
        t.total += am_numel(&x);
    }
}

am_status sumsq(const am_grad_sumsq_args *a, cudaStream_t stream)
{
    double *const parts = static_cast<double *>(a->parts.data);
    Table t;
    int64_t at = 0;
    bool first = true;
    do { /* an empty list still writes its zeros */
        fill(t, a->grads, &at);
        clip_sumsq_part_kernel<<<AM_SUMSQ_PARTS, kThreads, 0, stream>>>(t, parts, first);
        AM_CUDA_LAUNCHED();
        first = false;
    } while (at < a->grads.n);
    clip_sumsq_total_kernel<<<1, kThreads, 0, stream>>>(parts, static_cast<double *>(a->sumsq.data));
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

am_status scale(const am_scale_args *a, cudaStream_t stream)
{
    Table t;
    int processors = 0;
    AM_TRY(multiprocessors(&processors));
    for (int64_t at = 0; at < a->tensors.n;) {
        fill(t, a->tensors, &at);
        const int64_t tiles = (t.total + kTile - 1) / kTile, most = 8 * processors; /* few, for most factors are 1 */
        if (tiles == 0)
            continue;
        clip_scale_kernel<<<static_cast<unsigned>(tiles < most ? tiles : most), kThreads, 0, stream>>>(
            t, static_cast<const double *>(a->factor.data));
        AM_CUDA_LAUNCHED();
    }
    return AM_OK;
}

} // namespace

extern "C" am_status am_cuda_grad_sumsq(const am_grad_sumsq_args *a, const am_exec *ex)
{
    return on_device(sumsq, a, ex);
}

extern "C" am_status am_cuda_scale(const am_scale_args *a, const am_exec *ex) { return on_device(scale, a, ex); }
