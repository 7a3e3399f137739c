/* gate.cu -- log decay and write strength of a gated delta net layer. Forward and backward.
 *
 * Forward: thread = kPer neighbouring heads of one row. Backward: block = one run of the sums and up to kThreads * kPer
 * heads, as many rows at a time as it has threads for; float64 sums a thread, then of the block's rows in their order,
 * then of the runs by a second kernel: one order, same bits.
 *
 * g is float32 whatever a is, so its exponential and logarithm are the exact ones; what is rounded to bfloat16 takes
 * fast ones, whose error is far below the rounding.
 *
 * Floor: a and b (dg, dbeta) read, g and beta (da and db) written once over the copy rate of the memory.
 */
#include "on_device.h"
#include "rows.cuh"

extern "C" {
#include "gate.h"
}

namespace
{

constexpr int kThreads = 256;
constexpr int64_t kMost = 1u << 30; /* words of a launch */

struct Matrix {
    char *data;
    int64_t stride; /* bytes */
};

struct Call {
    Matrix a, b, dg, dbeta, first, second; /* first, second: g and beta, or da and db */
    const float *A_log, *dt_bias;
    double *partials;
    int64_t first_row, rows, runs;
    uint32_t words;    /* forward: of this launch */
    rows::Divisor row; /* words of a row */
    int heads, tiles;
};

/* kPer elements: 16, 8, 4 or 2 bytes at once. */
template <typename T, int kPer> struct alignas(kPer * sizeof(T)) Word {
    T part[kPer];
};

template <typename T, int kPer> __device__ void read(float (&to)[kPer], const Matrix &m, int64_t row, int column)
{
    const Word<T, kPer> word = *reinterpret_cast<const Word<T, kPer> *>(m.data + row * m.stride + column * sizeof(T));
#pragma unroll
    for (int i = 0; i < kPer; i++)
        to[i] = rows::to_float(word.part[i]);
}

template <typename T, int kPer>
__device__ void write(const Matrix &m, int64_t row, int column, const float (&from)[kPer])
{
    Word<T, kPer> word;
#pragma unroll
    for (int i = 0; i < kPer; i++)
        rows::from_float(&word.part[i], from[i]);
    *reinterpret_cast<Word<T, kPer> *>(m.data + row * m.stride + column * sizeof(T)) = word;
}

template <typename T> __device__ float quotient(float a, float b) { return sizeof(T) == 4 ? a / b : __fdividef(a, b); }

/* softplus(s) = max(s, 0) + log(1 + e^-|s|), right to the last bits at both ends; its derivative goes into a T. */
template <typename T> __device__ float softplus(float s, float *slope)
{
    const float t = expf(s < 0.0f ? s : -s);
    *slope = quotient<T>(s < 0.0f ? t : 1.0f, 1.0f + t);
    return (s > 0.0f ? s : 0.0f) + log1pf(t);
}

template <typename T> __device__ float logistic(float x)
{
    const float t = sizeof(T) == 4 ? expf(x < 0.0f ? x : -x) : __expf(x < 0.0f ? x : -x);
    return quotient<T>(x < 0.0f ? t : 1.0f, 1.0f + t);
}

template <typename TA, typename TB, int kPer>
__global__ void __launch_bounds__(kThreads) gate_forward_kernel(const __grid_constant__ Call p)
{
    const uint32_t word = blockIdx.x * kThreads + threadIdx.x;
    if (word >= p.words)
        return;
    const uint32_t down = rows::divide(word, p.row);
    const int64_t row = p.first_row + down;
    const int column = static_cast<int>(word - down * p.row.by) * kPer;
    float a[kPer], b[kPer];
    read<TA>(a, p.a, row, column);
    read<TB>(b, p.b, row, column);
#pragma unroll
    for (int i = 0; i < kPer; i++) {
        float unused;
        a[i] = -expf(__ldg(p.A_log + column + i)) * softplus<TA>(a[i] + __ldg(p.dt_bias + column + i), &unused);
        b[i] = logistic<TB>(b[i]);
    }
    write<float>(p.first, row, column, a);
    write<TB>(p.second, row, column, b);
}

/* One row's da and db; its parts of the sums are added. */
template <typename TA, typename TB, int kPer>
__device__ void row_gradient(const Call &p, int64_t row, int column, const float (&decay)[kPer],
                             const float (&shift)[kPer], double (&sums)[2][kPer])
{
    float a[kPer], b[kPer], dg[kPer], dbeta[kPer];
    read<TA>(a, p.a, row, column);
    read<TB>(b, p.b, row, column);
    read<float>(dg, p.dg, row, column);
    read<TB>(dbeta, p.dbeta, row, column);
#pragma unroll
    for (int i = 0; i < kPer; i++) {
        float slope;
        const float scaled = decay[i] * dg[i], soft = softplus<TA>(a[i] + shift[i], &slope), beta = logistic<TB>(b[i]);
        const bool real = dg[i] != 0.0f; /* padding's gradients arrive as 0 and it may hold NaN */
        a[i] = real ? scaled * slope : 0.0f;
        sums[0][i] += static_cast<double>(real ? scaled * soft : 0.0f);
        sums[1][i] += static_cast<double>(a[i]);
        b[i] = dbeta[i] == 0.0f ? 0.0f : dbeta[i] * beta * (1.0f - beta);
    }
    write<TA>(p.first, row, column, a);
    write<TB>(p.second, row, column, b);
}

template <typename TA, typename TB, int kPer>
__global__ void __launch_bounds__(kThreads) gate_backward_kernel(const __grid_constant__ Call p)
{
    __shared__ double all[2][kPer][kThreads];
    const int64_t run = blockIdx.x / p.tiles, from = run * p.rows / p.runs, stop = (run + 1) * p.rows / p.runs;
    const int words = p.heads / kPer, first = static_cast<int>(blockIdx.x % p.tiles) * kThreads;
    const int lanes = words - first < kThreads ? words - first : kThreads, groups = kThreads / lanes;
    const int lane = static_cast<int>(threadIdx.x) % lanes, group = static_cast<int>(threadIdx.x) / lanes;
    const int column = (first + lane) * kPer;
    double sums[2][kPer] = {};
    if (group < groups) {
        float decay[kPer], shift[kPer];
#pragma unroll
        for (int i = 0; i < kPer; i++) {
            decay[i] = -expf(__ldg(p.A_log + column + i));
            shift[i] = __ldg(p.dt_bias + column + i);
        }
#pragma unroll 2
        for (int64_t row = from + group; row < stop; row += groups)
            row_gradient<TA, TB, kPer>(p, row, column, decay, shift, sums);
    }
#pragma unroll
    for (int s = 0; s < 2; s++)
#pragma unroll
        for (int i = 0; i < kPer; i++)
            all[s][i][threadIdx.x] = sums[s][i];
    __syncthreads();
    if (group != 0)
        return;
#pragma unroll
    for (int s = 0; s < 2; s++)
#pragma unroll
        for (int i = 0; i < kPer; i++) {
            double total = all[s][i][lane];
            for (int g = 1; g < groups; g++)
                total += all[s][i][g * lanes + lane];
            p.partials[(run * 2 + s) * p.heads + column + i] = total;
        }
}

constexpr int kColumns = 32, kParts = 32;

/* Column x of a block adds every kParts-th run in y's order, then the parts one after another. */
__global__ void __launch_bounds__(kColumns *kParts)
    gate_total_kernel(float *dA_log, float *ddt_bias, const double *partials, int64_t runs, int heads)
{
    __shared__ double part[kParts][kColumns + 1];
    const int column = blockIdx.x * kColumns + threadIdx.x;
    double total = 0.0;
    if (column < heads)
        for (int64_t run = threadIdx.y; run < runs; run += kParts)
            total += partials[(run * 2 + blockIdx.y) * heads + column];
    part[threadIdx.y][threadIdx.x] = total;
    __syncthreads();
    if (threadIdx.y != 0 || column >= heads)
        return;
    for (int y = 1; y < kParts; y++)
        total += part[y][threadIdx.x];
    (blockIdx.y == 0 ? dA_log : ddt_bias)[column] = static_cast<float>(total);
}

template <typename TA, typename TB, int kPer> am_status launch_forward(Call p, cudaStream_t stream)
{
    const int64_t row_words = p.heads / kPer, most = kMost / row_words;
    p.row = rows::divisor(static_cast<uint32_t>(row_words));
    for (int64_t left = p.rows; left > 0; left -= most, p.first_row += most) {
        p.words = static_cast<uint32_t>((left < most ? left : most) * row_words);
        gate_forward_kernel<TA, TB, kPer><<<(p.words + kThreads - 1) / kThreads, kThreads, 0, stream>>>(p);
        AM_CUDA_LAUNCHED();
    }
    return AM_OK;
}

template <typename TA, typename TB, int kPer> am_status launch_backward(Call p, cudaStream_t stream)
{
    p.tiles = (p.heads / kPer + kThreads - 1) / kThreads;
    const int64_t blocks = p.runs * p.tiles;
    AM_CHECK(blocks <= INT32_MAX, AM_ERR_UNSUPPORTED, "gdn_gate: %lld blocks, CUDA takes up to %d", (long long)blocks,
             INT32_MAX);
    gate_backward_kernel<TA, TB, kPer><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

/* Four heads of every row lie on words of their size. */
bool on_words(const am_gate_args *a)
{
    bool fine = a->a.shape[1] % 4 == 0;
    for (const am_tensor *t : {&a->g, &a->beta, &a->da, &a->db, &a->dg, &a->dbeta, &a->a, &a->b}) {
        const int64_t size = static_cast<int64_t>(am_dtype_size(t->dtype));
        if (rows::given(*t))
            fine = fine && reinterpret_cast<uintptr_t>(t->data) % (4 * size) == 0 &&
                   (t->shape[0] <= 1 || t->stride[0] % 4 == 0);
    }
    return fine;
}

template <typename TA, typename TB> am_status launch(const am_gate_args *a, const Call &p, cudaStream_t stream)
{
    if (a->backward)
        return on_words(a) ? launch_backward<TA, TB, 4>(p, stream) : launch_backward<TA, TB, 1>(p, stream);
    return on_words(a) ? launch_forward<TA, TB, 4>(p, stream) : launch_forward<TA, TB, 1>(p, stream);
}

template <typename TA> am_status launch_by_b(const am_gate_args *a, const Call &p, cudaStream_t stream)
{
    return a->b.dtype == AM_BF16 ? launch<TA, __nv_bfloat16>(a, p, stream) : launch<TA, float>(a, p, stream);
}

Matrix matrix(const am_tensor &t)
{
    if (!rows::given(t))
        return {};
    return {static_cast<char *>(t.data), t.stride[0] * static_cast<int64_t>(am_dtype_size(t.dtype))};
}

am_status run(const am_gate_args *a, cudaStream_t stream)
{
    Call p = {};
    AM_CHECK(a->a.shape[1] <= kMost, AM_ERR_UNSUPPORTED, "gdn_gate: %lld heads, CUDA takes up to %lld",
             (long long)a->a.shape[1], (long long)kMost);
    p.a = matrix(a->a);
    p.b = matrix(a->b);
    p.dg = matrix(a->dg);
    p.dbeta = matrix(a->dbeta);
    p.first = matrix(a->backward ? a->da : a->g);
    p.second = matrix(a->backward ? a->db : a->beta);
    p.A_log = static_cast<const float *>(a->A_log.data);
    p.dt_bias = static_cast<const float *>(a->dt_bias.data);
    p.rows = a->a.shape[0];
    p.heads = static_cast<int>(a->a.shape[1]);
    if (a->backward) {
        p.partials = static_cast<double *>(a->partials.data);
        p.runs = a->partials.shape[0];
    }
    AM_TRY(a->a.dtype == AM_BF16 ? launch_by_b<__nv_bfloat16>(a, p, stream) : launch_by_b<float>(a, p, stream));
    if (!a->backward)
        return AM_OK;
    const dim3 grid(static_cast<unsigned>((p.heads + int64_t{kColumns} - 1) / kColumns), 2);
    gate_total_kernel<<<grid, dim3(kColumns, kParts), 0, stream>>>(
        static_cast<float *>(a->dA_log.data), static_cast<float *>(a->ddt_bias.data), p.partials, p.runs, p.heads);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

} // namespace

/* Of at least one head. */
extern "C" am_status am_cuda_gdn_gate(const am_gate_args *a, const am_exec *ex) { return on_device(run, a, ex); }
