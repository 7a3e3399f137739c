/* gdn_prepare_sm90.cu -- what a chunk needs of its own tokens alone, for every value head: T = (I + A)^-1, P, decays.
 *
 *   block = chunk and key head, four warps; everything is 10 squares of 16 x 16 on and below the diagonal
 *     rows of k and q -> shared, 1 / |k|, 1 / |q|
 *     k k^T, q k^T: mma of bf16, a warp a row of squares -> shared, 16 bytes a lane as the product leaves them
 *     a warp a value head: c by a scan in float64; squares of A (registers) and P (out) from the products, the decays
 *       and beta; the diagonal's four inverses by substitution in shared memory, two columns a lane, float32
 *       below it -T22 (A21 T11) of 16 x 16, then of 32 x 32, mma of tf32: a square in registers is a left operand, or
 *       transposed a right one, so (A21 T11)^T = T11^T A21^T comes first and only squares of T go through memory
 *       T beta (out), bf16
 *
 * A decay times a length is one exponential: 2^(c_i - c_j + log2(1 / |k_j|)).
 *
 * Bytes a chunk: k, q 32 KB a key head; T, P 16 KB and 1 KB of numbers a value head. With 16 and 64 heads, 32K tokens:
 * 0.27 GB read and 0.57 GB written, 0.2 ms. 4 MFLOP of bf16 a key head and 0.2 of tf32 a value head are nothing
 * beside it. Measured on an H200, 32K tokens: 0.38 ms, four blocks a multiprocessor; 0.39 with three and their 168
 * registers; 0.57 when whole matrices went through shared memory and two blocks fitted.
 */
#include "gdn_sm90.cuh"

namespace
{

using namespace gdn_sm90;
using gdn::Range;

constexpr int kThreads = 128, kWarps = 4, kBlocks = 4, kRow = kDim + 8, kLd = 20;
constexpr int kSquare = 16 * kLd + 8, kSquares = 10; /* of 16 x 16: floats of one, those on and below the diagonal */

struct Gates { /* of a value head: log2 of exp(c) and of exp(c) |k|, beta / |k|, beta */
    alignas(16) float c[kChunk], from[kChunk], left[kChunk], beta[kChunk];
};

/* A square in registers as a product leaves it: rows lane / 4 and 8 on (r), columns lane % 4 * 2 and the next (e), and
 * 8 columns on (half), at 4 half + 2 r + e. */
using Square = float[8];

/* Where its halves are in shared memory, 16 bytes a lane. */
struct Squares {
    float4 at[kSquares][2][32];
};

struct Smem {
    union {
        __nv_bfloat16 rows[2][kChunk][kRow]; /* k and q */
        struct {
            Squares kk, qk;
            float inverse[kWarps][5]
                         [kSquare]; /* squares of A's diagonal, then of T's, and T's second below its first */
        };
    };
    float key[kChunk], query[kChunk]; /* 1 / |k|, scale / |q| */
    Gates gates[kWarps];
    Range docs, places; /* here, since registers are short */
};

__host__ __device__ constexpr int square_of(int i, int j) { return i * (i + 1) / 2 + j; }

/* A thread's pieces of a head's rows, zeros behind the document. */
struct Pieces {
    uint4 word[8];
};

__device__ __forceinline__ void load_rows(Pieces &to, const gdn::View &v, int64_t token, int n, int head)
{
    const int first = static_cast<int>(threadIdx.x / 16);
    const __nv_bfloat16 *const base =
        static_cast<const __nv_bfloat16 *>(v.data) + token * v.token + head * v.head + threadIdx.x % 16 * 8;
#pragma unroll
    for (int i = 0; i < 8; i++)
        to.word[i] =
            first + 8 * i < n ? __ldg(reinterpret_cast<const uint4 *>(base + (first + 8 * i) * v.token)) : uint4{};
}

/* They to shared memory; factor / |row| of each. */
__device__ __forceinline__ void store_rows(const Pieces &of, const Call &p, float factor, __nv_bfloat16 (*to)[kRow],
                                           float *lengths)
{
    const int piece = static_cast<int>(threadIdx.x % 16), first = static_cast<int>(threadIdx.x / 16);
    float sum[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint32_t part[4] = {of.word[i].x, of.word[i].y, of.word[i].z, of.word[i].w};
        sum[i] = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float low = __uint_as_float(part[j] << 16), high = __uint_as_float(part[j] & 0xffff0000u);
            sum[i] = fmaf(low, low, fmaf(high, high, sum[i]));
        }
        *reinterpret_cast<uint4 *>(&to[first + 8 * i][8 * piece]) = of.word[i];
    }
#pragma unroll
    for (int step = 1; step < 16; step *= 2)
#pragma unroll
        for (int i = 0; i < 8; i++)
            sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], step);
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (piece == i)
            lengths[first + 8 * i] = p.l2norm ? factor / sqrtf(sum[i] + 1e-6f) : factor;
}

