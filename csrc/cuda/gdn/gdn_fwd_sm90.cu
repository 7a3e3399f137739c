/* gdn_fwd_sm90.cu -- o and states of gdn.h for bf16 and dims of 128 on Hopper, after gdn_prepare_sm90.cu.
 *
 *   a pair of blocks (a cluster) has one document and value head, a block 64 of its values; the state S^T [64, 128]
 *   stays in the registers of one warpgroup, float32, and every product takes its left side from registers:
 *
 *     warp 0, one thread   | k, q, T, v, numbers of a chunk (two stages) ; P. k, q, T and P go to both blocks
 *     warpgroup 1          |   X = S^T k^T                                 (wgmma, regs x smem; so are all)
 *                          |   R = v^T - X exp(c) / |k|
 *                          |   V' = R T^T ; Y = S^T q^T     Y runs under what V' is turned into
 *                          |   Z = V' P^T ; S = S exp(c_last) + (V' exp(c_last - c) / |k|) k
 *                          |   o^T = Y scale exp(c) / |q| + Z -> turned through v's place -> memory, under S
 *
 * Rows behind the document are zeroed in k, T, v and the numbers, since 0 times a neighbour's NaN would be NaN; of q
 * and P they only reach columns behind it.
 *
 * FLOPs a chunk and value head: 8.4 MFLOP here, 1,024 cycles of the tensor cores a block. Bytes from L2 a block: 33 KB,
 * 48 of k, q, T, P shared by two. Floor of one document of 32K tokens: 512 chunks one after another, 0.3 ms if the
 * tensor cores never waited; its bytes with T and P, 0.44 ms. Measured on an H200, one document: 0.19 ms for 8K tokens,
 * 0.76 for 32K, 3.07 for 128K, 2,600 cycles a chunk; 32 documents of 1K 0.62. One warp a scheduler issues 740
 * instructions a chunk. A second warpgroup for o, with the packed states and V' handed over in shared memory, a thread
 * of it copying, one stage of q and P and two of the rest: 1.34 ms for 32K, with and without prefetches to L2, and 0.82
 * for 32 documents. Where its 4,600 cycles a chunk go is not known; q and P wait for both blocks' products and then for
 * a copy.
 */
#include "gdn_scan_sm90.cuh"

