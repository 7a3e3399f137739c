/* gdn_bwd_simple.cu -- the gradients of gdn.h in float32, any dims. With dR the gradient of R = beta (v - exp(c) K S):
 *
 *   dR = (I + A)^-T (P^T dO + exp(c_last - c) K dS)      dS <- exp(c_last) dS + Q^T (exp(c) dO) - K^T (beta exp(c) dR)
 *   M = lower(dO V'^T) D    G = -strictly lower(dR V'^T) D    own = G K - exp(c) dR S^T
 *   dQ = M K + exp(c) dO S^T      dK = M^T Q + (beta G)^T K + beta own + exp(c_last - c) V' dS^T      dv = beta dR
 *   dbeta = dR . v + K . own      dg_t: all pairs i >= t > j of A and P, and the decays of rows and of the whole state
 *
 * Segment by segment, from the last:
 *   1  gdn_repeat_simple       block = step, value head, 64 columns     S before every chunk, V'
 *   2  gdn_reverse_simple      block = document, value head, 64 columns dS after every chunk, dR, dv; chunks in reverse
 *   3  gdn_gradients_simple    block = chunk, key head; its value heads in order: dq and dk are summed by one block
 *
 * Scratch is 2 states a chunk, V' and dR of a segment and a step: 1.9 GB with 64 value heads and dims of 128.
 *
 * Floor: 32 MFLOP a chunk of a value head with dims of 128, at 67 TFLOP/s of float32: 16 ms for 32K tokens of 64 value
 * heads; a third of the rate was expected, 50 ms. It took 105 ms.
 */
#include "gdn_rows.h"
#include "gdn_simple.cuh"
#include "on_device.h"

