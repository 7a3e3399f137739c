/* adam.cu -- AdamW over a list of tensors.
 *
 * The table of tensors travels as a kernel parameter (at most 32,764 bytes): no scratch, no copy, and a captured
 * graph holds it. A launch takes up to kTensors tensors of one parameter group and one Kind (the dtypes of parameter,
 * gradient, moments and master), each block one tile of one tensor, which it finds by binary search over the tiles
 * before it. Steps are counted by a kernel of their own first, so that every block of a tensor reads the same t.
 *
 *   a thread takes kVec neighbouring elements of every tensor (16 bytes of float32, 8 of bfloat16), kUnroll groups a
 *   turn: loads of a turn go out together, before the block waits for the coefficients that one thread makes in
 *   float64. A tensor that does not start on 16 bytes everywhere goes element by element, as many in flight.
 *
 * Floor, bytes an element over the copy rate of the memory: 28 (float32 state and gradient; bfloat16 parameter and
 * gradient with float32 master and moments), 26 with a 16-bit remainder. At 4.28 TB/s and 10^9 elements 6.5, 6.1 ms.
 */
#include "cuda_check.h"

#include <math.h>
#include <stdint.h>

#include <initializer_list>
#include <type_traits>
#include <utility>

#include <cuda_bf16.h>

extern "C" {
#include "adam.h"
}

namespace
{

constexpr int kThreads = 256, kVec = 4, kUnroll = 2;
constexpr int kTile = kThreads * kVec * kUnroll * 4; /* elements of a block */
constexpr int kTensors = 448;

enum class Master { kNone, kF32, kRemainder };

/* What a tensor's memory holds; a launch has one. */
struct Kind {
    bool param_bf16, grad_bf16, moment_bf16;
    Master master;

