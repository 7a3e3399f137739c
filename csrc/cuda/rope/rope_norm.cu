/* rope_norm.cu -- RMSNorm of every head of q and k and their rotary embedding in one pass, forward and backward.
 *
 *   a row is one head of one token: kLanes neighbouring threads hold it, kChunks 16-byte words each; the words that
 *   turn are all in the first chunk, and a lane gets the words that its own turn against from the lane that has them
 *   forward   a block has whole tokens, kRows rows a group of lanes at a time, asked for before the block makes the
 *             cosines and sines of its tokens (float64 angles) and its weights in shared memory
 *   backward  block = one run of the weight gradients, a multiprocessor each; `batch` rows at a time, the next ones and
 *             the positions of the batch after them on their way; two tables of cosines by turns; a thread's columns of
 *             both weights' gradients in float32 registers, then group by group in float64, then run by run by a second
 *             kernel: one order, the same bits
 *
 * Rows that are no whole aligned words, or whose turning part is wider than a chunk, go to rope_norm_plain.cu.
 *
 * Floor: q and k read and written once over the copy rate of the memory; backward reads both, their gradients, and
 * writes as much as it reads of one of them. 32K tokens of 32 + 2 heads of 256 in bfloat16: 1.14 GB forward, 0.27 ms
 * at 4,277 GB/s; 1.71 GB backward, 0.40 ms. Two passes move 2.28 and 2.85 GB.
 *
 * Measured on an H200, 32K tokens, q every other head of its projection, beside rms_norm of both and mrope, ms:
 *   heads    forward          backward         copy, forward
 *   32 + 2   0.408 of 0.597   0.618 of 0.763   0.271
 *   24 + 4   0.358 of 0.495   0.524 of 0.639   0.224
 *   16 + 4   0.254 of 0.360   0.380 of 0.465   0.162
 * So 1.4 and 1.2 times two passes, but 0.67 of the copy forward where 0.92 was predicted.
 */
#include "on_device.h"
#include "rope_norm.cuh"

