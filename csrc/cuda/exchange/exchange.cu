/* exchange.cu -- rows copied and summed by a plan that lies on the device.
 *
 *   copy   out[to + i] = x[from + i]: the row's move is looked up by bisection in the table of all moves
 *   sum    out[r] = sum of the rows that the index names for r, in that order, in float32 (float64 for float64)
 *
 * A group of 1 to 256 threads takes one row, words of 16 bytes where all rows start on them (of fewer where not), four
 * words of a copy in flight. A row's answer does not depend on the launch.
 *
 * Floor: bytes alone. A copy reads and writes each row once; a sum reads each source and writes each row once, and both
 * read 8 to 56 bytes a row of the plan, mostly out of the cache: 4.3 TB/s of what is read and written.
 */
#include "on_device.h"

#include <cuda_bf16.h>

extern "C" {
#include "exchange_moves.h"
}

namespace
{

constexpr int kThreads = 256, kInFlight = 4;
constexpr int64_t kBlocks = 1 << 24;

/* Rows of a tensor: `step` words from one to the next. */
struct Rows {
    char *data;
    int64_t step, rows; /* bytes; how many */
};

struct Copy {
    Rows out, x;
    const int64_t *table;
    int64_t entries, rows, words;
    int log_lanes;
};

struct Sum {
    Rows out, x, own;
    const int64_t *index;
    int64_t numbers, words;
    int log_lanes;
};

Rows rows_of(const am_tensor &t)
{
    return {static_cast<char *>(t.data), t.stride[0] * static_cast<int64_t>(am_dtype_size(t.dtype)), t.shape[0]};
}

/* The largest power of two up to 16 that divides the bytes of a row and where rows start. */
int word_of(int64_t bytes, const Rows *const *rows, int n)
{
    int word = 16;
    for (int i = 0; i < n; i++)
        while (bytes % word || rows[i]->step % word || reinterpret_cast<uintptr_t>(rows[i]->data) % word)
            word /= 2;
    return word;
}

/* log2 of the threads of a row, each with `each` of its words where there are so many. */
int lanes_of(int64_t words, int each)
{
    int log = 0;
    while (log < 8 && (static_cast<int64_t>(each) << log) < words)
        log++;
    return log;
}

unsigned blocks_of(int64_t rows, int log_lanes)
{
    const int64_t blocks = (rows + (kThreads >> log_lanes) - 1) / (kThreads >> log_lanes);
    return static_cast<unsigned>(blocks < kBlocks ? blocks : kBlocks);
}

__device__ int64_t first_row(int log_lanes)
{
    return (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) >> log_lanes;
}

__device__ int64_t rows_a_launch(int log_lanes) { return (static_cast<int64_t>(gridDim.x) * kThreads) >> log_lanes; }

template <typename Word> __global__ void __launch_bounds__(kThreads) exchange_copy_kernel(const Copy c)
{
    const int lanes = 1 << c.log_lanes, lane = static_cast<int>(threadIdx.x) & (lanes - 1);
    for (int64_t row = first_row(c.log_lanes); row < c.rows; row += rows_a_launch(c.log_lanes)) {
        int64_t low = 0, high = c.entries - 1; /* the last entry has no rows */
        while (high - low > 1) {
            const int64_t middle = (low + high) / 2;
            if (__ldg(c.table + AM_EXCHANGE_ENTRY * middle) <= row)
                low = middle;
            else
                high = middle;
        }
        const int64_t *const e = c.table + AM_EXCHANGE_ENTRY * low;
        const int64_t at = row - __ldg(e), rows = __ldg(e + 3), run = at < rows ? 0 : at / rows, i = at - run * rows;
        const int64_t from = __ldg(e + 1) + run * __ldg(e + 5) + i, to = __ldg(e + 2) + run * __ldg(e + 6) + i;
        if (from < 0 || from >= c.x.rows || to < 0 || to >= c.out.rows)
            continue;
        const Word *const in = reinterpret_cast<const Word *>(c.x.data + from * c.x.step);
        Word *const out = reinterpret_cast<Word *>(c.out.data + to * c.out.step);
        for (int64_t word = lane; word < c.words; word += kInFlight * lanes) {
            Word some[kInFlight];
#pragma unroll
            for (int n = 0; n < kInFlight; n++)
                if (word + n * lanes < c.words)
                    some[n] = in[word + n * lanes];
#pragma unroll
            for (int n = 0; n < kInFlight; n++)
                if (word + n * lanes < c.words)
                    out[word + n * lanes] = some[n];
        }
    }
}

struct F32 {
    using Stored = float;
    using Summed = float;
    static __device__ float load(float x) { return x; }
    static __device__ float store(float x) { return x; }
    static __device__ float add(float x, float y) { return __fadd_rn(x, y); }
};

struct F64 {
    using Stored = double;
    using Summed = double;
    static __device__ double load(double x) { return x; }
    static __device__ double store(double x) { return x; }
    static __device__ double add(double x, double y) { return __dadd_rn(x, y); }
};

/* As am_bf16.h: a NaN keeps its upper bits. */
struct Bf16 {
    using Stored = uint16_t;
    using Summed = float;
    static __device__ float load(uint16_t x) { return __uint_as_float(static_cast<uint32_t>(x) << 16); }
    static __device__ uint16_t store(float x)
    {
        const uint32_t bits = __float_as_uint(x);
        const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16, quiet = (bits >> 16) | 0x40u;
        return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
    }
    static __device__ float add(float x, float y) { return __fadd_rn(x, y); }
};

template <typename T, int N> struct alignas(sizeof(T) * N) Word {
    T at[N];
};

template <typename Type, int N> __global__ void __launch_bounds__(kThreads) exchange_sum_kernel(const Sum s)
{
    using Packed = Word<typename Type::Stored, N>;
    const int lanes = 1 << s.log_lanes, lane = static_cast<int>(threadIdx.x) & (lanes - 1);
    for (int64_t row = first_row(s.log_lanes); row < s.out.rows; row += rows_a_launch(s.log_lanes)) {
        const int64_t begin = max(__ldg(s.index + row), static_cast<int64_t>(0));
        const int64_t end = min(__ldg(s.index + row + 1), s.numbers);
        for (int64_t word = lane; word < s.words; word += lanes) {
            typename Type::Summed sum[N] = {};
            bool started = false;
            for (int64_t n = begin; n < end; n++) {
                const int64_t source = __ldg(s.index + n);
                const bool own = source < 0;
                const int64_t from = own ? -1 - source : source;
                if (from >= (own ? s.own.rows : s.x.rows))
                    continue;
                const char *const x = (own ? s.own.data : s.x.data) + from * (own ? s.own.step : s.x.step);
                const Packed in = reinterpret_cast<const Packed *>(x)[word];
#pragma unroll
                for (int i = 0; i < N; i++)
                    sum[i] = started ? Type::add(sum[i], Type::load(in.at[i])) : Type::load(in.at[i]);
                started = true;
            }
            Packed made;
#pragma unroll
            for (int i = 0; i < N; i++)
                made.at[i] = Type::store(sum[i]);
            reinterpret_cast<Packed *>(s.out.data + row * s.out.step)[word] = made;
        }
    }
}

am_status copy_by(const am_exchange_by_args *a, cudaStream_t stream)
{
    const int64_t bytes = am_exchange_width(&a->out) * static_cast<int64_t>(am_dtype_size(a->out.dtype));
    Copy c = {
        rows_of(a->out), rows_of(a->x), static_cast<const int64_t *>(a->table.data), a->table.shape[0], a->rows, 0, 0};
    const Rows *const all[] = {&c.out, &c.x};
    const int word = word_of(bytes, all, 2);
    c.words = bytes / word;
    c.log_lanes = lanes_of(c.words, kInFlight);
    const unsigned blocks = blocks_of(c.rows, c.log_lanes);
    switch (word) {
    case 16: exchange_copy_kernel<uint4><<<blocks, kThreads, 0, stream>>>(c); break;
    case 8: exchange_copy_kernel<uint2><<<blocks, kThreads, 0, stream>>>(c); break;
    case 4: exchange_copy_kernel<uint32_t><<<blocks, kThreads, 0, stream>>>(c); break;
    case 2: exchange_copy_kernel<uint16_t><<<blocks, kThreads, 0, stream>>>(c); break;
    default: exchange_copy_kernel<uint8_t><<<blocks, kThreads, 0, stream>>>(c);
    }
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

template <typename Type> am_status sum_as(Sum s, int64_t width, cudaStream_t stream)
{
    constexpr int kSize = static_cast<int>(sizeof(typename Type::Stored)), kPer = 16 / kSize;
    const Rows *const all[] = {&s.out, &s.x, &s.own};
    const bool wide = word_of(width * kSize, all, 3) == 16;
    s.words = wide ? width / kPer : width;
    s.log_lanes = lanes_of(s.words, 1);
    const unsigned blocks = blocks_of(s.out.rows, s.log_lanes);
    if (wide)
        exchange_sum_kernel<Type, kPer><<<blocks, kThreads, 0, stream>>>(s);
    else
        exchange_sum_kernel<Type, 1><<<blocks, kThreads, 0, stream>>>(s);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

am_status sum_by(const am_exchange_by_args *a, cudaStream_t stream)
{
    const int64_t width = am_exchange_width(&a->out);
    const Sum s = {rows_of(a->out),
                   rows_of(a->x),
                   rows_of(a->own),
                   static_cast<const int64_t *>(a->table.data),
                   a->table.shape[0],
                   0,
                   0};
    switch (a->out.dtype) {
    case AM_F32: return sum_as<F32>(s, width, stream);
    case AM_BF16: return sum_as<Bf16>(s, width, stream);
    default: return sum_as<F64>(s, width, stream);
    }
}

} // namespace

extern "C" am_status am_cuda_exchange_copy_by(const am_exchange_by_args *a, const am_exec *ex)
{
    return on_device(copy_by, a, ex);
}

extern "C" am_status am_cuda_exchange_sum_by(const am_exchange_by_args *a, const am_exec *ex)
{
    return on_device(sum_by, a, ex);
}
