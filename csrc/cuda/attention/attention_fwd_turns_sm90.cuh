/* attention_fwd_turns_sm90.cuh -- the forward of attention_fwd_sm90.cuh for short documents and head dim 72: a block's
 * tiles without a seam.
 *
 *   warpgroup 0, one thread | next tile -> Q (smem), two stages; K and V blocks of 128 keys, two stages each
 *   warpgroups 1, 2         | 64 rows each, by turns: S' = Q K'^T of the next block and O += P V of this one issued
 *                           | together; then the other's turn, and the softmax of S'
 *
 * The blocks of all tiles are one stream: the next block of a tile's last is the next tile's first, so its scores are
 * under way before the tile is written out. The first product of a tile begins O, which is never zeroed. A tile
 * that sees no keys has one block that is hidden as a whole. The launch that counts tiles and fills gaps ends under the
 * beginning of this one (attention_prepare).
 *
 * Scores take 80 columns of 128 in shared memory, O 72: of 152 columns 144 count, of the other kernel's 208 as many.
 *
 * Not causal, 16 heads of 72, bf16, one H200; TFLOP/s with and without the one launch of attention_prepare,
 * interleaved (uneven: 256 to 4,096):
 *
 *                                     64 x 256       16 x 1,024     4 x 4,096      uneven
 *   this kernel                       203, 187       331, 320       389, 387       382, 376
 *   without turns                     202, 186       320, 310       375, 374       372, 366
 *   without turns, O of 128 columns   200, 184       312, 304       375, 371       368, 363
 *   two sets of scores, O of 72       194, 178       321, 313       384, 380       372, 368
 *   two sets of scores, O of 80       194, 177       315, 306       380, 379       370, 366
 *   two sets of scores, 96 keys       177, 164       288, 281       360, 357       348, 344
 *   the same, O of 64 and of 8 apart  174, 161       281, 273       350, 348       340, 336
 *   attention_fwd_sm90.cuh            200, 184       313, 305       375, 373       364, 360
 *   torch's SDPA, varlen; cuDNN       5, 150; 236    108, 208; 336  367, 229; 388  272, 211
 *
 * (SDPA's 108 at 1,024 is a busy host's: 223 in results/h200/attention_frames.json.) Nsight Compute, 16 of 1,024:
 * tensor cores busy 38 % of the cycles, of the other kernel's 49 % for more columns; 230 us and 242.
 *
 * Seen in the machine code afterwards, here and in attention_fwd_sm90.cuh: the assembler puts the wait for O += P V in
 * front of the exponentials, which then run under the other warpgroup's products alone. Not mended: no GPU was left to
 * measure on.
 */
#ifndef ATTENTION_FWD_TURNS_SM90_CUH
#define ATTENTION_FWD_TURNS_SM90_CUH

#include "attention_fwd_sm90.cuh"