namespace
{

using namespace gdn;

size_t smem_bytes(int tiles) { return static_cast<size_t>(tiles) * kTile * sizeof(float) + sizeof(Tokens); }

struct Smem {
    float *x, *y, *z, *m, *g; /* m, g: of the gradients; the states of the reverse scan */
    Tokens *t;
};

__device__ Smem place_smem(float *base, int tiles)
{
    Smem s;
    s.x = base;
    s.y = s.x + kTile;
    s.z = s.y + kTile;
    s.m = s.z + kTile;
    s.g = s.m + kTile;
    s.t = reinterpret_cast<Tokens *>(base + tiles * kTile);
    return s;
}

struct Chunk {
    int64_t token;
    int n, rows; /* rows: n rounded up to a block of the solver */
    int head, key_head, column;
};

/* dR into y and dO into z, dS being in m: dR and dv go out. */
template <typename T> __device__ void reverse_values(const Call &p, const Smem &s, const Chunk &x)
{
    Sums kk = {}, qk = {}, sums = {};
    const Tokens &t = *s.t;
    for (int first = 0; first < p.key_dim; first += kChunk) {
        load<T>(s.x, p.k, x.token, x.n, x.key_head, first, p.key_dim, t.key);
        load<T>(s.y, p.q, x.token, x.n, x.key_head, first, p.key_dim, t.query);
        __syncthreads();
        multiply<false, true>(kk, s.x, s.x);
        multiply<false, true>(qk, s.y, s.x);
        multiply<false, false>(sums, s.x, s.m + first / kChunk * kTile);
        __syncthreads();
    }
    make_triangles(t, kk, qk);
    put(s.x, kk);
    put(s.y, qk);
    load<T>(s.z, p.dout, x.token, x.n, x.head, x.column, p.value_dim);
    __syncthreads();
    for_each(sums, [&](int i, int, float &y) { y *= t.f[i]; });
    add_product<true, false>(sums, s.y, s.z, x.rows);
    __syncthreads();
    put(s.y, sums);
    __syncthreads();
    solve<true>(s.x, s.y, x.rows);
    __syncthreads();
    for_each(sums, [&](int i, int j, float &y) { y = s.y[i * kLd + j]; });
    store<float>(p.dr, x.token - p.low, x.n, x.head, x.column, p.value_dim, sums);
    for_each(sums, [&](int i, int, float &y) { y *= t.beta[i]; });
    store<T>(p.dv, x.token, x.n, x.head, x.column, p.value_dim, sums);
}

/* exp(c_first) (exp(c_last - c_first) dS + Q^T (r dO) - K^T (beta r dR)), r = exp(c - c_first): where exp(c) is
 * subnormal from the first row on, dS is, but no factor of a product. */
template <typename T> __device__ void retreat(const Call &p, const Smem &s, const Chunk &x)
{
    Tokens &t = *s.t;
    for (int i = static_cast<int>(threadIdx.x); i < kChunk; i += kThreads) {
        t.more[0][i] = t.query[i] * t.r[i];
        t.more[1][i] = -t.key[i] * t.beta[i] * t.r[i];
    }
    __syncthreads();
    for (int first = 0; first < p.key_dim; first += kChunk) {
        float *const state = s.m + first / kChunk * kTile;
        Sums sums;
        for_each(sums, [&](int i, int j, float &y) { y = state[i * kLd + j] * t.r[kChunk - 1]; });
        load<T>(s.x, p.q, x.token, x.n, x.key_head, first, p.key_dim, t.more[0]);
        __syncthreads();
        add_product<true, false>(sums, s.x, s.z, x.rows);
        __syncthreads();
        load<T>(s.x, p.k, x.token, x.n, x.key_head, first, p.key_dim, t.more[1]);
        __syncthreads();
        add_product<true, false>(sums, s.x, s.y, x.rows);
        for_each(sums, [&](int, int, float &y) { y *= t.e[0]; });
        put(state, sums);
        __syncthreads();
    }
}

__device__ void copy_state(const Call &p, const Smem &s, int column, const State &other, bool out)
{
    for (int first = 0; first < p.key_dim; first += kChunk) {
        float *const tile = s.m + first / kChunk * kTile;
        if (out)
            store_state(tile, other, first, p.key_dim, column, p.value_dim);
        else
            load_state(tile, other, first, p.key_dim, column, p.value_dim);
    }
    __syncthreads();
}

template <typename T> __device__ void reverse(const Call &p, const Smem &s, int64_t doc, int head, int column)
{
    const int64_t start = p.start(doc), end = p.end(doc), chunks = pieces(end - start, kChunk);
    const Range own = chunks_of(p, start, end);
    if (own.first >= own.last && chunks > 0)
        return;
    copy_state(p, s, column, own.last == chunks ? p.dfinal.at(doc, head) : p.into_segment(0, head), false);
    for (int64_t c = own.last - 1; c >= own.first; c--) {
        Chunk x;
        x.token = start + c * kChunk;
        x.n = static_cast<int>(least(end - x.token, kChunk));
        x.rows = (x.n + 3) & ~3;
        x.head = head;
        x.key_head = head / p.group;
        x.column = column;
        if (c + 1 < chunks)
            copy_state(p, s, column, p.ds.at((x.token + kChunk - p.low) / kChunk, head), true);
        if (threadIdx.x < 32)
            load_gates(p, *s.t, x.token, x.n, head);
        load_lengths<T>(p, *s.t, x.token, x.n, x.key_head, true);
        __syncthreads();
        reverse_values<T>(p, s, x);
        if (c > 0 || p.dinitial.data != nullptr)
            retreat<T>(p, s, x);
        __syncthreads();
    }
    if (own.first > 0)
        copy_state(p, s, column, p.into_segment(-1, head), true);
    else if (p.dinitial.data != nullptr)
        copy_state(p, s, column, p.dinitial.at(doc, head), true);
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 2) gdn_reverse_simple_kernel(const __grid_constant__ Call p)
{
    extern __shared__ float4 raw[];
    const Smem s = place_smem(reinterpret_cast<float *>(raw), 3 + (p.key_dim + 63) / 64);
    const Range docs = documents_of(p);
    const int64_t each = int64_t{p.value_heads} * p.slices, items = (docs.last - docs.first) * each;
    for (int64_t item = blockIdx.x; item < items; item += gridDim.x)
        reverse<T>(p, s, docs.first + item / each, static_cast<int>(item / p.slices % p.value_heads),
                   static_cast<int>(item % p.slices) * kChunk);
}

struct States2 {
    State before, after; /* S before the chunk, dS after it */
};

/* Over the 16 threads of a row; all get it. */
__device__ float row_sum(float x)
{
    for (int step = 1; step < 16; step *= 2)
        x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

/* Adds the thread's sums of its rows, over all its row's threads. */
__device__ void add_to(float *dots, const float (&sums)[4])
{
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const float whole = row_sum(sums[r]);
        if (threadIdx.x % 16 == 0)
            dots[row_of(r)] += whole;
    }
}

/* more[0][t] becomes the sum of x over pairs i >= t > j. Those alone are summed: sums over rows less sums over columns
 * would lose the small ones. */
__device__ void sum_pairs(const Smem &s)
{
    const int lane = static_cast<int>(threadIdx.x % 32);
    for (int i = static_cast<int>(threadIdx.x / 32); i < kChunk; i += kThreads / 32) {
        float *const row = s.x + i * kLd;
        const float first = row[2 * lane], both = first + row[2 * lane + 1];
        float sum = both;
        for (int step = 1; step < 32; step *= 2) {
            const float left = __shfl_up_sync(0xffffffffu, sum, step);
            sum += lane >= step ? left : 0.0f;
        }
        const float left = __shfl_up_sync(0xffffffffu, sum, 1);
        row[2 * lane] = (lane == 0 ? 0.0f : left) + first;
        row[2 * lane + 1] = (lane == 0 ? 0.0f : left) + both;
    }
    __syncthreads();
    const int at = static_cast<int>(threadIdx.x / 4);
    float sum = 0.0f;
    for (int i = at + static_cast<int>(threadIdx.x % 4); i < kChunk && at > 0; i += 4)
        sum += s.x[i * kLd + at - 1];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (threadIdx.x % 4 == 0)
        s.t->more[0][at] = sum;
    __syncthreads();
}

/* M and G into m and g; more[0][t] becomes the sum over pairs i >= t > j of what D[i, j] receives, times D; dots[0]
 * gets dR . v. */
template <typename T> __device__ void differentiate_triangles(const Call &p, const Smem &s, const Chunk &x)
{
    float value[4] = {};
    Sums m = {}, n = {}; /* first k k^T and q k^T, then dO V'^T and dR V'^T */
    const Tokens &t = *s.t;
    for (int first = 0; first < p.key_dim; first += kChunk) {
        load<T>(s.x, p.k, x.token, x.n, x.key_head, first, p.key_dim, t.key);
        load<T>(s.y, p.q, x.token, x.n, x.key_head, first, p.key_dim, t.query);
        __syncthreads();
        multiply<false, true>(m, s.x, s.x);
        multiply<false, true>(n, s.y, s.x);
        __syncthreads();
    }
    for (int i = static_cast<int>(threadIdx.x); i < 3 * kChunk; i += kThreads)
        s.t->dots[i / kChunk][i % kChunk] = 0.0f;
    make_triangles(t, m, n);
    put(s.g, m); /* read again by the thread alone that wrote them */
    put(s.m, n);
    for_each(m, [](int, int, float &sum) { sum = 0.0f; });
    for_each(n, [](int, int, float &sum) { sum = 0.0f; });
    for (int first = 0; first < p.value_dim; first += kChunk) {
        load<T>(s.x, p.dout, x.token, x.n, x.head, first, p.value_dim);
        load<float>(s.y, p.dr, x.token - p.low, x.n, x.head, first, p.value_dim);
        load<float>(s.z, p.v_new, x.token - p.low, x.n, x.head, first, p.value_dim);
        __syncthreads();
        multiply<false, true>(m, s.x, s.z);
        multiply<false, true>(n, s.y, s.z);
        __syncthreads();
        load<T>(s.z, p.v, x.token, x.n, x.head, first, p.value_dim);
        __syncthreads();
#pragma unroll
        for (int r = 0; r < 4; r++)
            for (int c = 0; c < 4; c++)
                value[r] = fmaf(s.y[row_of(r) * kLd + column_of(c)], s.z[row_of(r) * kLd + column_of(c)], value[r]);
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int i = row_of(r), j = column_of(c), at = i * kLd + j;
            const float d = decay(t, i, j);
            s.x[at] = j < i ? fmaf(m[r][c], s.m[at], n[r][c] * s.g[at]) : 0.0f;
            s.m[at] = m[r][c] * d;
            s.g[at] = j < i ? -n[r][c] * d : 0.0f;
        }
    __syncthreads();
    add_to(s.t->dots[0], value);
    sum_pairs(s);
}

/* h1 = dO S^T, h2 = dR S^T, h3 = V' dS^T of 64 columns of keys; their sum of S dS. */
template <typename T>
__device__ void against_states(const Call &p, const Smem &s, const Chunk &x, const States2 &st, int first, Sums &h1,
                               Sums &h2, Sums &h3, float &whole)
{
    for (int column = 0; column < p.value_dim; column += kChunk) {
        if (st.before.data != nullptr) {
            load<T>(s.x, p.dout, x.token, x.n, x.head, column, p.value_dim);
            load<float>(s.y, p.dr, x.token - p.low, x.n, x.head, column, p.value_dim);
            load_state(s.z, st.before, first, p.key_dim, column, p.value_dim);
            __syncthreads();
            multiply<false, true>(h1, s.x, s.z);
            multiply<false, true>(h2, s.y, s.z);
            __syncthreads();
        }
        if (st.after.data == nullptr)
            continue;
        load<float>(s.x, p.v_new, x.token - p.low, x.n, x.head, column, p.value_dim);
        load_state(s.y, st.after, first, p.key_dim, column, p.value_dim);
        __syncthreads();
        multiply<false, true>(h3, s.x, s.y);
        if (st.before.data != nullptr)
            for (int e = static_cast<int>(threadIdx.x); e < kChunk * kChunk; e += kThreads)
                whole = fmaf(s.z[e / kChunk * kLd + e % kChunk], s.y[e / kChunk * kLd + e % kChunk], whole);
        __syncthreads();
    }
}

/* Adds to float32 rows, which the same threads wrote; the sums are 0 again. */
__device__ void add_rows(const Call &p, const Chunk &x, const View &v, int first, bool fresh, Sums &sums)
{
    for_each(sums, [&](int i, int j, float &y) {
        if (i < x.n && first + j < p.key_dim) {
            float *const to =
                static_cast<float *>(v.data) + (x.token + i - p.low) * v.token + x.key_head * v.head + first + j;
            *to = fresh ? y : *to + y;
        }
        y = 0.0f;
    });
}

/* Adds a value head to dq and dk of 64 columns of keys. */
template <typename T>
__device__ void differentiate_keys(const Call &p, const Smem &s, const Chunk &x, const States2 &st, int first,
                                   float &whole)
{
    Tokens &t = *s.t;
    const bool fresh = x.head % p.group == 0;
    Sums h1 = {}, h2 = {}, h3 = {};
    against_states<T>(p, s, x, st, first, h1, h2, h3, whole);
    float value[4] = {}, through_e[4] = {}, through_f[4] = {};
    load<T>(s.x, p.k, x.token, x.n, x.key_head, first, p.key_dim, t.key);
    load<T>(s.y, p.q, x.token, x.n, x.key_head, first, p.key_dim, t.query);
    load<T>(s.z, p.k, x.token, x.n, x.key_head, first, p.key_dim, t.more[1]);
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int i = row_of(r), j = column_of(c);
            const float k = s.x[i * kLd + j], q = s.y[i * kLd + j];
            through_e[r] = fmaf(q, h1[r][c], fmaf(-t.beta[i] * k, h2[r][c], through_e[r]));
            through_f[r] = fmaf(k, h3[r][c], through_f[r]);
            h1[r][c] *= t.e[i];
            h2[r][c] *= -t.e[i];
            h3[r][c] *= t.f[i];
        }
    add_to(t.dots[1], through_e);
    add_to(t.dots[2], through_f);
    add_rows(p, x, p.dq_sum, first, fresh, h1);
    multiply<false, false>(h1, s.m, s.x, x.rows);
    add_rows(p, x, p.dq_sum, first, false, h1);
    multiply<false, false>(h2, s.g, s.x, x.rows);
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int i = row_of(r), j = column_of(c);
            value[r] = fmaf(s.x[i * kLd + j], h2[r][c], value[r]);
            h3[r][c] = fmaf(t.beta[i], h2[r][c], h3[r][c]);
        }
    add_to(t.dots[0], value);
    add_rows(p, x, p.dk_sum, first, fresh, h3);
    multiply<true, false>(h3, s.m, s.y, x.rows);
    add_rows(p, x, p.dk_sum, first, false, h3);
    multiply<true, false>(h3, s.g, s.z, x.rows);
    add_rows(p, x, p.dk_sum, first, false, h3);
    __syncthreads();
}

