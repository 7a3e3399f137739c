/* mlp.cu -- elementwise gates: SwiGLU, the gate of attention's output, GELU. Forward and backward.
 *
 * Thread: a few words of 16 bytes of every tensor, all asked for before the first is used; neighbouring threads have
 * neighbouring words. Rows that are no whole number of aligned words go one element at a time.
 *
 * Floor: every input read and every output written once over the copy rate of the memory.
 */
#include "on_device.h"
#include "rows.cuh"

extern "C" {
#include "mlp.h"
}

namespace
{

constexpr int kThreads = 128;
constexpr int64_t kMost = 1u << 30; /* words of a launch */

enum Place { kDy, kA, kB, kFirst, kSecond, kPlaces }; /* outputs: y, or da and db */

struct Work {
    rows::Axes axes;
    rows::Rows at[kPlaces];
    int64_t first_row;
    uint32_t words;    /* in this launch */
    rows::Divisor row; /* words of a row */
};

/* Float32 takes the exact exponential; of bfloat16 the fast one's error is far below a rounding. */
template <bool kExact> __device__ float exponential(float x) { return kExact ? expf(x) : __expf(x); }

template <bool kExact> __device__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + exponential<kExact>(-x)); }

struct Swiglu {
    static constexpr bool kTwo = true;
    template <bool kExact> static __device__ float forward(float gate, float up)
    {
        return gate * sigmoid<kExact>(gate) * up;
    }
    template <bool kExact> static __device__ void backward(float &dgate, float &dup, float dy, float gate, float up)
    {
        const float sigma = sigmoid<kExact>(gate), silu = gate * sigma;
        dgate = dy * up * (sigma + silu * (1.0f - sigma));
        dup = dy * silu;
    }
};

struct SigmoidGate {
    static constexpr bool kTwo = true;
    template <bool kExact> static __device__ float forward(float x, float gate) { return x * sigmoid<kExact>(gate); }
    template <bool kExact> static __device__ void backward(float &dx, float &dgate, float dy, float x, float gate)
    {
        const float sigma = sigmoid<kExact>(gate);
        dx = dy * sigma;
        dgate = dx * x * (1.0f - sigma);
    }
};

/* P(N(0, 1) <= x) and the density. In bfloat16 the tail e^(-x^2 / 2) q(1 / (1 + p |x|)) of Abramowitz and Stegun
 * 26.2.17, off by at most 7.5e-8. */
template <bool kExact> __device__ float normal(float x, float *density)
{
    const float bell = exponential<kExact>(-0.5f * x * x);
    *density = bell * 0.39894228f;
    if constexpr (kExact)
        return 0.5f * (1.0f + erff(x * 0.70710678f));
    const float t = __fdividef(1.0f, fmaf(0.23164190f, fabsf(x), 1.0f));
    float q = fmaf(t, 0.53070272f, -0.72657601f);
    q = fmaf(t, q, 0.71070687f);
    q = fmaf(t, q, -0.14224837f);
    q = fmaf(t, q, 0.12741480f);
    const float tail = bell * t * q;
    return x < 0.0f ? tail : 1.0f - tail;
}

struct Gelu {
    static constexpr bool kTwo = false;
    template <bool kExact> static __device__ float forward(float x, float)
    {
        float unused;
        return x * normal<kExact>(x, &unused);
    }
    template <bool kExact> static __device__ void backward(float &dx, float &, float dy, float x, float)
    {
        float density;
        const float cdf = normal<kExact>(x, &density);
        dx = dy * (density == 0.0f ? cdf : cdf + x * density);
    }
};

struct GeluTanh {
    static constexpr bool kTwo = false;
    template <bool kExact> static __device__ float forward(float x, float)
    {
        return x * sigmoid<kExact>(1.5957691f * (x + 0.044715f * x * x * x));
    }
    /* sigmoid (1 - sigmoid) without a difference, and finite for every finite x */
    template <bool kExact> static __device__ void backward(float &dx, float &, float dy, float x, float)
    {
        const float s = x * x < 1e4f ? x * x : 1e4f;
        const float v = 1.5957691f * (1.0f + 0.044715f * s) * x;
        const float t = exponential<kExact>(v < 0.0f ? v : -v), inverse = __fdividef(1.0f, 1.0f + t);
        const float slope = 1.5957691f * (1.0f + 0.134145f * s);
        dx = dy * ((v < 0.0f ? t : 1.0f) * inverse + t * inverse * inverse * slope * x);
    }
};

