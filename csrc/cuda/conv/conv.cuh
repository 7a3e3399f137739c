/* conv.cuh -- what the kernels of the causal convolution share: a call as the device sees it, documents, one position.
 *
 * kWidth is the filter's width, or kAnyWidth for every width up to it: then `lead` = kAnyWidth - width taps come first
 * that nobody looks at.
 */
#ifndef CONV_CUH
#define CONV_CUH

#include "rows.cuh"

extern "C" {
#include "conv.h"
}

namespace convs
{

constexpr int kThreads = 128;
constexpr int kAhead = 4; /* rows that a thread has asked for before it needs them */
constexpr int kAnyWidth = AM_CONV_MAX_WIDTH;

/* float32 or bfloat16 of any strides; data is null where the tensor was not given. */
struct View {
    void *data;
    int64_t stride[3]; /* elements */
    bool bf16;

    __device__ float at(int64_t i, int64_t j, int64_t k) const
    {
        const int64_t e = i * stride[0] + j * stride[1] + k * stride[2];
        return bf16 ? __bfloat162float(static_cast<const __nv_bfloat16 *>(data)[e])
                    : static_cast<const float *>(data)[e];
    }
    __device__ void set(int64_t i, int64_t j, int64_t k, float value) const
    {
        const int64_t e = i * stride[0] + j * stride[1] + k * stride[2];
        if (bf16)
            static_cast<__nv_bfloat16 *>(data)[e] = __float2bfloat16_rn(value);
        else
            static_cast<float *>(data)[e] = value;
    }
};

inline View view(const am_tensor &t)
{
    View v = {};
    if (!rows::given(t))
        return v;
    v.data = t.data;
    v.bf16 = t.dtype == AM_BF16;
    for (int d = 0; d < t.ndim; d++)
        v.stride[d] = t.stride[d];
    return v;
}

/* Starts and ends; `ends` is null for the one document [first, last). */
struct Docs {
    const int64_t *ends;
    int n, first, last;

    __device__ int start(int doc) const
    {
        return ends == nullptr ? first : static_cast<int>(__ldg(ends + int64_t{2} * doc));
    }
    __device__ int end(int doc) const
    {
        return ends == nullptr ? last : static_cast<int>(__ldg(ends + int64_t{2} * doc + 1));
    }
};

/* The first document that ends after a row; behind the last one start and end are INT32_MAX. */
struct Cursor {
    int doc, start, end;

