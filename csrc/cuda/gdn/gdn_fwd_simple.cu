/* gdn_fwd_simple.cu -- the formula of gdn.h in float32, any dims: the oracle on the GPU; and the states of a segment.
 *
 *   block = one document, value head and 64 columns of its state, which stay in shared memory; chunk by chunk:
 *     columns of k and q, 64 at a time  ->  k k^T, q k^T, k S, q S (registers)
 *     A, P and R = beta (v - exp(c) k S) (shared)  ->  V' by substitution  ->  o = exp(c) q S + P V'
 *     columns of k again                ->  S = exp(c_last) S + k^T (exp(c_last - c) V')
 *
 * The kernel that makes states again walks one step of a document instead and leaves S and V' in place of o.
 *
 * Floor: 12 MFLOP a chunk of a value head with dims of 128, at 67 TFLOP/s of float32: 5.9 ms for 32K tokens of 64
 * value heads. Every multiply-add of 16 sums takes 5 reads of shared memory for its 8 operands, so shared memory and
 * not arithmetic is the ceiling: a third of the rate was expected, 20 ms. It took 28.7 ms, and 19.8 ms for 32 documents
 * of 1K: one document has 128 blocks, which leave half of the multiprocessors' places empty.
 */
#include "gdn_rows.h"
#include "gdn_simple.cuh"
#include "on_device.h"

namespace
{

using namespace gdn;

struct Walk { /* chunks [first, last) of a document, for one head and 64 columns of its state */
    int64_t doc, start, end, first, last, chunks;
    int head, column;
};

struct Smem {
    float *state, *x, *y, *v;
    Tokens *t;
};

size_t smem_bytes(int key_dim) { return (3 + (key_dim + 63) / 64) * kTile * sizeof(float) + sizeof(Tokens); }

__device__ Smem place_smem(float *base, int key_dim)
{
    Smem s;
    s.x = base;
    s.y = s.x + kTile;
    s.v = s.y + kTile;
    s.state = s.v + kTile;
    s.t = reinterpret_cast<Tokens *>(s.state + (key_dim + 63) / 64 * kTile);
    return s;
}

/* A and P into x and y, R and then V' into v; o goes out. */
template <typename T, bool kOut>
__device__ void make_values(const Call &p, const Smem &s, const Walk &w, int64_t token, int n, bool has_state)
{
    Sums kk = {}, qk = {}, ks = {}, qs = {};
    const Tokens &t = *s.t;
    const int rows = (n + 3) & ~3, key_head = w.head / p.group;
    for (int first = 0; first < p.key_dim; first += kChunk) {
        const float *const state = s.state + first / kChunk * kTile;
        load<T>(s.x, p.k, token, n, key_head, first, p.key_dim, t.key);
        if (kOut)
            load<T>(s.y, p.q, token, n, key_head, first, p.key_dim, t.query);
        __syncthreads();
        multiply<false, true>(kk, s.x, s.x);
        if (kOut)
            multiply<false, true>(qk, s.y, s.x);
        if (has_state) {
            multiply<false, false>(ks, s.x, state);
            if (kOut)
                multiply<false, false>(qs, s.y, state);
        }
        __syncthreads();
    }
    make_triangles(t, kk, qk);
    put(s.x, kk);
    if (kOut)
        put(s.y, qk);
    for_each(ks, [&](int i, int j, float x) {
        const bool real = i < n && w.column + j < p.value_dim;
        const float v = real ? element<T>(p.v, (token + i) * p.v.token + w.head * p.v.head + w.column + j) : 0.0f;
        s.v[i * kLd + j] = t.beta[i] * fmaf(-t.e[i], x, v);
    });
    __syncthreads();
    solve<false>(s.x, s.v, rows);
    __syncthreads();
    if constexpr (kOut) {
        for_each(qs, [&](int i, int, float &x) { x *= t.e[i]; });
        add_product<false, false>(qs, s.y, s.v, rows);
        store<T>(p.o, token, n, w.head, w.column, p.value_dim, qs);
    }
}

template <typename T> __device__ void advance(const Call &p, const Smem &s, const Walk &w, int64_t token, int n)
{
    const Tokens &t = *s.t;
    for (int i = static_cast<int>(threadIdx.x); i < kChunk; i += kThreads)
        s.t->more[0][i] = t.key[i] * t.f[i];
    __syncthreads();
    for (int first = 0; first < p.key_dim; first += kChunk) {
        float *const state = s.state + first / kChunk * kTile;
        Sums sums;
        load<T>(s.x, p.k, token, n, w.head / p.group, first, p.key_dim, t.more[0]);
        for_each(sums, [&](int i, int j, float &x) { x = state[i * kLd + j] * t.e[kChunk - 1]; });
        __syncthreads();
        add_product<true, false>(sums, s.x, s.v, (n + 3) & ~3);
        put(state, sums);
        __syncthreads();
    }
}

__device__ void copy_state(const Call &p, const Smem &s, const Walk &w, const State &other, bool out)
{
    for (int first = 0; first < p.key_dim; first += kChunk) {
        float *const tile = s.state + first / kChunk * kTile;
        if (out)
            store_state(tile, other, first, p.key_dim, w.column, p.value_dim);
        else
            load_state(tile, other, first, p.key_dim, w.column, p.value_dim);
    }
    __syncthreads();
}

template <typename T, bool kOut> __device__ void walk(const Call &p, const Smem &s, const Walk &w)
{
    copy_state(p, s, w, p.before(w.doc, w.start, w.first, w.head), false);
    for (int64_t c = w.first; c < w.last; c++) {
        const int64_t token = w.start + c * kChunk, next = token + kChunk;
        const int n = static_cast<int>(least(w.end - token, kChunk));
        if (threadIdx.x < 32)
            load_gates(p, *s.t, token, n, w.head);
        load_lengths<T>(p, *s.t, token, n, w.head / p.group, kOut);
        __syncthreads();
        make_values<T, kOut>(p, s, w, token, n, c > 0 || p.initial.data != nullptr);
        if (!kOut)
            for (int e = static_cast<int>(threadIdx.x); e < n * kChunk; e += kThreads) {
                const int i = e / kChunk, j = e % kChunk;
                if (w.column + j < p.value_dim)
                    set_element<float>(p.v_new,
                                       (token + i - p.low) * p.v_new.token + w.head * p.v_new.head + w.column + j,
                                       s.v[i * kLd + j]);
            }
        if (c + 1 < w.last || (kOut && p.final.data != nullptr))
            advance<T>(p, s, w, token, n);
        if (!kOut && c + 1 < w.last)
            copy_state(p, s, w, p.s.at((next - p.low) / kChunk, w.head), true);
        if (kOut && p.kept.data != nullptr && c + 1 < w.last && (c + 1) % kStepChunks == 0)
            copy_state(p, s, w, p.kept.at(next / AM_GDN_STEP - 1, w.head), true);
        __syncthreads();
    }
    if (kOut && p.final.data != nullptr)
        copy_state(p, s, w, p.final.at(w.doc, w.head), true);
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 2) gdn_fwd_simple_kernel(const __grid_constant__ Call p)
{
    extern __shared__ float4 raw[];
    const Smem s = place_smem(reinterpret_cast<float *>(raw), p.key_dim);
    const int64_t item = blockIdx.x / p.slices;
    Walk w;
    w.doc = p.order[item / p.value_heads];
    w.head = static_cast<int>(item % p.value_heads);
    w.column = static_cast<int>(blockIdx.x % p.slices) * kChunk;
    w.start = p.start(w.doc);
    w.end = p.end(w.doc);
    w.first = 0;
    w.last = pieces(w.end - w.start, kChunk);
    walk<T, true>(p, s, w);
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 2) gdn_repeat_simple_kernel(const __grid_constant__ Call p)
{
    extern __shared__ float4 raw[];
    const Smem s = place_smem(reinterpret_cast<float *>(raw), p.key_dim);
    const Range docs = documents_of(p), places = places_of<AM_GDN_STEP>(p, docs);
    const int64_t each = int64_t{p.value_heads} * p.slices, items = (places.last - places.first) * each;
    for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
        const Place at = find<AM_GDN_STEP>(p, docs, places.first + item / each);
        if (at.doc < 0)
            continue;
        Walk w;
        w.doc = at.doc;
        w.head = static_cast<int>(item / p.slices % p.value_heads);
        w.column = static_cast<int>(item % p.slices) * kChunk;
        w.start = p.start(w.doc);
        w.end = p.end(w.doc);
        w.first = at.index * kStepChunks;
        w.last = least(w.first + kStepChunks, pieces(w.end - w.start, kChunk));
        walk<T, false>(p, s, w);
    }
}