/* The warp's 16 rows of k k^T and q k^T up to their diagonal. */
__device__ __forceinline__ void multiply(Smem &s)
{
    const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32), row0 = 16 * warp;
    float sums[2][8][4] = {};
#pragma unroll
    for (int step = 0; step < kDim / 16; step++) {
        uint32_t left[2][4];
#pragma unroll
        for (int i = 0; i < 2; i++)
            ptx::ldmatrix_x4(left[i], &s.rows[i][row0 + lane % 16][16 * step + lane / 16 * 8]);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (j > warp)
                continue;
            uint32_t right[4];
            ptx::ldmatrix_x4(right, &s.rows[0][16 * j + lane % 8 + lane / 16 * 8][16 * step + lane / 8 % 2 * 8]);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                ptx::mma_m16n8k16_bf16(sums[i][2 * j], left[i], right[0], right[1]);
                ptx::mma_m16n8k16_bf16(sums[i][2 * j + 1], left[i], right[2], right[3]);
            }
        }
    }
    __syncthreads(); /* the rows have been read */
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (j > warp)
            continue;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float (&kk)[4] = sums[0][2 * j + half], (&qk)[4] = sums[1][2 * j + half];
            s.kk.at[square_of(warp, j)][half][lane] = make_float4(kk[0], kk[1], kk[2], kk[3]);
            s.qk.at[square_of(warp, j)][half][lane] = make_float4(qk[0], qk[1], qk[2], qk[3]);
        }
    }
}

/* A lane's two numbers of a chunk, 0 behind the document. */
struct Two {
    float first, second;
};

__device__ __forceinline__ Two two_of(const gdn::View &v, int64_t token, int n, int head, bool wanted)
{
    const int i = 2 * static_cast<int>(threadIdx.x % 32);
    return {wanted && i < n ? v.number(token + i, head) : 0.0f,
            wanted && i + 1 < n ? v.number(token + i + 1, head) : 0.0f};
}

/* c, that of lengths and beta of a value head to shared memory, its numbers out. */
__device__ void load_gates(const Two &g, const Two &betas, const Prepared &to, const Smem &s, Gates &of, int64_t own,
                           int n, int head)
{
    constexpr double kLog2e = 1.4426950408889634;
    const int lane = static_cast<int>(threadIdx.x % 32), i = 2 * lane;
    const double first = static_cast<double>(g.first), both = first + static_cast<double>(g.second);
    double sum = both;
    for (int step = 1; step < 32; step *= 2) {
        const double left = __shfl_up_sync(0xffffffffu, sum, step);
        sum += lane >= step ? left : 0.0;
    }
    double before = __shfl_up_sync(0xffffffffu, sum, 1);
    before = lane == 0 ? 0.0 : before;
    const double running[2] = {before + first, before + both}, last = __shfl_sync(0xffffffffu, running[1], 31);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const float c = static_cast<float>(kLog2e * running[j]), key = s.key[i + j], query = s.query[i + j];
        const float e = exp2f(c), f = exp2f(static_cast<float>(kLog2e * (last - running[j])));
        const float beta = j == 0 ? betas.first : betas.second;
        of.c[i + j] = c;
        of.from[i + j] = c - __log2f(key);
        of.left[i + j] = beta * key;
        of.beta[i + j] = beta;
        if (i + j < n)
            __stwb(to.numbers + head * to.stride + own + i + j, make_float4(e * key, f * key, e * query, e));
        if (i + j < n && to.more != nullptr)
            __stwb(to.more + head * to.stride + own + i + j, make_float4(beta, query, of.from[i + j], c));
    }
    __syncwarp();
}