    constexpr int number() const
    {
        return (param_bf16 ? 1 : 0) + (grad_bf16 ? 2 : 0) + (moment_bf16 ? 4 : 0) + 8 * static_cast<int>(master);
    }
};
constexpr int kKinds = 24;

constexpr Kind kind_of(int number)
{
    return {(number & 1) != 0, (number & 2) != 0, (number & 4) != 0, static_cast<Master>(number / 8)};
}

struct Row {
    void *p, *m, *v, *w;
    const void *g;
    void *step;
    int64_t n;
    uint32_t first_tile; /* of this tensor in the launch */
    bool step_i64, aligned;
};

struct Table {
    Row rows[kTensors];
    int n_rows;
};
static_assert(sizeof(Table) <= 32000, "the table and the scalars fit in the 32,764 bytes of kernel parameters");

struct Scalars {
    double lr, beta1, beta2, eps, weight_decay;
    const float *lr_tensor, *found_inf, *grad_scale; /* null: not given */
};

__device__ bool skipped(const Scalars &s) { return s.found_inf != nullptr && *s.found_inf != 0.0f; }

__global__ void __launch_bounds__(kThreads)
    adam_step_count_kernel(const __grid_constant__ Table t, const __grid_constant__ Scalars s)
{
    if (skipped(s))
        return;
    for (int i = threadIdx.x; i < t.n_rows; i += kThreads) {
        if (t.rows[i].step_i64)
            ++*static_cast<int64_t *>(t.rows[i].step);
        else
            *static_cast<float *>(t.rows[i].step) += 1.0f;
    }
}

struct Coef {
    float b1, one_minus_b1, b2, one_minus_b2, step_size, inv_sqrt_bc2, eps, decay, inv_scale;
};

__device__ Coef coef_of(const Scalars &s, const Row &row)
{
    const double t = row.step_i64 ? static_cast<double>(*static_cast<const int64_t *>(row.step))
                                  : static_cast<double>(*static_cast<const float *>(row.step));
    const double lr = s.lr_tensor ? static_cast<double>(*s.lr_tensor) : s.lr;
    const double scale = s.grad_scale ? static_cast<double>(*s.grad_scale) : 1.0;
    Coef c;
    c.b1 = static_cast<float>(s.beta1);
    c.one_minus_b1 = static_cast<float>(1.0 - s.beta1);
    c.b2 = static_cast<float>(s.beta2);
    c.one_minus_b2 = static_cast<float>(1.0 - s.beta2);
    c.step_size = static_cast<float>(lr / (1.0 - pow(s.beta1, t)));
    c.inv_sqrt_bc2 = static_cast<float>(1.0 / sqrt(1.0 - pow(s.beta2, t)));
    c.eps = static_cast<float>(s.eps);
    c.decay = static_cast<float>(lr * s.weight_decay);
    c.inv_scale = static_cast<float>(1.0 / scale);
    return c;
}

/* N elements of a tensor in registers, read and written in one instruction where N is kVec. */
template <typename T, int N> struct Part;

template <int N> struct Part<float, N> {
    float x[N];

    __device__ void load(const void *base, int64_t i)
    {
        const float *const from = static_cast<const float *>(base) + i;
        if constexpr (N == 4) {
            const float4 v = __ldcs(reinterpret_cast<const float4 *>(from));
            x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
        } else {
            x[0] = __ldcs(from);
        }
    }
    __device__ void store(void *base, int64_t i) const
    {
        float *const to = static_cast<float *>(base) + i;
        if constexpr (N == 4)
            __stcs(reinterpret_cast<float4 *>(to), make_float4(x[0], x[1], x[2], x[3]));
        else
            __stcs(to, x[0]);
    }
    __device__ float get(int j) const { return x[j]; }
    __device__ void set(int j, float value) { x[j] = value; }
};

template <int N> struct Part<uint16_t, N> {
    uint16_t x[N];

    __device__ void load(const void *base, int64_t i)
    {
        const uint16_t *const from = static_cast<const uint16_t *>(base) + i;
        if constexpr (N == 4) {
            const uint2 v = __ldcs(reinterpret_cast<const uint2 *>(from));
            x[0] = static_cast<uint16_t>(v.x), x[1] = static_cast<uint16_t>(v.x >> 16);
            x[2] = static_cast<uint16_t>(v.y), x[3] = static_cast<uint16_t>(v.y >> 16);
        } else {
            x[0] = __ldcs(from);
        }
    }
    __device__ void store(void *base, int64_t i) const
    {
        uint16_t *const to = static_cast<uint16_t *>(base) + i;
        if constexpr (N == 4) {
            const uint32_t low = x[0] | static_cast<uint32_t>(x[1]) << 16, high = x[2] | static_cast<uint32_t>(x[3])
                                                                                             << 16;
            __stcs(reinterpret_cast<uint2 *>(to), make_uint2(low, high));
        } else {
            __stcs(to, x[0]);
        }
    }
    /* as bfloat16 */
    __device__ float get(int j) const { return __uint_as_float(static_cast<uint32_t>(x[j]) << 16); }
    __device__ void set(int j, float value) { x[j] = __bfloat16_as_ushort(__float2bfloat16_rn(value)); }
};

template <bool kBf16, int N> using Of = std::conditional_t<kBf16, Part<uint16_t, N>, Part<float, N>>;

/* N elements of everything. */
template <int kNumber, int N> struct Elements {
    static constexpr Kind kKind = kind_of(kNumber);
    Of<kKind.param_bf16, N> p;
    Of<kKind.grad_bf16, N> g;
    Of<kKind.moment_bf16, N> m, v;
    Of<kKind.master == Master::kRemainder, N> w; /* where there is a master */

    __device__ void load(const Row &row, int64_t i)
    {
        g.load(row.g, i);
        m.load(row.m, i);
        v.load(row.v, i);
        if constexpr (kKind.master != Master::kF32)
            p.load(row.p, i);
        if constexpr (kKind.master != Master::kNone)
            w.load(row.w, i);
    }

    __device__ void store(const Row &row, int64_t i) const
    {
        m.store(row.m, i);
        v.store(row.v, i);
        p.store(row.p, i);
        if constexpr (kKind.master != Master::kNone)
            w.store(row.w, i);
    }

    __device__ float master(int j) const
    {
        if constexpr (kKind.master == Master::kNone)
            return p.get(j);
        else if constexpr (kKind.master == Master::kF32)
            return w.get(j);
        else
            return __uint_as_float((static_cast<uint32_t>(p.x[j]) << 16) +
                                   static_cast<uint32_t>(static_cast<int32_t>(static_cast<int16_t>(w.x[j]))));
    }

    __device__ void set_master(int j, float x)
    {
        if constexpr (kKind.master == Master::kRemainder) {
            const uint32_t bits = isnan(x) ? 0x7fc00000u : __float_as_uint(x);
            p.x[j] = static_cast<uint16_t>((bits + 0x8000u) >> 16);
            w.x[j] = static_cast<uint16_t>(bits);
        } else {
            if constexpr (kKind.master == Master::kF32)
                w.set(j, x);
            p.set(j, x);
        }
    }

    /* The same operations in the same order as adam_cpu.inc: the _rn intrinsics are never contracted. */
    __device__ void step(const Coef &c)
    {
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float grad = __fmul_rn(g.get(j), c.inv_scale);
            const float mean = __fadd_rn(__fmul_rn(c.b1, m.get(j)), __fmul_rn(c.one_minus_b1, grad));
            const float square = __fadd_rn(__fmul_rn(c.b2, v.get(j)), __fmul_rn(__fmul_rn(c.one_minus_b2, grad), grad));
            const float at = master(j);
            const float denom = __fadd_rn(__fmul_rn(__fsqrt_rn(square), c.inv_sqrt_bc2), c.eps);
            m.set(j, mean);
            v.set(j, square);
            set_master(
                j, __fsub_rn(at, __fadd_rn(__fdiv_rn(__fmul_rn(c.step_size, mean), denom), __fmul_rn(c.decay, at))));
        }
    }
};

