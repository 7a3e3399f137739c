/* loss.cu -- softmax statistics of rows of logits, the loss, and the gradient of logits.
 *
 *   rows_kernel     a warp, 256 or 1,024 threads a row: running maximum and sum of exp(l - maximum), each thread kWords
 *                   words of 16 bytes at a time; threads join in one order, so that bits repeat
 *   grad_kernel     a block kGradThreads * kGradWords words of a row: (exp(l - top) / sum - [v = y]) * dloss / count
 *   total_kernel    one block: the sum over rows in float64, in one order, over the count
 *   targets_kernel  one block: labels as AM_LOSS_... says, and how many there are
 *   join_kernel     a thread a row: statistics of ranks that share the words, in their order
 *   mask_kernel     ignored rows made 0
 *
 * A row may start anywhere: elements before its first and after its last whole word go one by one.
 *
 * Floor, T rows of V: forward reads the logits, 2 T V bytes in bfloat16; backward reads and writes them, 4 T V. At
 * 8,192 x 248,320 and 4.28 TB/s 0.95 and 1.90 ms. Issue is below: some 6 instructions an element forward, 8 backward.
 */
#include "on_device.h"
#include "rows.cuh"

#include <math_constants.h>

extern "C" {
#include "loss.h"
}

namespace
{

constexpr int kThreads = 256, kWords = 4, kGradThreads = 256, kGradWords = 4, kOne = 1024;

struct Stats {
    float top, sum;
};

/* Labels of rows. */
struct Targets {
    const void *data;
    int64_t stride, ignored, vocab;
    bool wide;
};

struct Logits {
    const char *data;
    int64_t stride, n; /* of a row: bytes, elements */
};

/* Where the sum's divisor stands; null: nowhere. */
struct Count {
    const void *data;
    bool wide;
};

__device__ int64_t integer_at(const void *data, bool wide, int64_t at)
{
    return wide ? static_cast<const int64_t *>(data)[at] : static_cast<const int32_t *>(data)[at];
}

__device__ int64_t target_of(const Targets &t, int64_t row)
{
    const int64_t label = integer_at(t.data, t.wide, row * t.stride);
    if (label == t.ignored)
        return AM_LOSS_IGNORED;
    return label >= 0 && label < t.vocab ? label : AM_LOSS_INVALID;
}

/* 1 / count: 0 for 0, NaN for what no count is. */
__device__ double inverse_of(int64_t count)
{
    return count > 0 ? 1.0 / static_cast<double>(count) : count ? CUDART_NAN : 0.0;
}

template <typename T> __device__ float exponential(float x)
{
    if constexpr (sizeof(T) == 4)
        return expf(x);
    return __expf(x);
}

template <typename T> __device__ float element(const char *row, int64_t at)
{
    return rows::to_float(reinterpret_cast<const T *>(row)[at]);
}

/* The elements of a row before its first whole word. */
template <typename T> __device__ int64_t before_words(const char *row, int64_t n)
{
    const int64_t head = static_cast<int64_t>((16 - reinterpret_cast<uintptr_t>(row) % 16) % 16 / sizeof(T));
    return head < n ? head : n;
}

template <typename T> __device__ void join(Stats *s, const Stats &other)
{
    const float top = fmaxf(s->top, other.top);
    if (top != -CUDART_INF_F)
        s->sum = s->sum * exponential<T>(s->top - top) + other.sum * exponential<T>(other.top - top);
    else
        s->sum += other.sum; /* 0, or NaN */
    s->top = top;
}

/* Values of whole words: one maximum, one rescaling. */
template <typename T> __device__ void add_words(Stats *s, const uint4 (&raw)[kWords])
{
    float x[kWords][rows::kPer<T>], top = s->top;
#pragma unroll
    for (int u = 0; u < kWords; u++) {
        rows::unpack<T>(x[u], raw[u]);
#pragma unroll
        for (int i = 0; i < rows::kPer<T>; i++)
            top = fmaxf(top, x[u][i]);
    }
    const float from = top == -CUDART_INF_F ? 0.0f : top;
    float sum = 0.0f;
#pragma unroll
    for (int u = 0; u < kWords; u++) {
        float part = 0.0f;
#pragma unroll
        for (int i = 0; i < rows::kPer<T>; i++)
            part += exponential<T>(x[u][i] - from);
        sum += part;
    }
    s->sum = s->sum * exponential<T>(s->top - from) + sum;
    s->top = top;
}

/* What this thread of the kGroup that a row has makes of it. */
template <typename T, int kGroup> __device__ Stats stats_of(const char *row, int64_t n, int thread)
{
    constexpr uint32_t kLowest = sizeof(T) == 4 ? 0xff800000u : 0xff80ff80u; /* -infinity */
    Stats s = {-CUDART_INF_F, 0.0f};
    const int64_t head = before_words<T>(row, n), words = (n - head) / rows::kPer<T>;
    const int64_t after = head + words * rows::kPer<T>;
    const char *const body = row + head * static_cast<int64_t>(sizeof(T));
    for (int64_t at = thread; at < words; at += kGroup * kWords) {
        uint4 raw[kWords];
#pragma unroll
        for (int u = 0; u < kWords; u++)
            raw[u] = at + u * kGroup < words ? rows::load(body + 16 * (at + u * kGroup))
                                             : make_uint4(kLowest, kLowest, kLowest, kLowest);
        add_words<T>(&s, raw);
    }
    const int64_t single = thread < head ? thread : after + (thread - head);
    if (single < n) {
        const float x = element<T>(row, single);
        join<T>(&s, {x, x == -CUDART_INF_F ? 0.0f : exponential<T>(x - x)});
    }
    return s;
}

template <typename T, int kGroup> __device__ Stats over_group(Stats s)
{
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
        join<T>(&s, {__shfl_xor_sync(~0u, s.top, step), __shfl_xor_sync(~0u, s.sum, step)});
    if constexpr (kGroup > 32) {
        __shared__ Stats of_warp[kGroup / 32];
        if (threadIdx.x % 32 == 0)
            of_warp[threadIdx.x / 32] = s;
        __syncthreads();
        s = of_warp[0];
        for (int warp = 1; warp < kGroup / 32; warp++)
            join<T>(&s, of_warp[warp]);
    }
    return s;
}

struct RowsWork {
    Logits logits;
    Targets targets;
    float *stats; /* maxima; sums `apart` behind; labels' logits as far again where row_loss is null */
    int64_t apart, first, n_rows;
    double *row_loss; /* not null: whole rows, not a chunk that joins */
};

/* Threads of a block whose rows have kGroup threads each. */
template <int kGroup> constexpr int kBlock = kGroup < kThreads ? kThreads : kGroup;

template <typename T, int kGroup>
__global__ void __launch_bounds__(kBlock<kGroup>) rows_kernel(const __grid_constant__ RowsWork w)
{
    const int thread = threadIdx.x % kGroup;
    const int64_t row = int64_t{blockIdx.x} * (kBlock<kGroup> / kGroup) + threadIdx.x / kGroup;
    if (row >= w.n_rows)
        return;
    const int64_t target = target_of(w.targets, row);
    if (target < 0) {
        if (w.row_loss && thread == 0)
            w.row_loss[row] = target == AM_LOSS_IGNORED ? 0.0 : CUDART_NAN;
        return;
    }
    const char *const logits = w.logits.data + row * w.logits.stride;
    Stats s = over_group<T, kGroup>(stats_of<T, kGroup>(logits, w.logits.n, thread));
    if (thread != 0)
        return;
    const int64_t column = target - w.first;
    const bool here = column >= 0 && column < w.logits.n;
    if (w.row_loss) {
        w.row_loss[row] = log(static_cast<double>(s.sum)) + (static_cast<double>(s.top) - element<T>(logits, column));
    } else {
        join<T>(&s, {w.stats[row], w.stats[row + w.apart]});
        if (here)
            w.stats[row + 2 * w.apart] = element<T>(logits, column);
    }
    w.stats[row] = s.top;
    w.stats[row + w.apart] = s.sum;
}

struct GradWork {
    Logits logits;
    char *out;
    int64_t out_stride; /* bytes */
    Targets targets;
    const float *stats, *dloss;
    int64_t apart, first;
    Count count;
    int64_t tiles; /* of a row */
};

/* What an element's gradient is made of. */
struct Slope {
    float top, inverse, scale;
    int64_t column; /* of the label */
};

/* One thread makes the row's; all of them wait for it, their logits under way. */
__device__ Slope slope_of(const GradWork &w, int64_t row, int64_t target, bool ignored)
{
    __shared__ Slope shared;
    if (threadIdx.x == 0) {
        const int64_t count = integer_at(w.count.data, w.count.wide, 0);
        const float scale = ignored || count == 0                    ? 0.0f
                            : target == AM_LOSS_INVALID || count < 0 ? CUDART_NAN_F
                                                                     : *w.dloss / static_cast<float>(count);
        shared = {0.0f, 0.0f, scale, target - w.first};
        if (target >= 0)
            shared = {w.stats[row], 1.0f / w.stats[row + w.apart], scale, target - w.first};
    }
    __syncthreads();
    return shared;
}

template <typename T> __device__ float slope(const Slope &s, float x, int64_t at)
{
    return (exponential<T>(x - s.top) * s.inverse - (at == s.column ? 1.0f : 0.0f)) * s.scale;
}

template <typename T, bool kAlike>
__global__ void __launch_bounds__(kGradThreads) grad_kernel(const __grid_constant__ GradWork w)
{
    constexpr int kPer = rows::kPer<T>;
    const int64_t row = blockIdx.x / w.tiles, tile = blockIdx.x % w.tiles, n = w.logits.n;
    const char *const in = w.logits.data + row * w.logits.stride;
    char *const out = w.out + row * w.out_stride;
    const int64_t target = target_of(w.targets, row);
    const int64_t head = kAlike ? before_words<T>(out, n) : 0, words = kAlike ? (n - head) / kPer : 0;
    const int64_t first = tile * (kGradThreads * kGradWords) + threadIdx.x;
    uint4 raw[kGradWords];
    if (kAlike && target >= 0) {
#pragma unroll
        for (int u = 0; u < kGradWords; u++)
            if (first + u * kGradThreads < words)
                raw[u] = rows::load(in + head * static_cast<int64_t>(sizeof(T)) + 16 * (first + u * kGradThreads));
    }
    const Slope s = slope_of(w, row, target, target == AM_LOSS_IGNORED);
    const float all = s.scale; /* 0 or NaN, where logits do not matter */
    const bool read = target >= 0 && all != 0.0f && all == all;
#pragma unroll
    for (int u = 0; u < kGradWords; u++) {
        const int64_t word = first + u * kGradThreads;
        if (!kAlike || word >= words)
            continue;
        float x[kPer], y[kPer];
        if (read)
            rows::unpack<T>(x, raw[u]);
#pragma unroll
        for (int i = 0; i < kPer; i++)
            y[i] = read ? slope<T>(s, x[i], head + word * kPer + i) : all;
        rows::store(out + head * static_cast<int64_t>(sizeof(T)) + 16 * word, rows::pack<T>(y));
    }
    /* one by one: the ends of a row of words, or this tile of a row that has none */
    const int64_t after = head + words * kPer, per_tile = kGradThreads * kGradWords * kPer;
    const int64_t start =
        kAlike ? (threadIdx.x < head ? threadIdx.x : after + (threadIdx.x - head)) : tile * per_tile + threadIdx.x;
    const int64_t end = kAlike ? (tile == 0 ? n : 0) : (tile + 1) * per_tile < n ? (tile + 1) * per_tile : n;
    for (int64_t at = start; at < end; at += kGradThreads)
        rows::from_float(reinterpret_cast<T *>(out) + at, read ? slope<T>(s, element<T>(in, at), at) : all);
}

/* Sums over a block of kOne threads, in one order. */
template <typename V> __device__ V sum_over_block(V x)
{
    __shared__ V parts[kOne];
    parts[threadIdx.x] = x;
    __syncthreads();
    for (int step = kOne / 2; step > 0; step /= 2) {
        if (threadIdx.x < step)
            parts[threadIdx.x] += parts[threadIdx.x + step];
        __syncthreads();
    }
    return parts[0];
}

__device__ int64_t count_of(const Count &given, const Targets &targets, int64_t n)
{
    if (given.data)
        return integer_at(given.data, given.wide, 0);
    int64_t labels = 0;
    for (int64_t row = threadIdx.x; row < n; row += kOne)
        labels += target_of(targets, row) != AM_LOSS_IGNORED;
    return sum_over_block(labels);
}

struct TotalWork {
    float *loss;
    int64_t *own; /* null: not asked for */
    const double *row_loss;
    const float *stats;
    int64_t apart, n;
    Targets targets;
    Count count;
};

__device__ double loss_of(const TotalWork &w, int64_t row)
{
    if (w.row_loss)
        return w.row_loss[row];
    const int64_t target = target_of(w.targets, row);
    if (target < 0)
        return target == AM_LOSS_IGNORED ? 0.0 : CUDART_NAN;
    return log(static_cast<double>(w.stats[row + w.apart])) +
           (static_cast<double>(w.stats[row]) - w.stats[row + 2 * w.apart]);
}

__global__ void __launch_bounds__(kOne) total_kernel(const __grid_constant__ TotalWork w)
{
    const int64_t count = count_of(w.count, w.targets, w.n);
    double part = 0.0;
    for (int64_t row = threadIdx.x; row < w.n; row += kOne)
        part += loss_of(w, row);
    const double total = sum_over_block(part), inverse = inverse_of(count);
    if (threadIdx.x != 0)
        return;
    *w.loss = inverse == 0.0 ? 0.0f : static_cast<float>(total * inverse);
    if (w.own)
        *w.own = count;
}

__global__ void __launch_bounds__(kOne)
    targets_kernel(int64_t *out, int64_t *own, const __grid_constant__ Targets targets, int64_t n, Count given)
{
    for (int64_t row = threadIdx.x; row < n; row += kOne)
        out[row] = target_of(targets, row);
    const int64_t count = count_of(given, targets, n);
    if (threadIdx.x == 0)
        *own = count;
}

__global__ void __launch_bounds__(kThreads)
    join_kernel(float *stats, int64_t apart, const float *parts, int64_t ranks, int64_t tokens)
{
    const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    if (row >= tokens)
        return;
    Stats s = {-CUDART_INF_F, 0.0f};
    float logit = 0.0f;
    for (int64_t r = 0; r < ranks; r++) {
        const float *const part = parts + 3 * r * tokens + row;
        join<float>(&s, {part[0], part[tokens]});
        logit += part[2 * tokens];
    }
    stats[row] = s.top;
    stats[row + apart] = s.sum;
    stats[row + 2 * apart] = logit;
}

template <typename In, typename Out>
__global__ void mask_kernel(Out *out, const In *in, int64_t stride, int64_t n, const int64_t *targets)
{
    const int64_t row = blockIdx.x;
    const bool ignored = targets[row] == AM_LOSS_IGNORED;
#pragma unroll 4
    for (int64_t at = threadIdx.x; at < n; at += blockDim.x)
        rows::from_float(out + row * n + at, ignored ? 0.0f : rows::to_float(in[row * stride + at]));
}

Targets targets_of(const am_tensor &labels, int64_t ignored, int64_t vocab)
{
    return {labels.data, labels.stride[0], ignored, vocab, labels.dtype == AM_I64};
}

Targets targets_of(const am_tensor &targets) { return targets_of(targets, AM_LOSS_IGNORED, INT64_MAX); }

Count count_of(const am_tensor &t) { return {t.dtype == AM_NONE ? nullptr : t.data, t.dtype == AM_I64}; }

Logits logits_of(const am_tensor &t)
{
    return {static_cast<const char *>(t.data), t.stride[0] * static_cast<int64_t>(am_dtype_size(t.dtype)), t.shape[1]};
}

am_status check_grid(int64_t blocks)
{
    AM_CHECK(blocks < INT64_C(1) << 31, AM_ERR_UNSUPPORTED,
             "cross_entropy: %lld thread blocks, fewer than 2^31 are needed", (long long)blocks);
    return AM_OK;
}

/* Few rows get large blocks, many short ones a warp each. */
template <typename T> am_status launch_rows(RowsWork w, int64_t n_rows, cudaStream_t stream)
{
    int processors = 0;
    AM_TRY(multiprocessors(&processors));
    AM_TRY(check_grid(n_rows));
    w.n_rows = n_rows;
    const unsigned blocks = static_cast<unsigned>(n_rows);
    if (n_rows < 2 * processors && w.logits.n >= 4 * 1024 * rows::kPer<T>)
        rows_kernel<T, 1024><<<blocks, kBlock<1024>, 0, stream>>>(w);
    else if (n_rows < 8 * processors || w.logits.n > 2 * kThreads * kWords * rows::kPer<T>)
        rows_kernel<T, kThreads><<<blocks, kThreads, 0, stream>>>(w);
    else
        rows_kernel<T, 32><<<(blocks + kThreads / 32 - 1) / (kThreads / 32), kBlock<32>, 0, stream>>>(w);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

am_status launch_rows(const RowsWork &w, const am_tensor &logits, cudaStream_t stream)
{
    return logits.dtype == AM_BF16 ? launch_rows<__nv_bfloat16>(w, logits.shape[0], stream)
                                   : launch_rows<float>(w, logits.shape[0], stream);
}

template <typename T> am_status launch_grad(GradWork w, int64_t n_rows, cudaStream_t stream)
{
    constexpr int64_t kTile = int64_t{kGradThreads} * kGradWords * rows::kPer<T>;
    const bool alike = (reinterpret_cast<uintptr_t>(w.out) - reinterpret_cast<uintptr_t>(w.logits.data)) % 16 == 0 &&
                       (w.out_stride - w.logits.stride) % 16 == 0;
    w.tiles = (w.logits.n + kTile - 1) / kTile;
    AM_TRY(check_grid(n_rows * w.tiles));
    const unsigned blocks = static_cast<unsigned>(n_rows * w.tiles);
    if (alike)
        grad_kernel<T, true><<<blocks, kGradThreads, 0, stream>>>(w);
    else
        grad_kernel<T, false><<<blocks, kGradThreads, 0, stream>>>(w);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

am_status launch_grad(GradWork w, const am_tensor &logits, const am_tensor &out, cudaStream_t stream)
{
    w.logits = logits_of(logits);
    w.out = static_cast<char *>(out.data);
    w.out_stride = out.stride[0] * static_cast<int64_t>(am_dtype_size(out.dtype));
    return logits.dtype == AM_BF16 ? launch_grad<__nv_bfloat16>(w, logits.shape[0], stream)
                                   : launch_grad<float>(w, logits.shape[0], stream);
}

am_status plain_forward(const am_cross_entropy_args *a, cudaStream_t stream)
{
    const int64_t n = a->logits.shape[0], vocab = a->logits.shape[1];
    RowsWork w = {};
    w.logits = logits_of(a->logits);
    w.targets = targets_of(a->labels, a->ignore_index, vocab);
    w.stats = static_cast<float *>(a->stats.data);
    w.apart = n;
    w.row_loss = static_cast<double *>(a->row_loss.data);
    if (n > 0)
        AM_TRY(launch_rows(w, a->logits, stream));
    TotalWork total = {};
    total.loss = static_cast<float *>(a->loss.data);
    total.own = a->count.dtype == AM_NONE ? nullptr : static_cast<int64_t *>(a->count.data);
    total.row_loss = w.row_loss;
    total.n = n;
    total.targets = w.targets;
    total.count = count_of(a->num_label_tokens);
    total_kernel<<<1, kOne, 0, stream>>>(total);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

am_status plain_backward(const am_cross_entropy_args *a, cudaStream_t stream)
{
    GradWork w = {};
    w.targets = targets_of(a->labels, a->ignore_index, a->logits.shape[1]);
    w.stats = static_cast<const float *>(a->stats.data);
    w.dloss = static_cast<const float *>(a->dloss.data);
    w.apart = a->logits.shape[0];
    w.count = count_of(a->num_label_tokens);
    return launch_grad(w, a->logits, a->dlogits, stream);
}

am_status targets(const am_lce_rows_args *a, cudaStream_t stream)
{
    targets_kernel<<<1, kOne, 0, stream>>>(
        static_cast<int64_t *>(a->targets.data), static_cast<int64_t *>(a->count.data),
        targets_of(a->labels, a->ignore_index, a->vocab), a->hidden.shape[0], count_of(a->num_label_tokens));
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

am_status chunk(const am_lce_chunk_args *a, cudaStream_t stream)
{
    RowsWork w = {};
    w.logits = logits_of(a->logits);
    w.targets = targets_of(a->targets);
    w.stats = static_cast<float *>(a->stats.data);
    w.apart = a->stats.stride[0];
    w.first = a->first;
    return launch_rows(w, a->logits, stream);
}

am_status join_ranks(const am_lce_join_args *a, cudaStream_t stream)
{
    const int64_t tokens = a->parts.shape[2], blocks = (tokens + kThreads - 1) / kThreads;
    AM_TRY(check_grid(blocks));
    join_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
        static_cast<float *>(a->stats.data), a->stats.stride[0], static_cast<const float *>(a->parts.data),
        a->parts.shape[0], tokens);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

am_status total(const am_lce_chunk_args *a, cudaStream_t stream)
{
    TotalWork w = {};
    w.loss = static_cast<float *>(a->loss.data);
    w.stats = static_cast<const float *>(a->stats.data);
    w.apart = a->stats.stride[0];
    w.n = a->n;
    w.targets = targets_of(a->targets);
    w.count = count_of(a->num_label_tokens);
    total_kernel<<<1, kOne, 0, stream>>>(w);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

am_status gradient(const am_lce_chunk_args *a, cudaStream_t stream)
{
    GradWork w = {};
    w.targets = targets_of(a->targets);
    w.stats = static_cast<const float *>(a->stats.data);
    w.dloss = static_cast<const float *>(a->dloss.data);
    w.apart = a->stats.stride[0];
    w.first = a->first;
    w.count = count_of(a->num_label_tokens);
    return launch_grad(w, a->logits, a->dlogits, stream);
}

template <typename In, typename Out> am_status launch_mask(const am_lce_mask_args *a, cudaStream_t stream)
{
    AM_TRY(check_grid(a->out.shape[0]));
    mask_kernel<In, Out><<<static_cast<unsigned>(a->out.shape[0]), 256, 0, stream>>>(
        static_cast<Out *>(a->out.data), static_cast<const In *>(a->rows.data), a->rows.stride[0], a->out.shape[1],
        static_cast<const int64_t *>(a->targets.data));
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

am_status mask(const am_lce_mask_args *a, cudaStream_t stream)
{
    if (a->out.dtype == AM_F32)
        return launch_mask<float, float>(a, stream);
    return a->rows.dtype == AM_F32 ? launch_mask<float, __nv_bfloat16>(a, stream)
                                   : launch_mask<__nv_bfloat16, __nv_bfloat16>(a, stream);
}

} // namespace

extern "C" {

am_status am_cuda_cross_entropy_forward(const am_cross_entropy_args *a, const am_exec *ex)
{
    return on_device(plain_forward, a, ex);
}

am_status am_cuda_cross_entropy_backward(const am_cross_entropy_args *a, const am_exec *ex)
{
    return on_device(plain_backward, a, ex);
}

am_status am_cuda_lce_targets(const am_lce_rows_args *a, const am_exec *ex) { return on_device(targets, a, ex); }
am_status am_cuda_lce_chunk(const am_lce_chunk_args *a, const am_exec *ex) { return on_device(chunk, a, ex); }
am_status am_cuda_lce_join(const am_lce_join_args *a, const am_exec *ex) { return on_device(join_ranks, a, ex); }
am_status am_cuda_lce_loss(const am_lce_chunk_args *a, const am_exec *ex) { return on_device(total, a, ex); }
am_status am_cuda_lce_grad(const am_lce_chunk_args *a, const am_exec *ex) { return on_device(gradient, a, ex); }
am_status am_cuda_lce_mask(const am_lce_mask_args *a, const am_exec *ex) { return on_device(mask, a, ex); }

} // extern "C"