    __device__ void take(const Docs &docs)
    {
        start = doc < docs.n ? docs.start(doc) : INT32_MAX;
        end = doc < docs.n ? docs.end(doc) : INT32_MAX;
    }
    __device__ void seek(const Docs &docs, int row)
    {
        int high = docs.n;
        for (doc = 0; doc < high;) {
            const int middle = doc + (high - doc) / 2;
            if (docs.end(middle) > row)
                high = middle;
            else
                doc = middle + 1;
        }
        take(docs);
    }
    __device__ void up(const Docs &docs, int row)
    {
        while (row >= end) {
            doc++;
            take(docs);
        }
    }
    __device__ void down(const Docs &docs, int row)
    {
        if (row >= start)
            return;
        while (doc > 0 && docs.end(doc - 1) > row)
            doc--;
        take(docs);
    }
};

struct Call {
    char *out; /* y or dx */
    const char *x, *dy;
    int64_t out_stride, x_stride, dy_stride; /* bytes */
    View weight, bias, state, dfinal;
    Docs docs;
    int rows, run, runs; /* run: rows of a block of forward; runs: of the sums of backward */
    int channels, width, columns;
    bool silu;
    double *partials; /* null where nobody asks */
};

am_status call_of(const am_conv_args *a, Call *p);
am_status states(const am_conv_args *a, const Call &p, cudaStream_t stream); /* final_state or dstate */

/* kPer neighbouring channels of a row. */
template <int kBytes> struct RawOf;
template <> struct RawOf<16> {
    using Type = uint4;
};
template <> struct RawOf<8> {
    using Type = uint2;
};

__device__ inline void split(uint32_t (&to)[4], const uint4 &w)
{
    to[0] = w.x;
    to[1] = w.y;
    to[2] = w.z;
    to[3] = w.w;
}
__device__ inline void split(uint32_t (&to)[2], const uint2 &w)
{
    to[0] = w.x;
    to[1] = w.y;
}
__device__ inline void join(uint4 *to, const uint32_t (&w)[4]) { *to = make_uint4(w[0], w[1], w[2], w[3]); }
__device__ inline void join(uint2 *to, const uint32_t (&w)[2]) { *to = make_uint2(w[0], w[1]); }

template <typename T, int kPer> struct Lanes {
    static constexpr int kBytes = kPer * static_cast<int>(sizeof(T)), kParts = kBytes / 4;
    using Raw = typename RawOf<kBytes>::Type;
    Raw raw;

    /* Row `row` where it lies in [low, high), else zeros. Kept in L2: the next run's block reads the last rows again.
     */
    __device__ void read(const char *base, int64_t stride, int row, int low, int high)
    {
        raw = row >= low && row < high ? __ldg(reinterpret_cast<const Raw *>(base + row * stride)) : Raw{};
    }
    __device__ void write(char *p) const { __stcs(reinterpret_cast<Raw *>(p), raw); }
    __device__ void get(float (&to)[kPer]) const
    {
        uint32_t part[kParts];
        split(part, raw);
#pragma unroll
        for (int i = 0; i < kParts; i++)
            if constexpr (sizeof(T) == 4) {
                to[i] = __uint_as_float(part[i]);
            } else {
                to[2 * i] = __uint_as_float(part[i] << 16);
                to[2 * i + 1] = __uint_as_float(part[i] & 0xffff0000u);
            }
    }
    __device__ void set(const float (&from)[kPer])
    {
        uint32_t part[kParts];
#pragma unroll
        for (int i = 0; i < kParts; i++)
            if constexpr (sizeof(T) == 4) {
                part[i] = __float_as_uint(from[i]);
            } else {
                const __nv_bfloat162 two = __floats2bfloat162_rn(from[2 * i], from[2 * i + 1]);
                part[i] = *reinterpret_cast<const uint32_t *>(&two);
            }
        join(&raw, part);
    }
};

template <typename T> struct Lanes<T, 1> {
    T raw;
    __device__ void read(const char *base, int64_t stride, int row, int low, int high)
    {
        rows::from_float(&raw, 0.0f);
        if (row >= low && row < high)
            raw = *reinterpret_cast<const T *>(base + row * stride);
    }
    __device__ void write(char *p) const { *reinterpret_cast<T *>(p) = raw; }
    __device__ void get(float (&to)[1]) const { to[0] = rows::to_float(raw); }
    __device__ void set(const float (&from)[1]) { rows::from_float(&raw, from[0]); }
};

template <typename T, int kPer> __device__ void clear(char *to)
{
    const float zero[kPer] = {};
    Lanes<T, kPer> out;
    out.set(zero);
    out.write(to);
}

template <int kPer, int kWidth> struct Filter {
    float weight[kWidth][kPer], bias[kPer];
    int lead;

    __device__ void read(const Call &p, int channel)
    {
        lead = kWidth == kAnyWidth ? kWidth - p.width : 0;
#pragma unroll
        for (int c = 0; c < kPer; c++) {
#pragma unroll
            for (int j = 0; j < kWidth; j++)
                weight[j][c] = j >= lead ? p.weight.at(channel + c, j - lead, 0) : 0.0f;
            bias[c] = p.bias.data == nullptr ? 0.0f : p.bias.at(channel + c, 0, 0);
        }
    }
    __device__ bool has(int tap) const { return kWidth < kAnyWidth || tap >= lead; }

    /* bias + weight[0] u[0] + weight[1] u[1] + .., in this order; `inputs(to, j)` gives u[j] */
    template <typename Inputs> __device__ void apply(float (&z)[kPer], const Inputs &inputs) const
    {
#pragma unroll
        for (int c = 0; c < kPer; c++)
            z[c] = bias[c];
#pragma unroll
        for (int j = 0; j < kWidth; j++)
            if (has(j)) {
                float u[kPer];
                inputs(u, j);
#pragma unroll
                for (int c = 0; c < kPer; c++)
                    z[c] = fmaf(weight[j][c], u[c], z[c]);
            }
    }
};

/* The rows before and with one as its inputs, where all of them lie in its document. */
template <int kPer, int kWidth> struct Inside {
    const float (&u)[kWidth][kPer];

    __device__ void operator()(float (&to)[kPer], int j) const
    {
#pragma unroll
        for (int c = 0; c < kPer; c++)
            to[c] = u[j][c];
    }
};

/* Where some may lie before it: those come from its state. */
template <int kPer, int kWidth> struct AtEdge {
    const float (&u)[kWidth][kPer];
    const Call &p;
    const Cursor &at;
    int row, channel;

    __device__ void operator()(float (&to)[kPer], int j) const
    {
        const int past = row - (kWidth - 1) + j - at.start;
        if (past >= 0) {
            Inside<kPer, kWidth>{u}(to, j);
            return;
        }
#pragma unroll
        for (int c = 0; c < kPer; c++)
            to[c] = p.state.data == nullptr ? 0.0f : p.state.at(at.doc, channel + c, past + p.width - 1);
    }
};

/* Float32 takes the exact exponential; of bfloat16 the fast one's error is far below a rounding. */
template <typename T> __device__ float sigmoid(float z)
{
    return __fdividef(1.0f, 1.0f + (sizeof(T) == 4 ? expf(-z) : __expf(-z)));
}

/* The derivative of silu. */
template <typename T> __device__ float slope(float z)
{
    const float sigma = sigmoid<T>(z), silu = z * sigma;
    return sigma + silu * (1.0f - sigma);
}

/* Rows of kPer channels lie on whole words. */
template <typename T, int kPer> bool on_words(const Call &p)
{
    constexpr int kBytes = kPer * static_cast<int>(sizeof(T));
    bool fine = p.channels % kPer == 0;
    const struct {
        const char *data;
        int64_t stride;
    } of[] = {{p.out, p.out_stride}, {p.x, p.x_stride}, {p.dy, p.dy_stride}};
    for (const auto &t : of)
        fine = fine && reinterpret_cast<uintptr_t>(t.data) % kBytes == 0 && t.stride % kBytes == 0;
    return fine;
}

} // namespace convs

#endif