namespace
{

using namespace rope_norms;
using rows::kPer;

constexpr int kForwardThreads = 544, kForwardRows = 68; /* of a block, at most and about: two tokens of 34 heads */
constexpr int kRunThreads = 512;                        /* of a block of the backward pass */
constexpr int kTable = 512;                             /* cosines and sines of a block's tokens */

/* Lanes of a group that hold the words which turn, in halves of `half`; what a lane does with its words. */
struct Turn {
    int half, partner, table;
    float sign;
    bool here;
};

template <int kLanes> __device__ Turn turn_of(int pairs, int per)
{
    const int lane = threadIdx.x % kLanes;
    Turn t;
    t.half = pairs / per;
    t.here = lane < 2 * t.half;
    t.partner = !t.here ? lane : lane < t.half ? lane + t.half : lane - t.half;
    t.table = (lane < t.half ? lane : lane - t.half) * per;
    t.sign = lane < t.half ? -1.0f : 1.0f;
    return t;
}

template <int kLanes> __device__ float sum_of(float value)
{
#pragma unroll
    for (int away = kLanes / 2; away > 0; away /= 2)
        value += __shfl_xor_sync(0xffffffffu, value, away);
    return value;
}

/* own cos + sign other sin of the lanes that turn; forth: 1, back: -1. */
template <int kPer_>
__device__ void turn(float (&own)[kPer_], const float (&other)[kPer_], const Turn &t, const float2 *table, float forth)
{
    if (!t.here)
        return;
#pragma unroll
    for (int i = 0; i < kPer_; i++) {
        const float2 cs = table[t.table + i];
        own[i] = own[i] * cs.x + other[i] * (cs.y * t.sign * forth);
    }
}

template <typename T> __device__ void weights_at(float (&to)[kPer<T>], const float *shared, int word)
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

/* weight[2, n] of q and k, the shift added. */
template <class Job> __device__ void fill_weights(const Job &p, float *weight)
{
    for (int i = threadIdx.x; i < p.n; i += blockDim.x) {
        weight[i] = element(p.q_weight, i, p.q_weight_bf16) + p.shift;
        weight[p.n + i] = element(p.k_weight, i, p.k_weight_bf16) + p.shift;
    }
}

template <typename T, int kLanes, int kChunks>
__device__ void norm_row(const Forward &p, const uint4 (&in)[kChunks], int64_t token, uint32_t head, bool here,
                         const float *weight, const Turn &t, const float2 *table)
{
    const int lane = threadIdx.x % kLanes, words = p.n / kPer<T>;
    const bool keys = head >= p.q_heads;
    float x[kChunks][kPer<T>], squares = 0.0f;
#pragma unroll
    for (int j = 0; j < kChunks; j++) {
        rows::unpack<T>(x[j], in[j]);
#pragma unroll
        for (int i = 0; i < kPer<T>; i++)
            squares += x[j][i] * x[j][i];
    }
    const float rstd = __frsqrt_rn(sum_of<kLanes>(squares) / static_cast<float>(p.n) + p.eps);
    if (lane == 0 && here)
        p.rstd[token * p.heads.by + head] = rstd;
    const Heads &h = keys ? p.k : p.q;
    char *const to = h.out + token * h.out_token + int64_t{keys ? head - p.q_heads : head} * p.n * sizeof(T);
#pragma unroll
    for (int j = 0; j < kChunks; j++) {
        const int word = lane + j * kLanes;
        if (word < words) {
            float w[kPer<T>];
            weights_at<T>(w, weight + (keys ? p.n : 0), word);
#pragma unroll
            for (int i = 0; i < kPer<T>; i++)
                x[j][i] = x[j][i] * rstd * w[i];
        }
        if (j == 0) {
            float other[kPer<T>];
#pragma unroll
            for (int i = 0; i < kPer<T>; i++)
                other[i] = __shfl_sync(0xffffffffu, x[0][i], t.partner, kLanes);
            turn(x[0], other, t, table, 1.0f);
        }
        if (word < words && here)
            rows::store(to + 16 * word, rows::pack<T>(x[j]));
    }
}

template <typename T, int kLanes, int kChunks, int kRows>
__global__ void __launch_bounds__(kForwardThreads, 2) rope_norm_kernel(const __grid_constant__ Forward p)
{
    extern __shared__ float4 shared[];
    float *const weight = reinterpret_cast<float *>(shared);
    float2 *const table = reinterpret_cast<float2 *>(weight + 2 * p.n);
    const int lane = threadIdx.x % kLanes, words = p.n / kPer<T>;
    const uint32_t group = threadIdx.x / kLanes, groups = blockDim.x / kLanes;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * p.block_tokens, left = p.tokens - first;
    const uint32_t tokens = left < p.block_tokens ? static_cast<uint32_t>(left) : p.block_tokens;
    const uint32_t count = tokens * p.heads.by;
    const Turn t = turn_of<kLanes>(static_cast<int>(p.angles.pairs.by), kPer<T>);
    for (uint32_t base = 0; base < count; base += groups * kRows) {
        uint4 in[kRows][kChunks];
#pragma unroll
        for (int u = 0; u < kRows; u++) {
            const uint32_t row = base + u * groups + group, token = rows::divide(row, p.heads);
            const uint32_t head = row - token * p.heads.by;
            const bool keys = head >= p.q_heads;
            const Heads &h = keys ? p.k : p.q;
            const char *const from =
                h.in + (first + token) * h.in_token + int64_t{keys ? head - p.q_heads : head} * h.in_head;
#pragma unroll
            for (int j = 0; j < kChunks; j++) {
                const int word = lane + j * kLanes;
                in[u][j] = row < count && word < words ? rows::load(from + 16 * word) : make_uint4(0, 0, 0, 0);
            }
        }
        if (base == 0) {
            fill_weights(p, weight);
            ropes::fill_table(p.angles, first, tokens, table);
            __syncthreads();
        }
#pragma unroll
        for (int u = 0; u < kRows; u++) {
            const uint32_t row = base + u * groups + group;
            const bool here = row < count;
            const uint32_t token = here ? rows::divide(row, p.heads) : 0;
            norm_row<T, kLanes, kChunks>(p, in[u], first + token, here ? row - token * p.heads.by : 0, here, weight, t,
                                         table + token * p.angles.pairs.by);
        }
    }
}

/* Where a batch begins, and how far the next one of the block is. */
struct Place {
    int64_t token;
    uint32_t head;
    __device__ void advance(int64_t tokens, uint32_t more, uint32_t heads)
    {
        token += tokens;
        head += more;
        if (head >= heads) {
            head -= heads;
            token++;
        }
    }
};

/* The rows of one group in a batch. */
template <typename T, int kLanes, int kChunks, int kRows> struct Batch {
    uint4 dy[kRows][kChunks], x[kRows][kChunks];
    float rstd[kRows];

    __device__ void read(const Backward &p, const Place &at)
    {
        const int lane = threadIdx.x % kLanes, words = p.n / kPer<T>;
        const uint32_t group = threadIdx.x / kLanes, groups = blockDim.x / kLanes;
#pragma unroll
        for (int u = 0; u < kRows; u++) {
            const uint32_t row = u * groups + group, beyond = rows::divide(at.head + row, p.heads);
            const int64_t token = at.token + beyond;
            const uint32_t head = at.head + row - beyond * p.heads.by;
            const bool here = row < p.batch && token < p.tokens, keys = head >= p.q_heads;
            const int64_t which = keys ? head - p.q_heads : head;
            const char *const from_x = keys ? p.k.in + token * p.k.in_token + which * p.k.in_head
                                            : p.q.in + token * p.q.in_token + which * p.q.in_head;
            const char *const from_dy =
                keys ? p.dk + token * p.dk_token + which * p.dk_head : p.dq + token * p.dq_token + which * p.dq_head;
#pragma unroll
            for (int j = 0; j < kChunks; j++) {
                const int word = lane + j * kLanes;
                const bool real = here && word < words;
                dy[u][j] = real ? rows::load(from_dy + 16 * word) : make_uint4(0, 0, 0, 0);
                x[u][j] = real ? rows::load(from_x + 16 * word) : make_uint4(0, 0, 0, 0);
            }
            rstd[u] = here ? __ldg(p.rstd + token * p.heads.by + head) : 0.0f;
        }
    }
};

/* Row u of the group: dx written, its part of a weight's gradient added to `sums`. */
template <typename T, int kLanes, int kChunks, int kRows>
__device__ void grad_row(const Backward &p, const Batch<T, kLanes, kChunks, kRows> &b, int u, const Place &at,
                         const float *weight, const Turn &t, const float2 *table, float (&sums)[2][kChunks][kPer<T>])
{
    const int lane = threadIdx.x % kLanes, words = p.n / kPer<T>;
    const uint32_t row = u * (blockDim.x / kLanes) + threadIdx.x / kLanes;
    const uint32_t beyond = rows::divide(at.head + row, p.heads), head = at.head + row - beyond * p.heads.by;
    const int64_t token = at.token + beyond;
    const bool here = row < p.batch && token < p.tokens, keys = head >= p.q_heads;
    const float rstd = b.rstd[u];
    float g[kChunks][kPer<T>], other[kPer<T>], total = 0.0f;
    const uint4 mine = b.dy[u][0];
    const uint4 theirs = make_uint4(
        __shfl_sync(0xffffffffu, mine.x, t.partner, kLanes), __shfl_sync(0xffffffffu, mine.y, t.partner, kLanes),
        __shfl_sync(0xffffffffu, mine.z, t.partner, kLanes), __shfl_sync(0xffffffffu, mine.w, t.partner, kLanes));
    rows::unpack<T>(other, theirs);
    const float *const w_row = weight + (keys ? p.n : 0);
#pragma unroll
    for (int j = 0; j < kChunks; j++) {
        rows::unpack<T>(g[j], b.dy[u][j]);
        if (j == 0 && here)
            turn(g[0], other, t, table + beyond * p.angles.pairs.by, -1.0f);
        const int word = lane + j * kLanes;
        if (word < words) {
            float x[kPer<T>], w[kPer<T>];
            rows::unpack<T>(x, b.x[u][j]);
            weights_at<T>(w, w_row, word);
#pragma unroll
            for (int i = 0; i < kPer<T>; i++)
                total += g[j][i] * w[i] * x[i];
        }
    }
    const float slope = sum_of<kLanes>(total) * rstd * (1.0f / static_cast<float>(p.n));
    const Heads &h = keys ? p.k : p.q;
    char *const to = h.out + token * h.out_token + int64_t{keys ? head - p.q_heads : head} * p.n * sizeof(T);
#pragma unroll
    for (int j = 0; j < kChunks; j++) {
        const int word = lane + j * kLanes;
        if (word >= words || !here)
            break;
        float x[kPer<T>], w[kPer<T>], dx[kPer<T>];
        rows::unpack<T>(x, b.x[u][j]);
        weights_at<T>(w, w_row, word);
#pragma unroll
        for (int i = 0; i < kPer<T>; i++) {
            const float normed = x[i] * rstd;
            dx[i] = rstd * (g[j][i] * w[i] - normed * slope);
            g[j][i] *= normed;
        }
        if (keys) {
#pragma unroll
            for (int i = 0; i < kPer<T>; i++)
                sums[1][j][i] += g[j][i];
        } else {
#pragma unroll
            for (int i = 0; i < kPer<T>; i++)
                sums[0][j][i] += g[j][i];
        }
        rows::store(to + 16 * word, rows::pack<T>(dx));
    }
}

/* The groups' sums of every column, in their order, to this block's run. */
template <typename T, int kLanes, int kChunks>
__device__ void write_run(const Backward &p, const float (&sums)[2][kChunks][kPer<T>], float *all)
{
    constexpr int kWide = kLanes * kPer<T>; /* columns a chunk */
    double *const run = p.partials + static_cast<int64_t>(blockIdx.x) * 2 * p.n;
#pragma unroll
    for (int s = 0; s < 2; s++)
#pragma unroll
        for (int j = 0; j < kChunks; j++) {
            __syncthreads();
#pragma unroll
            for (int i = 0; i < kPer<T>; i++)
                all[threadIdx.x * kPer<T> + i] = sums[s][j][i];
            __syncthreads();
            for (int column = threadIdx.x; column < kWide && column + j * kWide < p.n; column += blockDim.x) {
                double total = 0.0;
                for (uint32_t group = 0; group < blockDim.x / kLanes; group++)
                    total += static_cast<double>(all[group * kWide + column]);
                run[static_cast<int64_t>(s) * p.n + j * kWide + column] = total;
            }
        }
}

/* The thread's angle of a batch: one of `tokens` times pairs, as many as the batch touches. */
struct Item {
    uint32_t token, pair;
    bool here;
    __device__ int64_t position(const Backward &p, const Place &at) const
    {
        return here && at.token + token < p.tokens ? ropes::position_at(p.angles, at.token + token, pair) : 0;
    }
};

template <typename T, int kLanes, int kChunks, int kRows>
__global__ void __launch_bounds__(kRunThreads, 1) rope_norm_grad_kernel(const __grid_constant__ Backward p)
{
    extern __shared__ float4 shared[];
    __shared__ float2 table[2][kRunThreads];
    float *const weight = reinterpret_cast<float *>(shared);
    fill_weights(p, weight);
    const Turn t = turn_of<kLanes>(static_cast<int>(p.angles.pairs.by), kPer<T>);
    const int64_t step = static_cast<int64_t>(gridDim.x) * p.batch, step_tokens = step / p.heads.by;
    const uint32_t more = static_cast<uint32_t>(step - step_tokens * p.heads.by);
    const int64_t begin = static_cast<int64_t>(blockIdx.x) * p.batch;
    Item item;
    item.token = rows::divide(threadIdx.x, p.angles.pairs);
    item.pair = threadIdx.x - item.token * p.angles.pairs.by;
    item.here = item.token <= (p.batch + p.heads.by - 2) / p.heads.by && item.token * p.angles.pairs.by < kRunThreads;

    Place at = {begin / p.heads.by, 0}, after;
    at.head = static_cast<uint32_t>(begin - at.token * p.heads.by);
    float sums[2][kChunks][kPer<T>] = {};
    Batch<T, kLanes, kChunks, kRows> now, next;
    now.read(p, at);
    table[0][threadIdx.x] = ropes::turn_by(p.angles, item.position(p, at), item.here ? item.pair : 0);
    after = at;
    after.advance(step_tokens, more, p.heads.by);
    int64_t position = item.position(p, after);
    for (int turn = 0; at.token < p.tokens; turn ^= 1) {
        next.read(p, after);
        __syncthreads(); /* this batch's table is there, the one before is no longer read */
        table[turn ^ 1][threadIdx.x] = ropes::turn_by(p.angles, position, item.here ? item.pair : 0);
        Place last = after;
        last.advance(step_tokens, more, p.heads.by);
        position = item.position(p, last);
#pragma unroll
        for (int u = 0; u < kRows; u++)
            grad_row<T, kLanes, kChunks, kRows>(p, now, u, at, weight, t, table[turn], sums);
        now = next;
        at = after;
        after = last;
    }
    write_run<T, kLanes, kChunks>(p, sums, weight);
}

constexpr int kColumns = 32, kParts = 32;

/* Column x of a block adds every kParts-th run in y's order, then the parts one after another. */
__global__ void __launch_bounds__(kColumns *kParts)
    rope_norm_total_kernel(void *dq_weight, void *dk_weight, const double *partials, int runs, int n, bool q_bf16,
                           bool k_bf16)
{
    __shared__ double part[kParts][kColumns + 1];
    const int column = static_cast<int>(blockIdx.x) * kColumns + static_cast<int>(threadIdx.x);
    void *const out = blockIdx.y == 0 ? dq_weight : dk_weight;
    if (out == nullptr)
        return;
    double total = 0.0;
    if (column < n)
        for (int run = static_cast<int>(threadIdx.y); run < runs; run += kParts)
            total += partials[(static_cast<int64_t>(run) * 2 + blockIdx.y) * n + column];
    part[threadIdx.y][threadIdx.x] = total;
    __syncthreads();
    if (threadIdx.y != 0 || column >= n)
        return;
    for (int y = 1; y < kParts; y++)
        total += part[y][threadIdx.x];
    if (blockIdx.y == 0 ? q_bf16 : k_bf16)
        static_cast<__nv_bfloat16 *>(out)[column] = __float2bfloat16_rn(static_cast<float>(total));
    else
        static_cast<float *>(out)[column] = static_cast<float>(total);
}

/* Whole words, the part that turns in the first chunk of `lanes`. */
bool in_words(const am_rope_args &a, int per, int lanes)
{
    return a.q.shape[2] % per == 0 && a.rotary_dim % (2 * per) == 0 && a.rotary_dim / per <= lanes;
}

bool aligned(const am_tensor &t)
{
    const int64_t size = static_cast<int64_t>(am_dtype_size(t.dtype));
    return reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && t.stride[0] * size % 16 == 0 &&
           t.stride[1] * size % 16 == 0;
}

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

template <typename T, int kLanes, int kChunks, int kRows> am_status launch_forward(Forward p, cudaStream_t stream)
{
    const int64_t heads = p.heads.by, pairs = p.angles.pairs.by;
    int64_t tokens = kForwardRows * 32 / kLanes / heads;
    tokens = tokens < kTable / pairs ? tokens : kTable / pairs;
    tokens = tokens > 1 ? tokens : 1;
    const int64_t threads = round_up((tokens * heads + kRows - 1) / kRows * kLanes, 32);
    const int64_t blocks = (p.tokens + tokens - 1) / tokens;
    AM_CHECK(blocks <= INT32_MAX, AM_ERR_UNSUPPORTED, "qk_norm_mrope: %lld tokens are beyond CUDA's rows",
             (long long)p.tokens);
    p.block_tokens = static_cast<uint32_t>(tokens);
    const size_t bytes =
        static_cast<size_t>(2 * p.n) * sizeof(float) + static_cast<size_t>(tokens * pairs) * sizeof(float2);
    rope_norm_kernel<T, kLanes, kChunks, kRows>
        <<<static_cast<unsigned>(blocks), static_cast<unsigned>(threads < kForwardThreads ? threads : kForwardThreads),
           bytes, stream>>>(p);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

template <typename T> am_status launch_forward_by_length(const Forward &p, cudaStream_t stream)
{
    const int words = p.n / kPer<T>;
    if (words <= 16)
        return launch_forward<T, 16, 1, 4>(p, stream);
    if (words <= 32)
        return launch_forward<T, 32, 1, 4>(p, stream);
    return launch_forward<T, 32, 2, 2>(p, stream);
}

/* Lanes that hold a row of so many words; 0: too many. */
int lanes_of(int64_t words) { return words <= 16 ? 16 : words <= 64 ? 32 : 0; }

bool few(const am_rope_args &a) { return a.q.shape[1] + a.k.shape[1] < (1 << 20) && a.q.shape[2] * 4 < INT32_MAX; }

am_status forward(const am_rope_norm_args *a, cudaStream_t stream)
{
    const am_rope_args &rope = a->rope;
    const bool bf16 = rope.q.dtype == AM_BF16;
    const int per = bf16 ? 8 : 4;
    AM_CHECK(few(rope), AM_ERR_UNSUPPORTED, "qk_norm_mrope: %lld heads of %lld elements are beyond CUDA's rows",
             (long long)(rope.q.shape[1] + rope.k.shape[1]), (long long)rope.q.shape[2]);
    Forward p = {};
    p.q = ropes::heads_of(rope.q, rope.q_out);
    p.k = ropes::heads_of(rope.k, rope.k_out);
    p.q_weight = a->q_weight.data;
    p.k_weight = a->k_weight.data;
    p.q_weight_bf16 = a->q_weight.dtype == AM_BF16;
    p.k_weight_bf16 = a->k_weight.dtype == AM_BF16;
    p.rstd = static_cast<float *>(a->rstd.data);
    p.tokens = rope.q.shape[0];
    p.heads = rows::divisor(static_cast<uint32_t>(rope.q.shape[1] + rope.k.shape[1]));
    p.q_heads = static_cast<uint32_t>(rope.q.shape[1]);
    p.n = static_cast<int>(rope.q.shape[2]);
    p.eps = static_cast<float>(a->eps);
    p.shift = a->zero_centered ? 1.0f : 0.0f;
    p.angles = ropes::angles_of(&rope);
    const int lanes = lanes_of((p.n + per - 1) / per);
    if (lanes == 0 || !in_words(rope, per, lanes) || !aligned(rope.q) || !aligned(rope.k) || !aligned(rope.q_out) ||
        !aligned(rope.k_out))
        return forward_plain(p, bf16, stream);
    return bf16 ? launch_forward_by_length<__nv_bfloat16>(p, stream) : launch_forward_by_length<float>(p, stream);
}

template <typename T, int kLanes, int kChunks, int kRows>
am_status launch_backward(Backward p, int runs, cudaStream_t stream)
{
    constexpr int64_t kMostRows = kRunThreads / kLanes * kRows;
    const int64_t heads = p.heads.by, tokens = kRunThreads / p.angles.pairs.by; /* that the tables have room for */
    const int64_t most = tokens * heads - heads + 1; /* rows that touch no more of them, wherever they begin */
    p.batch = static_cast<uint32_t>(most < kMostRows ? most : kMostRows);
    const size_t weights = static_cast<size_t>(2 * p.n) * sizeof(float), sums = kRunThreads * kPer<T> * sizeof(float);
    const size_t bytes = weights < sums ? sums : weights;
    const unsigned blocks = static_cast<unsigned>(runs);
    rope_norm_grad_kernel<T, kLanes, kChunks, kRows><<<blocks, kRunThreads, bytes, stream>>>(p);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

template <typename T> am_status launch_backward_by_length(const Backward &p, int runs, cudaStream_t stream)
{
    const int words = p.n / kPer<T>;
    if (words <= 16)
        return launch_backward<T, 16, 1, 4>(p, runs, stream);
    if (words <= 32)
        return launch_backward<T, 32, 1, 4>(p, runs, stream);
    return launch_backward<T, 32, 2, sizeof(T) == 4 ? 2 : 1>(p, runs, stream);
}

am_status backward(const am_rope_norm_grad_args *a, cudaStream_t stream)
{
    const am_rope_args &rope = a->rope;
    const bool bf16 = rope.q.dtype == AM_BF16;
    const int per = bf16 ? 8 : 4, size = bf16 ? 2 : 4;
    const int64_t runs = a->partials.shape[0];
    AM_CHECK(few(rope) && runs <= INT32_MAX, AM_ERR_UNSUPPORTED,
             "qk_norm_mrope: %lld heads of %lld elements, %lld runs are beyond CUDA's rows",
             (long long)(rope.q.shape[1] + rope.k.shape[1]), (long long)rope.q.shape[2], (long long)runs);
    Backward p = {};
    p.q = ropes::heads_of(rope.q, rope.q_out);
    p.k = ropes::heads_of(rope.k, rope.k_out);
    p.dq = static_cast<const char *>(a->dq_out.data);
    p.dk = static_cast<const char *>(a->dk_out.data);
    p.dq_token = a->dq_out.stride[0] * size;
    p.dq_head = a->dq_out.stride[1] * size;
    p.dk_token = a->dk_out.stride[0] * size;
    p.dk_head = a->dk_out.stride[1] * size;
    p.q_weight = a->q_weight.data;
    p.k_weight = a->k_weight.data;
    p.q_weight_bf16 = a->q_weight.dtype == AM_BF16;
    p.k_weight_bf16 = a->k_weight.dtype == AM_BF16;
    p.rstd = static_cast<const float *>(a->rstd.data);
    p.partials = static_cast<double *>(a->partials.data);
    const int64_t heads = rope.q.shape[1] + rope.k.shape[1];
    p.tokens = heads > 0 ? rope.q.shape[0] : 0;
    p.heads = rows::divisor(static_cast<uint32_t>(heads > 0 ? heads : 1));
    p.q_heads = static_cast<uint32_t>(rope.q.shape[1]);
    p.n = static_cast<int>(rope.q.shape[2]);
    p.shift = a->zero_centered ? 1.0f : 0.0f;
    p.angles = ropes::angles_of(&rope);
    const int lanes = lanes_of((p.n + per - 1) / per);
    bool fits = lanes > 0 && in_words(rope, per, lanes);
    for (const am_tensor *t : {&rope.q, &rope.k, &rope.q_out, &rope.k_out, &a->dq_out, &a->dk_out})
        fits = fits && aligned(*t);
    if (!fits)
        AM_TRY(backward_plain(p, static_cast<int>(runs), bf16, stream));
    else if (bf16)
        AM_TRY(launch_backward_by_length<__nv_bfloat16>(p, static_cast<int>(runs), stream));
    else
        AM_TRY(launch_backward_by_length<float>(p, static_cast<int>(runs), stream));
    void *const dq_weight = rows::given(a->dq_weight) ? a->dq_weight.data : nullptr;
    void *const dk_weight = rows::given(a->dk_weight) ? a->dk_weight.data : nullptr;
    if (dq_weight == nullptr && dk_weight == nullptr)
        return AM_OK;
    const dim3 grid(static_cast<unsigned>((p.n + int64_t{kColumns} - 1) / kColumns), 2);
    rope_norm_total_kernel<<<grid, dim3(kColumns, kParts), 0, stream>>>(
        dq_weight, dk_weight, p.partials, static_cast<int>(runs), p.n, a->dq_weight.dtype == AM_BF16,
        a->dk_weight.dtype == AM_BF16);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

} // namespace

extern "C" am_status am_cuda_rope_norm_forward(const am_rope_norm_args *a, const am_exec *ex)
{
    return on_device(forward, a, ex);
}

extern "C" am_status am_cuda_rope_norm_backward(const am_rope_norm_grad_args *a, const am_exec *ex)
{
    return on_device(backward, a, ex);
}