__device__ __forceinline__ void load_square(Square &to, const Squares &from, int at)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float4 four = from.at[at][half][threadIdx.x % 32];
        to[4 * half] = four.x;
        to[4 * half + 1] = four.y;
        to[4 * half + 2] = four.z;
        to[4 * half + 3] = four.w;
    }
}

/* Of a square of floats in rows of kLd, or its transpose. */
template <bool kTransposed = false> __device__ __forceinline__ void load_square(Square &to, const float *from)
{
    const int lane = static_cast<int>(threadIdx.x % 32), row = lane / 4, column = lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int i = row + 8 * r, j = column + 8 * half;
            const float2 two = kTransposed ? make_float2(from[j * kLd + i], from[(j + 1) * kLd + i])
                                           : *reinterpret_cast<const float2 *>(from + i * kLd + j);
            to[4 * half + 2 * r] = two.x;
            to[4 * half + 2 * r + 1] = two.y;
        }
}

__device__ __forceinline__ void store_square(float *to, const Square &x)
{
    const int lane = static_cast<int>(threadIdx.x % 32), row = lane / 4, column = lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int r = 0; r < 2; r++)
            *reinterpret_cast<float2 *>(to + (row + 8 * r) * kLd + column + 8 * half) =
                make_float2(x[4 * half + 2 * r], x[4 * half + 2 * r + 1]);
}

/* A head's rows of P and T in memory, which a warp writes by squares: a lane has 16 bytes of one. */
struct Out {
    __nv_bfloat16 *p, *t;
    int step, n; /* rows left from the lane's first one on */
    bool scaled; /* T is times beta of the column: for forward */

    __device__ Out(const Prepared &to, int64_t row0, int step_, int n_) : step(16 * step_), scaled(to.more == nullptr)
    {
        const int lane = static_cast<int>(threadIdx.x % 32), row = lane / 4 + lane % 4 / 2 * 8;
        const int64_t first = row0 + row * step_ + lane % 2 * 8;
        p = to.p + first;
        t = to.t + first;
        n = n_ - row;
    }
    __device__ __forceinline__ void put(__nv_bfloat16 *to, int i, int j, const uint4 &word) const
    {
        if (16 * i < n)
            __stwb(reinterpret_cast<uint4 *>(to + i * step + 16 * j), word);
    }
    __device__ __forceinline__ void put(__nv_bfloat16 *to, int i, int j, const Square &x) const
    {
        put(to, i, j, turn(pack(x[0], x[1]), pack(x[4], x[5]), pack(x[2], x[3]), pack(x[6], x[7])));
    }
    __device__ __forceinline__ void put_t(int i, int j, const Square &x, const Gates &of) const
    {
        const int column = static_cast<int>(threadIdx.x % 4) * 2;
        Square y;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float2 factor = make_float2(1.0f, 1.0f);
            if (scaled)
                factor = *reinterpret_cast<const float2 *>(of.beta + 16 * j + 8 * half + column);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                y[4 * half + 2 * r] = x[4 * half + 2 * r] * factor.x;
                y[4 * half + 2 * r + 1] = x[4 * half + 2 * r + 1] * factor.y;
            }
        }
        put(t, i, j, y);
    }
};

/* Rounded to nearest: the product takes the upper 19 bits. */
__device__ __forceinline__ uint32_t tf32(float x) { return __float_as_uint(x) + 0x1000u; }

/* sums += A B^T. The inner index runs as both lie in registers. */
__device__ __forceinline__ void multiply(Square &sums, const Square &a, const Square &b)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint32_t left[4] = {tf32(a[4 * half]), tf32(a[4 * half + 2]), tf32(a[4 * half + 1]),
                                  tf32(a[4 * half + 3])};
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float (&to)[4] = *reinterpret_cast<float (*)[4]>(sums + 4 * r);
            ptx::mma_m16n8k8_tf32(to, left, tf32(b[4 * half + 2 * r]), tf32(b[4 * half + 2 * r + 1]));
        }
    }
}