namespace
{

using namespace gdn_sm90;

struct Smem {
    alignas(1024) char k[kStages][2 * kTileBytes];
    alignas(1024) char t[kStages][kTileBytes];
    alignas(1024) char v[kStages][kTileBytes]; /* o takes its place */
    alignas(1024) char q[kStages][2 * kTileBytes];
    alignas(1024) char p[kTileBytes];
    alignas(128) float4 numbers[kStages][kChunk];
    uint64_t full[kStages], empty[kStages]; /* 1 and the bytes; a warp of each block of the pair */
    uint64_t p_full, p_empty;
};

struct Args {
    CUtensorMap q, k, v, t, p;
    const float4 *numbers;
    int64_t stride;
    Call call;
};

__device__ Work work_of(const Call &p)
{
    Work w;
    const int64_t item = blockIdx.x / kPair;
    w.doc = p.order[item / p.value_heads];
    w.start = p.start(w.doc);
    w.end = p.end(w.doc);
    w.chunks = gdn::pieces(w.end - w.start, kChunk);
    w.head = static_cast<int>(item % p.value_heads);
    w.key_head = w.head / p.group;
    w.half = static_cast<int>(blockIdx.x % kPair);
    return w;
}

/* One thread: all copies, in the order in which they are needed. The block of rank r brings both blocks the r-th tiles
 * of k and q, and T or P. */
__device__ void load_role(Smem &s, const Args &a, const Work &w)
{
    constexpr uint16_t kBoth = 3;
    for (int64_t c = 0; c < w.chunks; c++) {
        const int slot = static_cast<int>(c % kStages), token = static_cast<int>(w.start + c * kChunk), half = w.half;
        ptx::mbarrier_wait(&s.empty[slot], static_cast<uint32_t>(c / kStages % 2) ^ 1);
        ptx::mbarrier_arrive_expect_tx(&s.full[slot], 6 * kTileBytes + sizeof s.numbers[slot]);
        ptx::tma_load_3d_multicast(s.k[slot] + half * kTileBytes, &a.k, &s.full[slot], 64 * half, w.key_head, token,
                                   kBoth);
        ptx::tma_load_3d(s.v[slot], &a.v, &s.full[slot], 64 * half, w.head, token);
        ptx::bulk_load(s.numbers[slot], a.numbers + w.head * a.stride + token, sizeof s.numbers[slot], &s.full[slot]);
        if (half == 0)
            ptx::tma_load_3d_multicast(s.t[slot], &a.t, &s.full[slot], 0, w.head, token, kBoth);
        ptx::tma_load_3d_multicast(s.q[slot] + half * kTileBytes, &a.q, &s.full[slot], 64 * half, w.key_head, token,
                                   kBoth);
        ptx::mbarrier_wait(&s.p_empty, static_cast<uint32_t>(c % 2) ^ 1);
        ptx::mbarrier_arrive_expect_tx(&s.p_full, kTileBytes);
        if (half == 1)
            ptx::tma_load_3d_multicast(s.p, &a.p, &s.p_full, 0, w.head, token, kBoth);
    }
}

__device__ void clear_tails(Smem &s, int slot, int n)
{
    char *const tiles[] = {s.k[slot], s.k[slot] + kTileBytes, s.t[slot], s.v[slot]};
    for (char *tile : tiles)
        clear_tail(tile, n);
    clear_tail(s.numbers[slot], n);
    end_clearing();
}

__device__ void math_role(Smem &s, const Args &a, const Work &w)
{
    const Call &p = a.call;
    const int column = static_cast<int>(threadIdx.x % 4) * 2;
    float state[64];
    load_state(state, w, p.initial.at(w.doc, w.head));
    for (int64_t c = 0; c < w.chunks; c++) {
        const int slot = uniform(static_cast<int>(c % kStages)),
                  n = static_cast<int>(gdn::least(w.end - w.start - c * kChunk, kChunk));
        const uint32_t phase = static_cast<uint32_t>(c % 2);
        const float4 *const numbers = s.numbers[slot];
        uint32_t left[8][4], values[4][4], decayed[4][4];
        float x[32], y[32];
        pack(left, state);
        ptx::mbarrier_wait(&s.full[slot], static_cast<uint32_t>(c / kStages % 2));
        if (n < kChunk)
            clear_tails(s, slot, n);
        const float last = numbers[n - 1].w;
#pragma unroll
        for (int i = 0; i < 64; i++)
            state[i] *= last;
        ptx::wgmma_fence();
        times_rows<8>(x, left, descriptor_low(s.k[slot]), false);
        ptx::wgmma_wait_group<0>();
        subtract_known(x, s.v[slot], numbers);
        pack(values, x);
        ptx::wgmma_fence();
        times_rows<4>(x, values, descriptor_low(s.t[slot]), false);
        times_rows<8>(y, left, descriptor_low(s.q[slot]), false);
        ptx::mbarrier_wait(&s.p_full, phase);
        ptx::wgmma_wait_group<1>();
        pack(values, x);
        pack_decayed(decayed, x, numbers);
        ptx::wgmma_fence();
        times_rows<4>(x, values, descriptor_low(s.p), false);
        times_columns(state, decayed, descriptor_low(s.k[slot]));
        ptx::wgmma_wait_group<1>();
        release(&s.p_empty);
#pragma unroll
        for (int i = 0; i < 32; i++)
            y[i] = fmaf(y[i], numbers[column + i / 4 * 8 + i % 2].z, x[i]);
        pack(values, y);
        store_rows(rows_of(p.o, w, w.start + c * kChunk), p.o.token, values, s.v[slot], n);
        ptx::wgmma_wait_group<0>();
        release(&s.empty[slot]);
        if (p.kept.data != nullptr && c + 1 < w.chunks && (c + 1) % gdn::kStepChunks == 0)
            store_state(state, w, p.kept.at((w.start + (c + 1) * kChunk) / AM_GDN_STEP - 1, w.head));
    }
    if (p.final.data != nullptr)
        store_state(state, w, p.final.at(w.doc, w.head));
}

__global__ void __cluster_dims__(kPair, 1, 1) __launch_bounds__(kThreads, 2)
    gdn_fwd_sm90_kernel(const __grid_constant__ Args a)
{
    extern __shared__ char raw[];
    Smem &s = *reinterpret_cast<Smem *>(raw + (1024 - ptx::smem_address(raw) % 1024) % 1024);
    const Work w = work_of(a.call);
    if (threadIdx.x == 0) {
        uint64_t *const empty[] = {&s.empty[0], &s.empty[1], &s.p_empty};
        uint64_t *const full[] = {&s.full[0], &s.full[1], &s.p_full};
        for (int i = 0; i < 3; i++) {
            ptx::mbarrier_init(full[i], 1);
            ptx::mbarrier_init(empty[i], 4 * kPair);
        }
        ptx::fence_mbarrier_init();
    }
    ptx::cluster_sync();
    if (threadIdx.x < 128) {
        ptx::setmaxnreg_dec<kLoadRegs>();
        if (threadIdx.x == 0)
            load_role(s, a, w);
    } else {
        ptx::setmaxnreg_inc<kMathRegs>();
        math_role(s, a, w);
    }
    __syncwarp();
    ptx::cluster_sync(); /* nobody leaves while the other may still write here */
}

} // namespace