/* Words of a thread, so that enough bytes are under way. On one H200, of 1, 2, 4 words by 128, 256, 512 threads: SwiGLU
 * 4,084 GB/s with 2 by 128 (3,690 to 4,011 else), GELU 3,378 with 4 by 128 (3,009 to 3,345 else). */
template <typename Gate> constexpr int kWords = Gate::kTwo ? 2 : 4;

/* 16 bytes, or one element where kPer is 1. */
template <typename T, int kPer> struct Word {
    uint4 raw;
    __device__ void read(const char *p) { raw = rows::load(p); }
    __device__ void write(char *p) const { rows::store(p, raw); }
    __device__ void get(float (&to)[kPer]) const { rows::unpack<T>(to, raw); }
    __device__ void set(const float (&from)[kPer]) { raw = rows::pack<T>(from); }
};

template <typename T> struct Word<T, 1> {
    T raw;
    __device__ void read(const char *p) { raw = *reinterpret_cast<const T *>(p); }
    __device__ void write(char *p) const { *reinterpret_cast<T *>(p) = raw; }
    __device__ void get(float (&to)[1]) const { to[0] = rows::to_float(raw); }
    __device__ void set(const float (&from)[1]) { rows::from_float(&raw, from[0]); }
};

template <typename T, int kPer, typename Gate, bool kBackward>
__global__ void __launch_bounds__(kThreads) mlp_kernel(const __grid_constant__ Work w)
{
    constexpr int kBytes = kPer * static_cast<int>(sizeof(T));
    constexpr int kCount = kWords<Gate>;
    constexpr bool kExact = sizeof(T) == 4;
    Word<T, kPer> in[3][kCount]; /* by Place */
    int64_t row[kCount];
    uint32_t column[kCount];
#pragma unroll
    for (int u = 0; u < kCount; u++) {
        const uint32_t word = (blockIdx.x * kCount + u) * kThreads + threadIdx.x;
        const uint32_t down = rows::divide(word, w.row);
        row[u] = word < w.words ? w.first_row + down : -1;
        column[u] = word - down * w.row.by;
        if (row[u] < 0)
            continue;
        if constexpr (kBackward)
            in[kDy][u].read(rows::row_of(w.axes, w.at[kDy], row[u]) + int64_t{kBytes} * column[u]);
        in[kA][u].read(rows::row_of(w.axes, w.at[kA], row[u]) + int64_t{kBytes} * column[u]);
        if constexpr (Gate::kTwo)
            in[kB][u].read(rows::row_of(w.axes, w.at[kB], row[u]) + int64_t{kBytes} * column[u]);
    }
#pragma unroll
    for (int u = 0; u < kCount; u++) {
        if (row[u] < 0)
            continue;
        float a[kPer], b[kPer] = {}, dy[kPer] = {};
        in[kA][u].get(a);
        if constexpr (Gate::kTwo)
            in[kB][u].get(b);
        if constexpr (kBackward)
            in[kDy][u].get(dy);
#pragma unroll
        for (int i = 0; i < kPer; i++)
            if constexpr (kBackward) {
                float first, second;
                Gate::template backward<kExact>(first, second, dy[i], a[i], b[i]);
                a[i] = first;
                if constexpr (Gate::kTwo)
                    b[i] = second;
            } else {
                a[i] = Gate::template forward<kExact>(a[i], b[i]);
            }
        Word<T, kPer> out;
        out.set(a);
        out.write(rows::row_of(w.axes, w.at[kFirst], row[u]) + int64_t{kBytes} * column[u]);
        if constexpr (kBackward && Gate::kTwo) {
            out.set(b);
            out.write(rows::row_of(w.axes, w.at[kSecond], row[u]) + int64_t{kBytes} * column[u]);
        }
    }
}