/* Square (i, j) of A, and that of P out. */
template <bool kDiagonal>
__device__ __forceinline__ void make_square(Square &a, const Smem &s, const Gates &of, const Out &out, int i, int j)
{
    const int lane = static_cast<int>(threadIdx.x % 32), row = lane / 4, column = lane % 4 * 2;
    Square kk, qk;
    load_square(kk, s.kk, square_of(i, j));
    load_square(qk, s.qk, square_of(i, j));
    const float own[2] = {of.c[16 * i + row], of.c[16 * i + row + 8]};
    const float left[2] = {of.left[16 * i + row], of.left[16 * i + row + 8]};
    const float query[2] = {s.query[16 * i + row], s.query[16 * i + row + 8]};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float2 from = *reinterpret_cast<const float2 *>(of.from + 16 * j + column + 8 * half);
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int x = 4 * half + 2 * r + e, ahead = row + 8 * r - column - 8 * half - e;
                const float d = ptx::ex2_approx(own[r] - (e == 0 ? from.x : from.y));
                const float key = left[r] * kk[x] * d, read = query[r] * qk[x] * d;
                a[x] = !kDiagonal || ahead > 0 ? key : 0.0f;
                qk[x] = !kDiagonal || ahead >= 0 ? read : 0.0f;
            }
    }
    out.put(out.p, i, j, qk);
    __syncwarp(); /* or ptxas has loads of many squares in flight, and no registers for them */
}

/* The inverses of I plus four squares, in their places: a lane has two columns of one. */
__device__ __forceinline__ void invert_diagonal(float (*squares)[kSquare])
{
    const int lane = static_cast<int>(threadIdx.x % 32), column = lane % 8 * 2;
    float *const block = squares[lane / 8];
    float x[2][16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        x[0][i] = i == column ? 1.0f : 0.0f;
        x[1][i] = i == column + 1 ? 1.0f : 0.0f;
#pragma unroll
        for (int j = 0; j < i; j += 4) {
            const float4 four = *reinterpret_cast<const float4 *>(block + i * kLd + j);
            const float part[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int k = 0; k < 4 && j + k < i; k++) {
                x[0][i] = fmaf(-part[k], x[0][j + k], x[0][i]);
                x[1][i] = fmaf(-part[k], x[1][j + k], x[1][i]);
            }
        }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16; i++)
        *reinterpret_cast<float2 *>(block + i * kLd + column) = make_float2(x[0][i], x[1][i]);
    __syncwarp();
}

__device__ __forceinline__ void negate(Square &x)
{
#pragma unroll
    for (int i = 0; i < 8; i++)
        x[i] = -x[i];
}

/* T21 = -T22 (A21 T11), for squares i and i + 1 of the diagonal. */
__device__ __forceinline__ void invert_below(Square &t, const Square &a, float (*squares)[kSquare], int i)
{
    Square x, n = {};
    load_square<true>(x, squares[i]);
    multiply(n, x, a);
    load_square(x, squares[i + 1]);
    negate(x);
#pragma unroll
    for (int i = 0; i < 8; i++)
        t[i] = 0.0f;
    multiply(t, x, n);
}

/* sums += (square of T)^T A^T. */
__device__ __forceinline__ void add_transposed(Square &sums, const float *t, const Square &a)
{
    Square x;
    load_square<true>(x, t);
    multiply(sums, x, a);
}

/* sums -= (square of T) B. */
__device__ __forceinline__ void subtract(Square &sums, const float *t, const Square &b)
{
    Square x;
    load_square(x, t);
    negate(x);
    multiply(sums, x, b);
}

/* The same of squares of 32; squares[4] is T's square below its first. */
__device__ __forceinline__ void invert_corner(const Smem &s, const Gates &of, float (*squares)[kSquare], const Out &out)
{
    Square n[2][2] = {}, x;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        make_square<false>(x, s, of, out, 2 + i, 0);
        add_transposed(n[0][i], squares[0], x);
        make_square<false>(x, s, of, out, 2 + i, 1);
        add_transposed(n[0][i], squares[4], x);
        add_transposed(n[1][i], squares[1], x);
    }
    make_square<false>(x, s, of, out, 3, 2);
    Square below;
    invert_below(below, x, squares, 2);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        Square t = {}, u = {};
        subtract(t, squares[2], n[j][0]);
        out.put_t(2, j, t, of);
        subtract(u, squares[3], n[j][1]);