/* dg_t: pairs across t, exp(c_i) of i >= t, exp(c_last - c_j) of j < t, and the decay of the whole state; one warp. */
__device__ void store_gates(const Call &p, const Tokens &t, const Chunk &x, double whole)
{
    const int lane = static_cast<int>(threadIdx.x % 32), i = 2 * lane;
    const double e0 = t.e[i] * t.dots[1][i], e1 = t.e[i + 1] * t.dots[1][i + 1];
    const double f0 = t.f[i] * t.dots[2][i], f1 = t.f[i + 1] * t.dots[2][i + 1];
    double after = e0 + e1, before = f0 + f1;
    for (int step = 1; step < 32; step *= 2) {
        const double right = __shfl_down_sync(0xffffffffu, after, step),
                     left = __shfl_up_sync(0xffffffffu, before, step);
        after += lane + step < 32 ? right : 0.0;
        before += lane >= step ? left : 0.0;
    }
    double right = __shfl_down_sync(0xffffffffu, after, 1), left = __shfl_up_sync(0xffffffffu, before, 1);
    right = lane == 31 ? 0.0 : right;
    left = lane == 0 ? 0.0 : left;
    whole *= t.e[kChunk - 1];
    if (i < x.n)
        p.dg.set_number(x.token + i, x.head, static_cast<float>(t.more[0][i] + (right + e1 + e0) + left + whole));
    if (i + 1 < x.n)
        p.dg.set_number(x.token + i + 1, x.head,
                        static_cast<float>(t.more[0][i + 1] + (right + e1) + (left + f0) + whole));
}