namespace attention_sm90
{

/* As Tile; kOut columns of O. */
struct TurnsTile {
    static constexpr int kD = 128, kDepth = 80, kOut = 72;
    static constexpr int kM = 128, kN = 128, kStages = 2, kQStages = 2, kMathWgs = 2;
    static constexpr int kBoxes = kD / 64;
    static constexpr int kLoadRegs = 40, kMathRegs = 232;
    static constexpr int kThreads = 128 * (1 + kMathWgs);
    static constexpr int kQBytes = kM * kD * 2, kKvBytes = kN * kD * 2;
};

template <class T> struct TurnsSmem {
    alignas(1024) char q[T::kQStages][T::kQBytes];
    alignas(1024) char k[T::kStages][T::kKvBytes];
    alignas(1024) char v[T::kStages][T::kKvBytes];
    uint64_t q_full[T::kQStages], q_empty[T::kQStages]; /* 1 and the bytes; a warp each */
    uint64_t k_full[T::kStages], k_empty[T::kStages];   /* the same */
    uint64_t v_full[T::kStages], v_empty[T::kStages];
    Work work[4]; /* a tile's is read until the next one's first block is softened */
};

enum TurnsBarrier { kFirstTurn = 2 }; /* and the next: a warpgroup each */

/* One thread: all copies of the block's tiles, in the order in which they are needed: V of a block after K of the
 * next, which may be another tile's. */
template <class T> __device__ void turns_load_role(TurnsSmem<T> &s, const Args &a)
{
    Ring<T::kStages> k, v;
    uint32_t tile = 0, place = blockIdx.x;
    const uint32_t total = static_cast<uint32_t>(a.first[a.docs.n]) * a.key_heads;
    int v_row = -1, v_head = 0;
    const auto load_v = [&] {
        load_block<T>(s.v[v.slot], &a.v, &s.v_full[v.slot], &s.v_empty[v.slot], v.phase, v_head, v_row);
        v.advance();
    };
    while (place < total) {
        int row, key_head;
        Work w = work_at<T::kM, T::kN>(a, place, &row, &key_head);
        w.blocks = w.blocks > 1 ? w.blocks : 1;
        const int slot = static_cast<int>(tile % 2);
        ptx::mbarrier_wait(&s.q_empty[slot], tile / 2 % 2 ^ 1);
        s.work[tile % 4] = w;
        ptx::mbarrier_arrive_expect_tx(&s.q_full[slot], T::kQBytes);
        for (int i = 0; i < T::kBoxes; i++)
            ptx::tma_load_3d(s.q[slot] + i * T::kM * 128, &a.q, &s.q_full[slot], 64 * i, w.head0, w.token0);
        tile++;
        for (int n = w.blocks - 1; n >= 0; n--) {
            load_block<T>(s.k[k.slot], &a.k, &s.k_full[k.slot], &s.k_empty[k.slot], k.phase, key_head, row + n * T::kN);
            k.advance();
            if (v_row >= 0)
                load_v();
            v_row = row + n * T::kN;
            v_head = key_head;
        }
        place = next_place(a.next);
    }
    ptx::mbarrier_wait(&s.q_empty[tile % 2], tile / 2 % 2 ^ 1);
    s.work[tile % 4].blocks = 0;
    ptx::mbarrier_arrive(&s.q_full[tile % 2]);
    if (v_row >= 0)
        load_v();
}

/* O = keep O + P V of one block. */
template <class E, int kCount, int kSteps>
__device__ __forceinline__ void issue_weigh_from(float (&o)[kCount], const uint32_t (&p)[kSteps][4], uint32_t b,
                                                 bool keep)
{
#pragma unroll
    for (int j = 0; j < kSteps; j++)
        Element<E>::weigh(o, p[j], descriptor(b + j * (2048 >> 4)), j != 0 || keep);
    ptx::wgmma_commit_group();
}

template <int kCount> __device__ __forceinline__ void rescale_by(float (&o)[kCount], const float (&factor)[2])
{
    if (!__any_sync(0xffffffffu, factor[0] != 1.0f || factor[1] != 1.0f))
        return;
#pragma unroll
    for (int i = 0; i < kCount; i++)
        o[i] *= factor[i % 4 / 2];
}

/* Where a math warpgroup is in the stream. */
template <class T> struct Stream {
    TurnsSmem<T> &s;
    int wg;
    uint32_t at = 0, tile = 0; /* the block whose scores are there, and its tile */
    int left;                  /* blocks of the tile after it */
    int least = 0;             /* keys that every row of the warpgroup sees */
    __device__ uint32_t q_low(uint32_t t) const
    {
        return uniform(descriptor_low(s.q[t % 2] + wg * 64 * 128, T::kM * 128));
    }
    __device__ uint32_t k_low(uint32_t block) const
    {
        return uniform(descriptor_low(s.k[block % T::kStages], T::kN * 128));
    }
    __device__ uint32_t v_low(uint32_t block) const
    {
        return uniform(descriptor_low(s.v[block % T::kStages], T::kN * 128));
    }
    __device__ int blocks_of(uint32_t t) const /* waits for the tile */
    {
        ptx::mbarrier_wait(&s.q_full[t % 2], t / 2 % 2);
        return uniform(s.work[t % 4].blocks);
    }
    __device__ void wait_k(uint32_t block) const
    {
        ptx::mbarrier_wait(&s.k_full[block % T::kStages], block / T::kStages % 2);
    }
    __device__ void wait_v(uint32_t block) const
    {
        ptx::mbarrier_wait(&s.v_full[block % T::kStages], block / T::kStages % 2);
    }
};

/* 64 rows of every tile. The order of waits and products is the kernel, so it is read in one piece. */
template <class T, class E> __device__ void turns_math_role(TurnsSmem<T> &s, const Args &a) /* lint: allow length */
{
    Stream<T> x{s, uniform(static_cast<int>(threadIdx.x) / 128 - 1)};
    const bool signals = threadIdx.x % 32 == 0;
    const int row = 64 * x.wg + static_cast<int>(threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4);
    float o[T::kOut / 2], sc[T::kN / 2], top[2] = {-INFINITY, -INFINITY}, total[2] = {}, factor[2];
    uint32_t p[T::kN / 16][4];
    const auto finish = [&](uint32_t tile, const float (&most)[2], const float (&sum)[2]) {
        const Work &w = s.work[tile % 4];
        write_row<T, E>(a, w, o, 0, row, most[0], sum[0]);
        write_row<T, E>(a, w, o, 1, row + 8, most[1], sum[1]);
    };
    const auto soften_block = [&] {
        const Work &w = s.work[x.tile % 4];
        const int key0 = x.left * T::kN;
        if (key0 + T::kN > x.least)
            mask<T>(sc, key0, limit_of(a, w, row), limit_of(a, w, row + 8));
        soften<T>(sc, top, total, factor, a.scale_log2);
    };
    const auto clear = [&] { /* the tile has begun with this block */
                             const Work &w = s.work[x.tile % 4];
                             if (w.nk - x.left * T::kN < T::kN) {
                                 x.wait_v(x.at);
                                 clear_tail<T>(s.v[x.at % T::kStages], w.nk - x.left * T::kN);
                             }
    };
    if (x.wg == 1)
        ptx::bar_arrive(kFirstTurn, 256);
    x.left = x.blocks_of(0) - 1;
    if (x.left < 0)
        return;
    x.least = limit_of(a, s.work[0], 64 * x.wg);
    x.wait_k(0);
    ptx::bar_sync(kFirstTurn + x.wg, 256);
    ptx::wgmma_fence();
    issue_scores<E, T::kDepth, T::kM, T::kN>(sc, x.q_low(0), x.k_low(0));
    ptx::bar_arrive(kFirstTurn + 1 - x.wg, 256);
    ptx::wgmma_wait_group<0>();
    if (signals) {
        ptx::mbarrier_arrive(&s.k_empty[0]);
        if (x.left == 0)
            ptx::mbarrier_arrive(&s.q_empty[0]);
    }
    soften_block();
    clear();
    pack<E>(p, sc);
    bool fresh = true; /* the block in p is its tile's first */
    for (;;) {
        const bool last = x.left == 0;
        const int after = last ? x.blocks_of(x.tile + 1) - 1 : x.left - 1;
        if (after < 0)
            break;
        x.wait_k(x.at + 1);
        ptx::bar_sync(kFirstTurn + x.wg, 256);
        ptx::wgmma_fence();
        issue_scores<E, T::kDepth, T::kM, T::kN>(sc, x.q_low(x.tile + (last ? 1 : 0)), x.k_low(x.at + 1));
        if (!fresh)
            rescale_by(o, factor);
        x.wait_v(x.at);
        ptx::wgmma_fence();
        issue_weigh_from<E>(o, p, x.v_low(x.at), !fresh);
        ptx::bar_arrive(kFirstTurn + 1 - x.wg, 256);
        const float most[2] = {top[0], top[1]}, sum[2] = {total[0], total[1]};
        if (last) {
            top[0] = top[1] = -INFINITY;
            total[0] = total[1] = 0.0f;
            x.tile++;
            x.least = limit_of(a, s.work[x.tile % 4], 64 * x.wg);
        }
        x.left = after;
        x.at++;
        ptx::wgmma_wait_group<1>();
        if (signals) {
            ptx::mbarrier_arrive(&s.k_empty[x.at % T::kStages]);
            if (after == 0)
                ptx::mbarrier_arrive(&s.q_empty[x.tile % 2]);
        }
        soften_block();
        ptx::wgmma_wait_group<0>();
        if (signals)
            ptx::mbarrier_arrive(&s.v_empty[(x.at - 1) % T::kStages]);
        if (last) {
            finish(x.tile - 1, most, sum);
            clear();
        }
        fresh = last;
        pack<E>(p, sc);
    }
    if (!fresh)
        rescale_by(o, factor);
    x.wait_v(x.at);
    ptx::wgmma_fence();
    issue_weigh_from<E>(o, p, x.v_low(x.at), !fresh);
    ptx::wgmma_wait_group<0>();
    finish(x.tile, top, total);
}

template <class T, class E>
__global__ void __launch_bounds__(T::kThreads, 1) attention_fwd_turns_sm90_kernel(const __grid_constant__ Args a)
{
    extern __shared__ char raw[];
    TurnsSmem<T> &s = *reinterpret_cast<TurnsSmem<T> *>(raw + (1024 - ptx::smem_address(raw) % 1024) % 1024);
    if (threadIdx.x == 0) {
        for (int i = 0; i < T::kQStages; i++) {
            ptx::mbarrier_init(&s.q_full[i], 1);
            ptx::mbarrier_init(&s.q_empty[i], 4 * T::kMathWgs);
        }
        for (int i = 0; i < T::kStages; i++) {
            ptx::mbarrier_init(&s.k_full[i], 1);
            ptx::mbarrier_init(&s.v_full[i], 1);
            ptx::mbarrier_init(&s.k_empty[i], 4 * T::kMathWgs);
            ptx::mbarrier_init(&s.v_empty[i], 4 * T::kMathWgs);
        }
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    ptx::griddepcontrol_wait();
    if (threadIdx.x < 128) {
        ptx::setmaxnreg_dec<T::kLoadRegs>();
        if (threadIdx.x == 0)
            turns_load_role<T>(s, a);
    } else {
        ptx::setmaxnreg_inc<T::kMathRegs>();
        turns_math_role<T, E>(s, a);
    }
}

template <class T, class E> am_status launch_turns(const am_attention_args *a, cudaStream_t stream)
{
    constexpr size_t kSmem = sizeof(TurnsSmem<T>) + 1024;
    static_assert(kSmem <= 232448, "227 KiB of shared memory");
    const int64_t group = a->q.shape[1] / a->k.shape[1];
    Args args = {};
    int sms = 0;
    AM_TRY(multiprocessors(&sms));
    AM_TRY(fill_args<T>(&args, a));
    AM_TRY(attention_prepare(a, T::kM / group, attention_scratch(a, false).first, args.next, stream));
    AM_CUDA(cudaFuncSetAttribute(attention_fwd_turns_sm90_kernel<T, E>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 kSmem));
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(sms));
    config.blockDim = dim3(T::kThreads);
    config.dynamicSmemBytes = kSmem;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = 1;
    AM_CUDA(cudaLaunchKernelEx(&config, attention_fwd_turns_sm90_kernel<T, E>, args));
    return AM_OK;
}

} // namespace attention_sm90

#endif