#pragma unroll
        for (int i = 0; i < 8; i++)
            x[i] = -below[i];
        multiply(u, x, n[j][0]);
        out.put_t(3, j, u, of);
    }
    out.put_t(3, 2, below, of);
}

/* A, P and T of a value head, by a warp; zeros above the diagonal. */
__device__ __forceinline__ void make_head(const Smem &s, const Gates &of, float (*squares)[kSquare], const Out &out)
{
    Square a, x;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        make_square<true>(x, s, of, out, i, i);
        store_square(squares[i], x);
#pragma unroll
        for (int j = i + 1; j < 4; j++) {
            out.put(out.p, i, j, uint4{});
            out.put(out.t, i, j, uint4{});
        }
    }
    __syncwarp();
    invert_diagonal(squares);
    make_square<false>(a, s, of, out, 1, 0);
    invert_below(x, a, squares, 0);
    store_square(squares[4], x);
    out.put_t(1, 0, x, of);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        load_square(x, squares[i]);
        out.put_t(i, i, x, of);
    }
    __syncwarp();
    invert_corner(s, of, squares, out);
    __syncwarp();
}

__global__ void __launch_bounds__(kThreads, kBlocks)
    gdn_prepare_sm90_kernel(const __grid_constant__ Call p, const __grid_constant__ Prepared to)
{
    extern __shared__ float4 raw[];
    Smem &s = *reinterpret_cast<Smem *>(raw);
    if (threadIdx.x == 0) {
        s.docs = gdn::documents_of(p);
        s.places = gdn::places_of<kChunk>(p, s.docs);
    }
    __syncthreads();
    const int warp = static_cast<int>(threadIdx.x / 32);
    const int step = p.value_heads * kChunk;
    for (int64_t item = blockIdx.x; item < (s.places.last - s.places.first) * p.key_heads; item += gridDim.x) {
        const gdn::Place at = gdn::find<kChunk>(p, s.docs, s.places.first + item / p.key_heads);
        if (at.doc < 0)
            continue;
        const int key_head = static_cast<int>(item % p.key_heads);
        const int64_t token = p.start(at.doc) + at.index * kChunk;
        const int n = static_cast<int>(gdn::least(p.end(at.doc) - token, kChunk));
        Pieces k, q;
        load_rows(k, p.k, token, n, key_head);
        Two g = two_of(p.g, token, n, key_head * p.group + warp, warp < p.group);
        Two beta = two_of(p.beta, token, n, key_head * p.group + warp, warp < p.group);
        store_rows(k, p, 1.0f, s.rows[0], s.key);
        load_rows(q, p.q, token, n, key_head);
        store_rows(q, p, p.scale, s.rows[1], s.query);
        __syncthreads();
        multiply(s);
        __syncthreads();
        for (int h = warp; h < p.group; h += kWarps) {
            const int head = key_head * p.group + h;
            const int64_t row0 = (token - p.low) * step + head * kChunk;
            Gates &of = s.gates[warp];
            load_gates(g, beta, to, s, of, token - p.low, n, head);
            g = two_of(p.g, token, n, head + kWarps, h + kWarps < p.group);
            beta = two_of(p.beta, token, n, head + kWarps, h + kWarps < p.group);
            make_head(s, of, s.inverse[warp], Out(to, row0, step, n));
        }
        __syncthreads();
    }
}

} // namespace

am_status gdn_sm90::prepare(const Call &p, const Prepared &to, int64_t tokens, cudaStream_t stream)
{
    int sms = 0;
    AM_TRY(multiprocessors(&sms));
    AM_CUDA(cudaFuncSetAttribute(gdn_prepare_sm90_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Smem)));
    const int64_t items = (tokens / kChunk + p.n_docs) * p.key_heads,
                  blocks = items < kBlocks * sms ? items : kBlocks * sms;
    gdn_prepare_sm90_kernel<<<static_cast<unsigned>(blocks), kThreads, sizeof(Smem), stream>>>(p, to);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}