/* Elements begin, .. end of a tensor, N neighbours a thread and kGroups times so many a turn. */
template <int kNumber, int N, int kGroups>
__device__ void tile(const Row &row, const Scalars &s, Coef &coef, int64_t begin, int64_t end)
{
    bool ready = false;
    for (int64_t at = begin; at < end; at += kThreads * N * kGroups) {
        Elements<kNumber, N> part[kGroups];
        const int64_t mine = at + static_cast<int64_t>(threadIdx.x) * N;
#pragma unroll
        for (int u = 0; u < kGroups; u++)
            if (mine + u * kThreads * N + N <= end)
                part[u].load(row, mine + u * kThreads * N);
        if (!ready) {
            if (threadIdx.x == 0)
                coef = coef_of(s, row);
            __syncthreads();
            ready = true;
        }
#pragma unroll
        for (int u = 0; u < kGroups; u++)
            if (mine + u * kThreads * N + N <= end) {
                part[u].step(coef);
                part[u].store(row, mine + u * kThreads * N);
            }
    }
    if (N == 1 || (end - begin) % N == 0)
        return;
    const int64_t last = end - (end - begin) % N + threadIdx.x;
    if (last < end) {
        Elements<kNumber, 1> one;
        one.load(row, last);
        one.step(coef);
        one.store(row, last);
    }
}