/* One value head of a chunk. */
template <typename T>
__device__ void differentiate(const Call &p, const Smem &s, const Chunk &x, const States2 &st, double *wholes)
{
    Tokens &t = *s.t;
    float part = 0.0f;
    differentiate_triangles<T>(p, s, x);
    for (int i = static_cast<int>(threadIdx.x); i < kChunk; i += kThreads)
        t.more[1][i] = t.key[i] * t.beta[i];
    __syncthreads();
    for (int first = 0; first < p.key_dim; first += kChunk)
        differentiate_keys<T>(p, s, x, st, first, part);
    for (int i = static_cast<int>(threadIdx.x); i < x.n; i += kThreads)
        p.dbeta.set_number(x.token + i, x.head, t.dots[0][i]);
    double whole = part;
    for (int step = 16; step > 0; step /= 2)
        whole += __shfl_xor_sync(0xffffffffu, whole, step);
    if (threadIdx.x % 32 == 0)
        wholes[threadIdx.x / 32] = whole;
    __syncthreads();
    if (threadIdx.x < 32) {
        whole = 0.0;
        for (int i = 0; i < kThreads / 32; i++)
            whole += wholes[i];
        store_gates(p, t, x, whole);
    }
    __syncthreads();
}

/* The derivative of factor x / |x|, of rows that a warp takes in turn. */
template <typename T>
__device__ void finish_rows(const Call &p, const Chunk &x, const View &in, const View &sums, const View &out,
                            float factor)
{
    for (int i = static_cast<int>(threadIdx.x / 32); i < x.n; i += kThreads / 32) {
        const int64_t row = (x.token + i) * in.token + x.key_head * in.head;
        const int64_t to = (x.token + i) * out.token + x.key_head * out.head;
        const float *const dy =
            static_cast<const float *>(sums.data) + (x.token + i - p.low) * sums.token + x.key_head * sums.head;
        const float inverse = inverse_length<T>(p, in, x.token + i, x.key_head);
        float along = 0.0f;
        for (int j = static_cast<int>(threadIdx.x % 32); j < p.key_dim && p.l2norm; j += 32)
            along = fmaf(inverse * element<T>(in, row + j), dy[j], along);
        for (int step = 16; step > 0; step /= 2)
            along += __shfl_xor_sync(0xffffffffu, along, step);
        for (int j = static_cast<int>(threadIdx.x % 32); j < p.key_dim; j += 32)
            set_element<T>(out, to + j, inverse * factor * fmaf(-along, inverse * element<T>(in, row + j), dy[j]));
    }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 2) gdn_gradients_simple_kernel(const __grid_constant__ Call p)
{
    extern __shared__ float4 raw[];
    __shared__ double wholes[kThreads / 32];
    const Smem s = place_smem(reinterpret_cast<float *>(raw), 5);
    const Range docs = documents_of(p), places = places_of<kChunk>(p, docs);
    const int64_t items = (places.last - places.first) * p.key_heads;
    for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
        const Place at = find<kChunk>(p, docs, places.first + item / p.key_heads);
        if (at.doc < 0)
            continue;
        const int64_t start = p.start(at.doc), end = p.end(at.doc), next = start + (at.index + 1) * kChunk;
        Chunk x = {};
        x.token = start + at.index * kChunk;
        x.n = static_cast<int>(least(end - x.token, kChunk));
        x.rows = (x.n + 3) & ~3;
        x.key_head = static_cast<int>(item % p.key_heads);
        load_lengths<T>(p, *s.t, x.token, x.n, x.key_head, true);
        for (int h = 0; h < p.group; h++) {
            x.head = x.key_head * p.group + h;
            if (threadIdx.x < 32)
                load_gates(p, *s.t, x.token, x.n, x.head);
            __syncthreads();
            States2 st;
            st.before = p.before(at.doc, start, at.index, x.head);
            st.after = next < end ? p.ds.at((next - p.low) / kChunk, x.head) : p.dfinal.at(at.doc, x.head);
            differentiate<T>(p, s, x, st, wholes);
        }
        finish_rows<T>(p, x, p.q, p.dq_sum, p.dq, p.scale);
        finish_rows<T>(p, x, p.k, p.dk_sum, p.dk, 1.0f);
        __syncthreads();
    }
}

