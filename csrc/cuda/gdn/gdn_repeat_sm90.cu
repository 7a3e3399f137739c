/* gdn_repeat_sm90.cu -- the states before a segment's chunks again, and V', from the states that forward kept.
 *
 * As gdn_fwd_sm90.cu, a pair of blocks for each step of 1,024 tokens and value head, without q and P:
 *   X = S^T k^T      R = beta (v^T - X exp(c) / |k|)      V' = R T^T -> memory      S += (V' exp(c_last - c) / |k|) k
 *
 * 640 cycles of the tensor cores a chunk and block, two blocks a multiprocessor: 0.19 ms for 32K tokens of 64 heads at
 * their rate. Bytes a chunk and head: 32 KB of state and 16 KB of V' out, 16 of v and 8 of T in; 2.5 GB in all, 0.6 ms.
 * Measured on an H200: 0.20 ms for a segment of 8K tokens, 0.78 for 32K: three quarters of memory's rate.
 */
#include "gdn_bwd_sm90.cuh"
#include "gdn_scan_sm90.cuh"

namespace
{

using namespace gdn_sm90;

struct Smem {
    alignas(1024) char k[kStages][2 * kTileBytes];
    alignas(1024) char t[kStages][kTileBytes];
    alignas(1024) char v[kStages][kTileBytes]; /* V' takes its place */
    alignas(128) float4 numbers[kStages][kChunk], more[kStages][kChunk];
    uint64_t full[kStages], empty[kStages];
};

struct Args {
    CUtensorMap k, v, t;
    Call call;
    Backward b;
};

/* The steps of the segment, as pairs of blocks take them: `each` gets one at a time, with its first and last chunk. */
template <class Each> __device__ __forceinline__ void for_steps(const Call &p, const Each &each)
{
    const gdn::Range docs = gdn::documents_of(p), places = gdn::places_of<AM_GDN_STEP>(p, docs);
    const int64_t items = (places.last - places.first) * p.value_heads;
    for (int64_t item = blockIdx.x / kPair; item < items; item += gridDim.x / kPair) {
        const gdn::Place at = gdn::find<AM_GDN_STEP>(p, docs, places.first + item / p.value_heads);
        if (at.doc < 0)
            continue;
        Work w;
        w.doc = at.doc;
        w.start = p.start(w.doc);
        w.end = p.end(w.doc);
        w.chunks = gdn::pieces(w.end - w.start, kChunk);
        w.head = static_cast<int>(item % p.value_heads);
        w.key_head = w.head / p.group;
        w.half = static_cast<int>(blockIdx.x % kPair);
        const int64_t first = at.index * gdn::kStepChunks;
        each(w, first, gdn::least(first + gdn::kStepChunks, w.chunks));
    }
}

__device__ void load_role(Smem &s, const Args &a)
{
    uint32_t count = 0;
    for_steps(a.call, [&](const Work &w, int64_t first, int64_t last) {
        for (int64_t c = first; c < last; c++, count++) {
            const int slot = static_cast<int>(count % kStages), half = w.half;
            const int token = static_cast<int>(w.start + c * kChunk), own = token - static_cast<int>(a.call.low);
            const int64_t number = w.head * a.b.made.stride + own;
            ptx::mbarrier_wait(&s.empty[slot], count / kStages % 2 ^ 1);
            ptx::mbarrier_arrive_expect_tx(&s.full[slot], 4 * kTileBytes + 2 * sizeof s.numbers[slot]);
            ptx::tma_load_3d_multicast(s.k[slot] + half * kTileBytes, &a.k, &s.full[slot], 64 * half, w.key_head, token,
                                       kBoth);
            ptx::tma_load_3d(s.v[slot], &a.v, &s.full[slot], 64 * half, w.head, token);
            ptx::bulk_load(s.numbers[slot], a.b.made.numbers + number, sizeof s.numbers[slot], &s.full[slot]);
            ptx::bulk_load(s.more[slot], a.b.made.more + number, sizeof s.more[slot], &s.full[slot]);
            if (half == 0)
                ptx::tma_load_3d_multicast(s.t[slot], &a.t, &s.full[slot], 0, w.head, own, kBoth);
        }
    });
}

__device__ void clear_tails(Smem &s, int slot, int n)
{
    char *const tiles[] = {s.k[slot], s.k[slot] + kTileBytes, s.t[slot], s.v[slot]};
    for (char *tile : tiles)
        clear_tail(tile, n);
    clear_tail(s.numbers[slot], n);
    clear_tail(s.more[slot], n);
    end_clearing();
}

__device__ void math_role(Smem &s, const Args &a)
{
    const Call &p = a.call;
    const int column = static_cast<int>(threadIdx.x % 4) * 2;
    uint32_t count = 0;
    for_steps(p, [&](const Work &w, int64_t first, int64_t last) {
        float state[64];
        load_state(state, w, p.before(w.doc, w.start, first, w.head));
        for (int64_t c = first; c < last; c++, count++) {
            const int slot = uniform(static_cast<int>(count % kStages));
            const int64_t token = w.start + c * kChunk, own = token - p.low;
            const int n = static_cast<int>(gdn::least(w.end - token, kChunk));
            const float4 *const numbers = s.numbers[slot], *const more = s.more[slot];
            uint32_t left[8][4], values[4][4], decayed[4][4];
            float x[32];
            pack(left, state);
            if (c > 0)
                store_packed(left, w, a.b.s + (own / kChunk * p.value_heads + w.head) * kDim * kDim);
            ptx::mbarrier_wait(&s.full[slot], count / kStages % 2);
            if (n < kChunk)
                clear_tails(s, slot, n);
            const float last_decay = numbers[n - 1].w;
#pragma unroll
            for (int i = 0; i < 64; i++)
                state[i] *= last_decay;
            ptx::wgmma_fence();
            times_rows<8>(x, left, descriptor_low(s.k[slot]), false);
            ptx::wgmma_wait_group<0>();
            subtract_known(x, s.v[slot], numbers);
#pragma unroll
            for (int i = 0; i < 32; i++)
                x[i] *= more[column + i / 4 * 8 + i % 2].x;
            pack(values, x);
            ptx::wgmma_fence();
            times_rows<4>(x, values, descriptor_low(s.t[slot]), false);
            ptx::wgmma_wait_group<0>();
            pack(values, x);
            pack_decayed(decayed, x, numbers);
            ptx::wgmma_fence();
            times_columns(state, decayed, descriptor_low(s.k[slot]));
            store_rows(a.b.v_new + (own * p.value_heads + w.head) * kDim + 64 * w.half, p.value_heads * kDim, values,
                       s.v[slot], n);
            ptx::wgmma_wait_group<0>();
            release(&s.empty[slot]);
        }
    });
}

__global__ void __cluster_dims__(kPair, 1, 1) __launch_bounds__(kThreads, 2)
    gdn_repeat_sm90_kernel(const __grid_constant__ Args a)
{
    extern __shared__ char raw[];
    Smem &s = *reinterpret_cast<Smem *>(raw + (1024 - ptx::smem_address(raw) % 1024) % 1024);
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; i++) {
            ptx::mbarrier_init(&s.full[i], 1);
            ptx::mbarrier_init(&s.empty[i], 4 * kPair);
        }
        ptx::fence_mbarrier_init();
    }
    ptx::cluster_sync();
    if (threadIdx.x < 128) {
        ptx::setmaxnreg_dec<40>();
        if (threadIdx.x == 0)
            load_role(s, a);
    } else {
        ptx::setmaxnreg_inc<216>();
        math_role(s, a);
    }
    __syncwarp();
    ptx::cluster_sync();
}

} // namespace

am_status gdn_sm90::repeat(const am_gdn_args *a, const Call &p, const Backward &b, cudaStream_t stream)
{
    constexpr size_t kSmem = sizeof(Smem) + 1024;
    static_assert(2 * (kSmem + 1024) <= 233472, "two blocks' shared memory");
    Args args = {};
    int sms = 0;
    args.call = p;
    args.b = b;
    AM_TRY(multiprocessors(&sms));
    const am_tensor t = dense(b.made.t, b.tokens, p.value_heads, kChunk);
    AM_TRY(tensor_map_of(&args.k, &a->k, kChunk, 1));
    AM_TRY(tensor_map_of(&args.v, &a->v, kChunk, 1));
    AM_TRY(tensor_map_of(&args.t, &t, kChunk, 1));
    AM_CUDA(cudaFuncSetAttribute(gdn_repeat_sm90_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem));
    const int64_t items = (b.tokens / AM_GDN_STEP + 1 + p.n_docs) * p.value_heads, most = 16 * sms;
    gdn_repeat_sm90_kernel<<<static_cast<unsigned>(kPair * (items < most ? items : most)), kThreads, kSmem, stream>>>(
        args);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}