bool gdn_forward_fits_sm90(const am_gdn_args *a)
{
    return gdn_sm90::has_dims(a) && copyable(a->q) && copyable(a->k) && copyable(a->v) &&
           (a->o.dtype == AM_NONE || copyable(a->o)) && a->docs.n / 2 * a->v.shape[1] <= INT32_MAX / kPair;
}

size_t gdn_forward_sm90_scratch(const am_gdn_args *a)
{
    Place place = {};
    if (!gdn_sm90::has_dims(a))
        return 0;
    place_prepared(&place, a->q.shape[0], a->v.shape[1], false);
    return place.at + 128;
}

am_status gdn_forward_sm90(const am_gdn_args *a, cudaStream_t stream)
{
    constexpr size_t kSmem = sizeof(Smem) + 1024;
    static_assert(2 * (kSmem + 1024) <= 233472, "two blocks' shared memory");
    const int64_t n_docs = a->docs.n / 2, tokens = a->q.shape[0], heads = a->v.shape[1];
    Place place = {aligned(a->workspace), 0};
    const Prepared made = place_prepared(&place, tokens, heads, false);
    Args args = {};
    args.call = gdn_call(a);
    args.call.high = INT64_MAX;
    args.numbers = made.numbers;
    args.stride = made.stride;
    if (a->part != AM_GDN_EARLY)
        AM_TRY(gdn_fill_gaps(a, false, stream));
    if (n_docs == 0)
        return AM_OK;
    if (a->part != AM_GDN_REST)
        AM_TRY(prepare(args.call, made, tokens, stream));
    if (a->part == AM_GDN_EARLY)
        return AM_OK;
    const am_tensor t = dense(made.t, tokens, heads, kChunk), p = dense(made.p, tokens, heads, kChunk);
    AM_TRY(tensor_map_of(&args.q, &a->q, kChunk, 1));
    AM_TRY(tensor_map_of(&args.k, &a->k, kChunk, 1));
    AM_TRY(tensor_map_of(&args.v, &a->v, kChunk, 1));
    AM_TRY(tensor_map_of(&args.t, &t, kChunk, 1));
    AM_TRY(tensor_map_of(&args.p, &p, kChunk, 1));
    AM_CUDA(cudaFuncSetAttribute(gdn_fwd_sm90_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem));
    const int64_t blocks = n_docs * heads * kPair;
    gdn_fwd_sm90_kernel<<<static_cast<unsigned>(blocks), kThreads, kSmem, stream>>>(args);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}