/* Slices of the columns where rows are long, and of rows, so that words are counted in 32 bits. */
template <typename T, int kPer, typename Gate, bool kBackward>
am_status launch(Work w, int64_t rows_left, int64_t row_words, cudaStream_t stream)
{
    if (row_words > kMost) {
        AM_TRY((launch<T, kPer, Gate, kBackward>(w, rows_left, kMost, stream)));
        for (rows::Rows &r : w.at)
            r.data = r.data == nullptr ? nullptr : r.data + kMost * kPer * static_cast<int64_t>(sizeof(T));
        return launch<T, kPer, Gate, kBackward>(w, rows_left, row_words - kMost, stream);
    }
    w.row = rows::divisor(static_cast<uint32_t>(row_words));
    const int64_t most = kMost / row_words;
    for (; rows_left > 0; rows_left -= most, w.first_row += most) {
        w.words = static_cast<uint32_t>((rows_left < most ? rows_left : most) * row_words);
        constexpr int kBlock = kThreads * kWords<Gate>;
        const unsigned blocks = (w.words + kBlock - 1) / kBlock;
        mlp_kernel<T, kPer, Gate, kBackward><<<blocks, kThreads, 0, stream>>>(w);
        AM_CUDA_LAUNCHED();
    }
    return AM_OK;
}

template <typename T, typename Gate, bool kBackward>
am_status launch_by_layout(const Work &w, int64_t n_rows, int64_t n, cudaStream_t stream)
{
    constexpr int kPer = rows::kPer<T>;
    bool words = n % kPer == 0;
    for (const rows::Rows &r : w.at)
        words = words && (r.data == nullptr || rows::aligned(w.axes, r, 16));
    return words ? launch<T, kPer, Gate, kBackward>(w, n_rows, n / kPer, stream)
                 : launch<T, 1, Gate, kBackward>(w, n_rows, n, stream);
}

template <typename T, typename Gate>
am_status launch_by_pass(const Work &w, bool backward, int64_t n_rows, int64_t n, cudaStream_t stream)
{
    return backward ? launch_by_layout<T, Gate, true>(w, n_rows, n, stream)
                    : launch_by_layout<T, Gate, false>(w, n_rows, n, stream);
}

template <typename T> am_status launch_by_kind(const am_mlp_args *a, const Work &w, int64_t n_rows, cudaStream_t stream)
{
    const int64_t n = a->a.shape[a->a.ndim - 1];
    switch (a->kind) {
    case AM_MLP_SWIGLU: return launch_by_pass<T, Swiglu>(w, a->backward, n_rows, n, stream);
    case AM_MLP_SIGMOID_GATE: return launch_by_pass<T, SigmoidGate>(w, a->backward, n_rows, n, stream);
    case AM_MLP_GELU: return launch_by_pass<T, Gelu>(w, a->backward, n_rows, n, stream);
    default: return launch_by_pass<T, GeluTanh>(w, a->backward, n_rows, n, stream);
    }
}

am_status run(const am_mlp_args *a, cudaStream_t stream)
{
    const am_tensor *const tensors[kPlaces] = {&a->dy, &a->a, &a->b, a->backward ? &a->da : &a->y, &a->db};
    const am_tensor *by_place[kPlaces] = {&a->a, &a->dy, &a->b, tensors[kFirst], &a->db};
    rows::Rows r[kPlaces];
    Work w = {};
    w.axes = rows::merge(by_place, kPlaces, r);
    w.at[kA] = r[0];
    w.at[kDy] = r[1];
    w.at[kB] = r[2];
    w.at[kFirst] = r[3];
    w.at[kSecond] = r[4];
    const int64_t n_rows = rows::count(a->a);
    return a->a.dtype == AM_BF16 ? launch_by_kind<__nv_bfloat16>(a, w, n_rows, stream)
                                 : launch_by_kind<float>(a, w, n_rows, stream);
}

} // namespace

extern "C" am_status am_cuda_mlp(const am_mlp_args *a, const am_exec *ex) { return on_device(run, a, ex); }
