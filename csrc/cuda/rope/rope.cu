/* rope.cu -- rotary embedding of queries and keys from position ids, both axes' kinds, in one pass.
 *
 * A head is `items` pairs of words: a word of the lower half with the one that it turns against, or two words that are
 * copied. A block does whole tokens: every thread asks for kBatch pairs, some threads make the tokens' cosines and
 * sines (float64 angles) while those are on their way, then all turn and write.
 *
 * Floor: q and k read and written once over the copy rate of the memory.
 */
#include "on_device.h"
#include "rows.cuh"

#include <math.h>

extern "C" {
#include "rope.h"
}

namespace
{

constexpr int kMostThreads = 256, kBatch = 4;
constexpr int kTable = 1024; /* cosines and sines of a block's tokens */
constexpr int kMostTokens = 64;
static_assert(kTable >= AM_ROPE_MAX_PAIRS, "a token's angles fit");

struct Heads {
    const char *in;
    char *out;
    int64_t in_token, in_head; /* bytes */
    int64_t out_token;
};

struct Job {
    Heads q, k;
    const void *positions;
    int64_t axis_stride, token_stride; /* elements of positions */
    int64_t tokens;
    rows::Divisor items, heads, pairs; /* items of a head; heads of q and k together; pairs of a head */
    uint32_t q_heads, turning, apart;  /* turning: items that turn; apart: items that copy */
    uint32_t block_tokens, dim, head_bytes;
    bool wide; /* int64 positions */
    double sign;
    double frequency[AM_ROPE_MAX_PAIRS];
    uint8_t axis[AM_ROPE_MAX_PAIRS];
};

/* Cosine and sine, the same reduction and polynomials as rope_cpu.inc's. */
__device__ float2 cos_sin(double angle)
{
    const double turns = rint(angle * 0.63661977236758134308);
    const float r = static_cast<float>((angle - turns * 1.57079632673412561417) - turns * 6.07710050650619224932e-11);
    const int quadrant = static_cast<int>(static_cast<int64_t>(turns) & 3);
    const float s = r * r;
    const float sin_r = ((-1.9515295891e-4f * s + 8.3321608736e-3f) * s - 1.6666654611e-1f) * s * r + r;
    const float cos_r =
        ((2.443315711809948e-5f * s - 1.388731625493765e-3f) * s + 4.166664568298827e-2f) * s * s - 0.5f * s + 1.0f;
    const float c = quadrant & 1 ? sin_r : cos_r, d = quadrant & 1 ? cos_r : sin_r;
    return make_float2(quadrant == 1 || quadrant == 2 ? -c : c, quadrant & 2 ? -d : d);
}

__device__ void fill_table(const Job &job, int64_t first, uint32_t tokens, float2 *table)
{
    for (uint32_t i = threadIdx.x; i < tokens * job.pairs.by; i += blockDim.x) {
        const uint32_t token = rows::divide(i, job.pairs), pair = i - token * job.pairs.by;
        const int64_t at = job.axis[pair] * job.axis_stride + (first + token) * job.token_stride;
        const int64_t position = job.wide ? static_cast<const int64_t *>(job.positions)[at]
                                          : static_cast<const int32_t *>(job.positions)[at];
        table[i] = cos_sin(job.sign * static_cast<double>(position) * job.frequency[pair]);
    }
}

/* kBytes of a head. */
template <typename T, int kBytes> struct Word;

template <typename T> struct Word<T, 16> {
    static constexpr int kPer = rows::kPer<T>;
    uint4 raw;
    __device__ void read(const char *p) { raw = rows::load(p); }
    __device__ void write(char *p) const { rows::store(p, raw); }
    __device__ void get(float (&to)[kPer]) const { rows::unpack<T>(to, raw); }
    __device__ void set(const float (&from)[kPer]) { raw = rows::pack<T>(from); }
};

template <typename T> struct Word<T, static_cast<int>(sizeof(T))> {
    static constexpr int kPer = 1;
    T raw;
    __device__ void read(const char *p) { raw = *reinterpret_cast<const T *>(p); }
    __device__ void write(char *p) const { *reinterpret_cast<T *>(p) = raw; }
    __device__ void get(float (&to)[1]) const { to[0] = rows::to_float(raw); }
    __device__ void set(const float (&from)[1]) { rows::from_float(&raw, from[0]); }
};

template <> struct Word<__nv_bfloat16, 8> {
    static constexpr int kPer = 4;
    uint2 raw;
    __device__ void read(const char *p) { raw = __ldcs(reinterpret_cast<const uint2 *>(p)); }
    __device__ void write(char *p) const { __stcs(reinterpret_cast<uint2 *>(p), raw); }
    __device__ void get(float (&to)[4]) const
    {
        float all[8];
        rows::unpack<__nv_bfloat16>(all, make_uint4(raw.x, raw.y, 0, 0));
        for (int i = 0; i < 4; i++)
            to[i] = all[i];
    }
    __device__ void set(const float (&from)[4])
    {
        const float all[8] = {from[0], from[1], from[2], from[3]};
        const uint4 word = rows::pack<__nv_bfloat16>(all);
        raw = make_uint2(word.x, word.y);
    }
};

/* Where a pair's words are in its head; `second` is past the head where an odd word is copied alone. */
struct Pair {
    int64_t token;
    uint32_t head, first, second; /* bytes */
    uint32_t table;               /* of the pair's first angle */
    bool turns, here;
};

template <int kBytes, int kPer>
__device__ Pair pair_at(const Job &job, int64_t first_token, uint32_t item, uint32_t items)
{
    const uint32_t row = rows::divide(item, job.items), i = item - row * job.items.by;
    const uint32_t token = rows::divide(row, job.heads);
    Pair p;
    p.here = item < items;
    p.token = first_token + token;
    p.head = row - token * job.heads.by;
    p.turns = i < job.turning;
    p.first = (p.turns ? i : i + job.turning) * kBytes;
    p.second = p.first + (p.turns ? job.turning : job.apart) * kBytes;
    p.table = token * job.pairs.by + i * kPer;
    return p;
}

__device__ const char *source(const Job &job, const Pair &p)
{
    const bool of_q = p.head < job.q_heads;
    const Heads &h = of_q ? job.q : job.k;
    return h.in + p.token * h.in_token + (of_q ? p.head : p.head - job.q_heads) * h.in_head;
}

__device__ char *target(const Job &job, const Pair &p)
{
    const bool of_q = p.head < job.q_heads;
    const Heads &h = of_q ? job.q : job.k;
    return h.out + p.token * h.out_token + int64_t{of_q ? p.head : p.head - job.q_heads} * job.head_bytes;
}

template <typename T, int kBytes> __device__ void turn(Word<T, kBytes> &low, Word<T, kBytes> &high, const float2 *table)
{
    constexpr int kPer = Word<T, kBytes>::kPer;
    float a[kPer], b[kPer];
    low.get(a);
    high.get(b);
#pragma unroll
    for (int i = 0; i < kPer; i++) {
        const float2 cs = table[i];
        const float turned = a[i] * cs.x - b[i] * cs.y;
        b[i] = b[i] * cs.x + a[i] * cs.y;
        a[i] = turned;
    }
    low.set(a);
    high.set(b);
}

template <typename T, int kBytes>
__global__ void __launch_bounds__(kMostThreads) rope_kernel(const __grid_constant__ Job job)
{
    constexpr int kPer = Word<T, kBytes>::kPer;
    __shared__ float2 table[kTable];
    const int64_t first_token = static_cast<int64_t>(blockIdx.x) * job.block_tokens;
    const int64_t left = job.tokens - first_token;
    const uint32_t tokens = left < job.block_tokens ? static_cast<uint32_t>(left) : job.block_tokens;
    const uint32_t items = tokens * job.heads.by * job.items.by;
    bool first_batch = true;
    for (uint32_t base = threadIdx.x; first_batch || base < items; base += kBatch * blockDim.x) {
        Word<T, kBytes> low[kBatch], high[kBatch];
#pragma unroll
        for (int u = 0; u < kBatch; u++) {
            const Pair p = pair_at<kBytes, kPer>(job, first_token, base + u * blockDim.x, items);
            if (!p.here)
                continue;
            const char *const from = source(job, p);
            low[u].read(from + p.first);
            if (p.second < job.head_bytes)
                high[u].read(from + p.second);
        }
        if (first_batch) {
            fill_table(job, first_token, tokens, table);
            __syncthreads();
            first_batch = false;
        }
#pragma unroll
        for (int u = 0; u < kBatch; u++) {
            const Pair p = pair_at<kBytes, kPer>(job, first_token, base + u * blockDim.x, items);
            if (!p.here)
                continue;
            if (p.turns)
                turn<T, kBytes>(low[u], high[u], table + p.table);
            char *const to = target(job, p);
            low[u].write(to + p.first);
            if (p.second < job.head_bytes)
                high[u].write(to + p.second);
        }
    }
}

void plan_angles(const am_rope_args *a, Job *job)
{
    const int64_t pairs = a->rotary_dim / 2, half = pairs / 2;
    for (int64_t i = 0; i < pairs; i++) {
        const double exponent = a->vision ? 2.0 * static_cast<double>(i % half) / static_cast<double>(pairs)
                                          : 2.0 * static_cast<double>(i) / static_cast<double>(a->rotary_dim);
        job->frequency[i] = pow(a->theta, -exponent);
        if (a->vision)
            job->axis[i] = i >= half;
        else
            job->axis[i] = i % 3 != 0 && i < 3 * a->section.data[i % 3] ? static_cast<uint8_t>(i % 3) : 0;
    }
    job->pairs = rows::divisor(static_cast<uint32_t>(pairs));
    job->sign = a->inverse ? -1.0 : 1.0;
    const am_tensor &p = a->positions;
    job->positions = p.data;
    job->axis_stride = p.ndim == 1 ? 0 : p.stride[0];
    job->token_stride = p.stride[p.ndim - 1];
    job->wide = p.dtype == AM_I64;
}

Heads heads_of(const am_tensor &in, const am_tensor &out)
{
    const int64_t size = static_cast<int64_t>(am_dtype_size(in.dtype));
    return {static_cast<const char *>(in.data), static_cast<char *>(out.data), in.stride[0] * size, in.stride[1] * size,
            in.shape[1] * in.shape[2] * size};
}

/* The widest word that both halves, the rest and every head are whole numbers of. */
int word_bytes(const am_rope_args *a, const Job &job)
{
    const int64_t size = static_cast<int64_t>(am_dtype_size(a->q.dtype));
    for (int bytes = 16; bytes > size; bytes /= 2) {
        bool fine = a->rotary_dim / 2 * size % bytes == 0 && a->q.shape[2] * size % bytes == 0;
        for (const Heads *h : {&job.q, &job.k})
            fine = fine && reinterpret_cast<uintptr_t>(h->in) % bytes == 0 &&
                   reinterpret_cast<uintptr_t>(h->out) % bytes == 0 && h->in_token % bytes == 0 &&
                   h->in_head % bytes == 0;
        if (fine && (bytes == 16 || (bytes == 8 && size == 2)))
            return bytes;
    }
    return static_cast<int>(size);
}

template <typename T, int kBytes> am_status launch(Job job, int64_t heads, cudaStream_t stream)
{
    const int64_t words = job.head_bytes / kBytes, turning = job.pairs.by / Word<T, kBytes>::kPer;
    const int64_t copied = words - 2 * turning, items = turning + (copied + 1) / 2;
    AM_CHECK(heads * items < (1 << 28), AM_ERR_UNSUPPORTED, "rope: %lld heads of %lld bytes are beyond CUDA's rows",
             (long long)heads, (long long)job.head_bytes);
    job.turning = static_cast<uint32_t>(turning);
    job.apart = static_cast<uint32_t>((copied + 1) / 2);
    job.items = rows::divisor(static_cast<uint32_t>(items));
    job.heads = rows::divisor(static_cast<uint32_t>(heads));
    int64_t block_tokens = kMostThreads * kBatch / (heads * items);
    for (const int64_t most : {int64_t{kMostTokens}, int64_t{kTable} / job.pairs.by})
        block_tokens = block_tokens < most ? block_tokens : most;
    block_tokens = block_tokens > 1 ? block_tokens : 1;
    const int64_t threads = (block_tokens * heads * items + kBatch - 1) / kBatch;
    const int64_t blocks = (job.tokens + block_tokens - 1) / block_tokens;
    AM_CHECK(blocks <= INT32_MAX, AM_ERR_UNSUPPORTED, "rope: %lld tokens, CUDA takes up to %d", (long long)job.tokens,
             INT32_MAX);
    job.block_tokens = static_cast<uint32_t>(block_tokens);
    const int64_t block = threads < kMostThreads ? (threads + 31) / 32 * 32 : kMostThreads;
    rope_kernel<T, kBytes><<<static_cast<unsigned>(blocks), static_cast<unsigned>(block), 0, stream>>>(job);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

am_status run(const am_rope_args *a, cudaStream_t stream)
{
    Job job = {};
    plan_angles(a, &job);
    job.q = heads_of(a->q, a->q_out);
    job.k = heads_of(a->k, a->k_out);
    job.tokens = a->q.shape[0];
    const int64_t heads = a->q.shape[1] + a->k.shape[1];
    const int64_t head_bytes = a->q.shape[2] * static_cast<int64_t>(am_dtype_size(a->q.dtype));
    AM_CHECK(a->q.shape[1] < INT32_MAX && head_bytes < INT32_MAX, AM_ERR_UNSUPPORTED,
             "rope: %lld heads of %lld bytes are beyond CUDA's rows", (long long)a->q.shape[1], (long long)head_bytes);
    job.q_heads = static_cast<uint32_t>(a->q.shape[1]);
    job.head_bytes = static_cast<uint32_t>(head_bytes);
    const int bytes = word_bytes(a, job);
    if (a->q.dtype == AM_F32)
        return bytes == 16 ? launch<float, 16>(job, heads, stream) : launch<float, 4>(job, heads, stream);
    return bytes == 16  ? launch<__nv_bfloat16, 16>(job, heads, stream)
           : bytes == 8 ? launch<__nv_bfloat16, 8>(job, heads, stream)
                        : launch<__nv_bfloat16, 2>(job, heads, stream);
}

} // namespace

extern "C" am_status am_cuda_rope(const am_rope_args *a, const am_exec *ex) { return on_device(run, a, ex); }