template <typename T> am_status launch(const Call &p, cudaStream_t stream)
{
    const int64_t blocks = p.n_docs * p.value_heads * p.slices;
    const size_t smem = smem_bytes(p.key_dim);
    if (blocks == 0)
        return AM_OK;
    AM_CHECK(blocks <= INT32_MAX, AM_ERR_UNSUPPORTED, "gated_delta_rule: %lld blocks, CUDA takes up to %d",
             (long long)blocks, INT32_MAX);
    AM_CUDA(cudaFuncSetAttribute(gdn_fwd_simple_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(smem)));
    gdn_fwd_simple_kernel<T><<<static_cast<unsigned>(blocks), kThreads, smem, stream>>>(p);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

template <typename T> am_status launch_repeat(const Call &p, cudaStream_t stream)
{
    int sms = 0;
    const size_t smem = smem_bytes(p.key_dim);
    AM_TRY(multiprocessors(&sms));
    AM_CUDA(cudaFuncSetAttribute(gdn_repeat_simple_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(smem)));
    gdn_repeat_simple_kernel<T><<<static_cast<unsigned>(4 * sms), kThreads, smem, stream>>>(p);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

} // namespace

am_status gdn_forward_simple(const am_gdn_args *a, cudaStream_t stream)
{
    const Call p = gdn_call(a);
    if (a->part == AM_GDN_EARLY)
        return AM_OK;
    AM_TRY(gdn_fill_gaps(a, false, stream));
    return p.q.bf16 ? launch<__nv_bfloat16>(p, stream) : launch<float>(p, stream);
}

am_status gdn_repeat_simple(const Call &p, bool bf16, cudaStream_t stream)
{
    return bf16 ? launch_repeat<__nv_bfloat16>(p, stream) : launch_repeat<float>(p, stream);
}