int64_t segments_of(const am_gdn_args *a)
{
    const int64_t tokens = a->q.shape[0];
    return tokens > kSegment ? (tokens + kSegment - 1) / kSegment : 1;
}

/* Places the scratch from `base`; returns its bytes. */
size_t place_scratch(const am_gdn_args *a, Call *p, char *base)
{
    const int64_t tokens = a->q.shape[0], most = kSegment + AM_GDN_STEP, kept = tokens < most ? tokens : most;
    const int64_t hk = a->q.shape[1], hv = a->v.shape[1], dk = a->q.shape[2], dv = a->v.shape[2];
    size_t at = 0;
    const auto take = [&](int64_t floats) {
        float *const place = reinterpret_cast<float *>(base + at);
        at += static_cast<size_t>(floats) * sizeof(float);
        return place;
    };
    const auto states = [&](int64_t n) { return States{take(n * hv * dk * dv), hv * dk * dv, dk * dv, dv}; };
    const auto rows = [&](int64_t heads, int64_t dim) {
        return View{take(kept * heads * dim), heads * dim, dim, false};
    };
    p->s = states(kept / kChunk + 1);
    p->ds = states(kept / kChunk + 1);
    p->carry = states(2);
    p->v_new = rows(hv, dv);
    p->dr = rows(hv, dv);
    p->dq_sum = rows(hk, dk);
    p->dk_sum = rows(hk, dk);
    return at;
}