__device__ int row_of_tile(const Table &t, uint32_t tile)
{
    int low = 0, high = t.n_rows - 1;
    while (low < high) {
        const int middle = low + (high - low + 1) / 2;
        if (t.rows[middle].first_tile <= tile)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

template <int kNumber>
__global__ void __launch_bounds__(kThreads)
    adam_step_update_kernel(const __grid_constant__ Table t, const __grid_constant__ Scalars s)
{
    __shared__ Coef coef;
    if (skipped(s))
        return;
    const Row &row = t.rows[row_of_tile(t, blockIdx.x)];
    const int64_t begin = static_cast<int64_t>(blockIdx.x - row.first_tile) * kTile;
    const int64_t end = row.n - begin > kTile ? begin + kTile : row.n;
    if (row.aligned)
        tile<kNumber, kVec, kUnroll>(row, s, coef, begin, end);
    else
        tile<kNumber, 1, 2 * kUnroll>(row, s, coef, begin, end);
}

bool given(const am_tensor &t) { return t.dtype != AM_NONE && am_numel(&t) != 0; }

const am_tensor *master_of(const am_adam_args *a, int64_t i)
{
    return a->masters.items && given(a->masters.items[i]) ? &a->masters.items[i] : nullptr;
}

int number_of(const am_adam_args *a, int64_t i)
{
    const am_tensor *const w = master_of(a, i);
    Kind kind = {};
    kind.param_bf16 = a->params.items[i].dtype == AM_BF16;
    kind.grad_bf16 = a->grads.items[i].dtype == AM_BF16;
    kind.moment_bf16 = a->exp_avgs.items[i].dtype == AM_BF16;
    kind.master = w == nullptr ? Master::kNone : w->dtype == AM_F32 ? Master::kF32 : Master::kRemainder;
    return kind.number();
}

Row row_of(const am_adam_args *a, int64_t i)
{
    const am_tensor *const w = master_of(a, i);
    Row r = {};
    r.p = a->params.items[i].data;
    r.m = a->exp_avgs.items[i].data;
    r.v = a->exp_avg_sqs.items[i].data;
    r.w = w ? w->data : nullptr;
    r.g = a->grads.items[i].data;
    r.step = a->steps.items[i].data;
    r.n = am_numel(&a->params.items[i]);
    r.step_i64 = a->steps.items[i].dtype == AM_I64;
    r.aligned = true;
    for (const void *start : {static_cast<const void *>(r.p), r.g, static_cast<const void *>(r.m),
                              static_cast<const void *>(r.v), static_cast<const void *>(r.w)})
        r.aligned = r.aligned && reinterpret_cast<uintptr_t>(start) % 16 == 0;
    return r;
}

int64_t tiles_of(int64_t n) { return n / kTile + (n % kTile != 0); }

template <int kNumber> void update(const Table &table, const Scalars &s, int64_t tiles, cudaStream_t stream)
{
    /* a master belongs to a bfloat16 parameter */
    if constexpr (kind_of(kNumber).param_bf16 || kind_of(kNumber).master == Master::kNone)
        adam_step_update_kernel<kNumber><<<static_cast<unsigned>(tiles), kThreads, 0, stream>>>(table, s);
}

using Update = void (*)(const Table &, const Scalars &, int64_t, cudaStream_t);

template <int... kNumbers> Update update_of(int number, std::integer_sequence<int, kNumbers...>)
{
    static constexpr Update kAll[] = {update<kNumbers>...};
    return kAll[number];
}

am_status launch(const Table &table, int number, const Scalars &s, int64_t tiles, cudaStream_t stream)
{
    adam_step_count_kernel<<<1, kThreads, 0, stream>>>(table, s);
    AM_CUDA_LAUNCHED();
    if (tiles == 0)
        return AM_OK;
    update_of(number, std::make_integer_sequence<int, kKinds>())(table, s, tiles, stream);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

const float *data_or_null(const am_tensor &t) { return given(t) ? static_cast<const float *>(t.data) : nullptr; }

Scalars scalars_of(const am_adam_args *a, int64_t group)
{
    Scalars s = {};
    s.lr = a->lr.data[group];
    s.beta1 = a->beta1.data[group];
    s.beta2 = a->beta2.data[group];
    s.eps = a->eps.data[group];
    s.weight_decay = a->weight_decay.data[group];
    s.lr_tensor = a->lr_tensors.items ? data_or_null(a->lr_tensors.items[group]) : nullptr;
    s.found_inf = data_or_null(a->found_inf);
    s.grad_scale = data_or_null(a->grad_scale);
    return s;
}

/* The tensors of one Kind among begin, .. end. */
am_status step_kind(const am_adam_args *a, int number, const Scalars &s, int64_t begin, int64_t end,
                    cudaStream_t stream)
{
    Table table;
    int64_t tiles = 0;
    table.n_rows = 0;
    for (int64_t i = begin; i < end; i++) {
        if (number_of(a, i) != number)
            continue;
        Row row = row_of(a, i);
        const int64_t own = tiles_of(row.n);
        if (table.n_rows == kTensors || tiles + own > INT32_MAX) {
            AM_TRY(launch(table, number, s, tiles, stream));
            table.n_rows = 0;
            tiles = 0;
        }
        row.first_tile = static_cast<uint32_t>(tiles);
        table.rows[table.n_rows++] = row;
        tiles += own;
    }
    return table.n_rows == 0 ? AM_OK : launch(table, number, s, tiles, stream);
}

am_status step_group(const am_adam_args *a, const Scalars &s, int64_t begin, int64_t end, cudaStream_t stream)
{
    uint32_t kinds = 0;
    for (int64_t i = begin; i < end; i++)
        kinds |= 1u << number_of(a, i);
    for (int number = 0; number < kKinds; number++)
        if (kinds >> number & 1)
            AM_TRY(step_kind(a, number, s, begin, end, stream));
    return AM_OK;
}

am_status step_all(const am_adam_args *a, cudaStream_t stream)
{
    if (!a->group_sizes.present)
        return step_group(a, scalars_of(a, 0), 0, a->params.n, stream);
    int64_t begin = 0;
    for (int64_t group = 0; group < a->group_sizes.n; group++) {
        const int64_t end = begin + a->group_sizes.data[group];
        AM_TRY(step_group(a, scalars_of(a, group), begin, end, stream));
        begin = end;
    }
    return AM_OK;
}

} // namespace

extern "C" am_status am_cuda_adam_step(const am_adam_args *a, const am_exec *ex)
{
    for (int64_t i = 0; i < a->params.n; i++)
        AM_CHECK(tiles_of(am_numel(&a->params.items[i])) <= INT32_MAX, AM_ERR_UNSUPPORTED,
                 "adam_step: params[%lld] has %lld elements, CUDA takes up to %lld", (long long)i,
                 (long long)am_numel(&a->params.items[i]), (long long)INT32_MAX * kTile);
    int before = 0;
    AM_CUDA(cudaGetDevice(&before));
    AM_CUDA(cudaSetDevice(ex->dev_index));
    const am_status st = step_all(a, static_cast<cudaStream_t>(ex->stream));
    AM_CUDA(cudaSetDevice(before));
    return st;
}