template <typename T> am_status launch(const am_gdn_args *a, Call p, cudaStream_t stream)
{
    int sms = 0;
    const size_t reverse_smem = smem_bytes(3 + (p.key_dim + 63) / 64), smem = smem_bytes(5);
    AM_TRY(multiprocessors(&sms));
    AM_CUDA(cudaFuncSetAttribute(gdn_reverse_simple_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(reverse_smem)));
    AM_CUDA(cudaFuncSetAttribute(gdn_gradients_simple_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(smem)));
    const int64_t segments = segments_of(a);
    for (int64_t i = segments - 1; i >= 0; i--) {
        p.low = i * kSegment;
        p.high = i + 1 < segments ? p.low + kSegment : INT64_MAX;
        AM_TRY(gdn_repeat_simple(p, p.q.bf16, stream));
        gdn_reverse_simple_kernel<T><<<static_cast<unsigned>(4 * sms), kThreads, reverse_smem, stream>>>(p);
        AM_CUDA_LAUNCHED();
        gdn_gradients_simple_kernel<T><<<static_cast<unsigned>(4 * sms), kThreads, smem, stream>>>(p);
        AM_CUDA_LAUNCHED();
    }
    return AM_OK;
}

} // namespace

size_t gdn_backward_simple_scratch(const am_gdn_args *a)
{
    Call unused = {};
    return place_scratch(a, &unused, nullptr) + 16;
}

am_status gdn_backward_simple(const am_gdn_args *a, cudaStream_t stream)
{
    Call p = gdn_call(a);
    const uintptr_t start = (reinterpret_cast<uintptr_t>(a->workspace.data) + 15) / 16 * 16;
    place_scratch(a, &p, reinterpret_cast<char *>(start));
    if (p.n_docs == 0)
        return gdn_fill_gaps(a, true, stream);
    AM_TRY(gdn_fill_gaps(a, true, stream));
    return p.q.bf16 ? launch<__nv_bfloat16>(a, p, stream) : launch<float>(a, p, stream);
}
