/* attention_fwd_stream_sm90.cuh -- the forward of attention_fwd_sm90.cuh for head dims up to 128: a block's tiles
 * without a seam, and three warpgroups at products where their registers allow.
 *
 *   a tile is 192 rows (128) of one document and key head
 *
 *   warpgroup 0, one thread   | next tile -> Q (smem) ; K and V blocks of kN keys, two stages each, right to left
 *   warpgroups 1, 2, (3)      | 64 rows each, by turns: S' = Q K'^T of the next block and O += P V of this one issued
 *                             | together; then the next warpgroup's turn, and the softmax of S'
 *
 * The blocks of all tiles are one stream: the next block of a tile's last is the next tile's first, so its scores are
 * under way before the tile is written out. The first product of a tile begins O, which is never zeroed. A tile that
 * sees no keys has one block that is hidden as a whole. The launch that counts tiles and fills gaps ends under the
 * beginning of this one (attention_prepare). Head dim 72: scores take 80 columns of 128 in shared memory, O 72.
 *
 * The elements' arithmetic, not the products, is what a scheduler waits for at these head dims: 64 exponentials a
 * thread and block are 512 of its cycles, and its dependent steps as many again. A third warp a scheduler fills them.
 * Two things cost as much: a branch between exponentials and sums (the assembler then mixes neither), and descriptors
 * made anew for every product. The wait for O += P V stands in front of the exponentials in the machine code, as it
 * does in FlashAttention-3's; held behind them by a data dependence it gained less than 1 %. Since the times below a
 * tile is written out before the next one's softmax, not behind it: at head dim 72 three warpgroups else spill.
 *
 * bf16, one H200, interleaved; TFLOP/s. First head dim 128, 32 heads of queries and 8 of keys, causal:
 *
 *                                     8K     32K    32K in uneven documents
 *   192 rows, 80 keys, turns          735    725    645     this kernel
 *   192 rows, 80 keys                 736    726    635
 *   192 rows, 96 keys                 585    560    508     spills
 *   128 rows, 128 keys, turns         698    643    607
 *   128 rows, 176 keys, turns         714    682    583
 *   128 rows, 160 keys, turns         701    664    591
 *   attention_fwd_sm90.cuh, 176 keys  683    672    566
 *   FlashAttention-3; cuDNN           703; 605  693; 590  557
 *
 * Head dim 64, the same heads, 8K: 192 rows 524, without turns 503, 128 rows 463; before 396; cuDNN 436. Head dim 72,
 * 16 heads, not causal (uneven: 256 to 4,096):
 *
 *                                     64 x 256    16 x 1,024   4 x 4,096   uneven
 *   192 rows, 128 keys, turns         174         377          526         497
 *   the same without turns            168         343          439         429
 *   128 rows, 128 keys, turns         208         338          396         388
 *   128 rows, 192 keys, turns         155         304          391         384
 *   192 rows, P through shared memory  -          366          489         469     another run
 *   two blocks a multiprocessor       175         265          299         297     64 keys; spills
 *   192 rows, an exponential in four  170         353          483         460
 *   by a polynomial
 *   before (two warpgroups)           206         329          385         377
 *   torch's SDPA, varlen; cuDNN       5, 150; 234 223, 207; 334 369, 228; 390 271, 210
 */
#ifndef ATTENTION_FWD_STREAM_SM90_CUH
#define ATTENTION_FWD_STREAM_SM90_CUH

#include "attention_fwd_sm90.cuh"

namespace attention_sm90
{

/* kD columns in shared memory, kDepth of them in scores, kOut in O; kN keys a block; kMathWgs warpgroups of 64 rows. */
template <int kD_, int kDepth_, int kOut_, int kN_, int kMathWgs_, int kQStages_, bool kTurns_> struct StreamTile {
    static constexpr int kD = kD_, kDepth = kDepth_, kOut = kOut_;
    static constexpr int kMathWgs = kMathWgs_, kM = 64 * kMathWgs, kN = kN_, kStages = 2, kQStages = kQStages_;
    static constexpr bool kTurns = kTurns_; /* of the warpgroups at the products */
    static constexpr int kBoxes = kD / 64;
    static constexpr int kLoadRegs = kMathWgs == 3 ? 32 : 40, kMathRegs = kMathWgs == 3 ? 160 : 232;
    static constexpr int kThreads = 128 * (1 + kMathWgs);
    static constexpr int kQBytes = kM * kD * 2, kKvBytes = kN * kD * 2;
    static_assert(kMathWgs == 2 || kMathWgs == 3, "registers");
};

template <class T> struct StreamSmem {
    alignas(1024) char q[T::kQStages][T::kQBytes];
    alignas(1024) char k[T::kStages][T::kKvBytes];
    alignas(1024) char v[T::kStages][T::kKvBytes];
    uint64_t q_full[T::kQStages], q_empty[T::kQStages]; /* 1 and the bytes; a warp each */
    uint64_t k_full[T::kStages], k_empty[T::kStages];   /* the same */
    uint64_t v_full[T::kStages], v_empty[T::kStages];
    Work work[4]; /* a tile's is read until the next one's first block is softened */
};

enum StreamBarrier { kFirstTurn = 2 }; /* and the next: a warpgroup each */

/* One thread: all copies of the block's tiles, in the order in which they are needed: V of a block after K of the
 * next, which may be another tile's. */
template <class T> __device__ void stream_load_role(StreamSmem<T> &s, const Args &a)
{
    Ring<T::kStages> k, v;
    Ring<T::kQStages> q;
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
        ptx::mbarrier_wait(&s.q_empty[q.slot], q.phase ^ 1);
        s.work[tile++ % 4] = w;
        ptx::mbarrier_arrive_expect_tx(&s.q_full[q.slot], T::kQBytes);
        for (int i = 0; i < T::kBoxes; i++)
            ptx::tma_load_3d(s.q[q.slot] + i * T::kM * 128, &a.q, &s.q_full[q.slot], 64 * i, w.head0, w.token0);
        q.advance();
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
    ptx::mbarrier_wait(&s.q_empty[q.slot], q.phase ^ 1);
    s.work[tile % 4].blocks = 0;
    ptx::mbarrier_arrive(&s.q_full[q.slot]);
    if (v_row >= 0)
        load_v();
}

template <int kCount> __device__ __forceinline__ void rescale_by(float (&o)[kCount], const float (&factor)[2])
{
    if (!__any_sync(0xffffffffu, factor[0] != 1.0f || factor[1] != 1.0f))
        return;
#pragma unroll
    for (int i = 0; i < kCount; i++)
        o[i] *= factor[i % 4 / 2];
}

template <bool kValue> struct Known {
    static constexpr bool value = kValue;
};

/* 64 rows of every tile. The order of waits and products is the kernel, so it is read in one piece. What a tile's last
 * step has in addition is not in the others' code, where a branch would keep the assembler from mixing exponentials
 * with sums. */
template <class T, class E> __device__ void stream_math_role(StreamSmem<T> &s, const Args &a) /* lint: allow length */
{
    const int wg = uniform(static_cast<int>(threadIdx.x) / 128 - 1);
    const bool signals = threadIdx.x % 32 == 0;
    const int row = 64 * wg + static_cast<int>(threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4);
    const uint32_t q_low = uniform(descriptor_low(s.q[0] + wg * 64 * 128, T::kM * 128));
    const uint32_t k_low = uniform(descriptor_low(s.k[0], T::kN * 128));
    const uint32_t v_low = uniform(descriptor_low(s.v[0], T::kN * 128));
    constexpr uint32_t kStep = T::kKvBytes >> 4; /* from stage to stage */
    const auto slot_of = [](uint32_t block) { return block % T::kStages; };
    const auto phase_of = [](uint32_t block) { return block / T::kStages % 2; };
    const auto q_slot_of = [](uint32_t tile) { return tile % T::kQStages; };
    uint32_t at = 0, tile = 0; /* the block whose scores are there, and its tile */
    int left, least;           /* blocks of the tile after it; keys that every row of the warpgroup sees */
    float o[T::kOut / 2], sc[T::kN / 2], top[2] = {-INFINITY, -INFINITY}, total[2] = {}, factor[2];
    uint32_t p[T::kN / 16][4];
    bool fresh = true; /* the block in p is its tile's first */
    const auto blocks_of = [&](uint32_t t) {
        ptx::mbarrier_wait(&s.q_full[q_slot_of(t)], t / T::kQStages % 2);
        return uniform(s.work[t % 4].blocks);
    };
    const auto turn_begins = [&] {
        if constexpr (T::kTurns)
            ptx::bar_sync(kFirstTurn + wg, 256);
    };
    const auto turn_ends = [&] {
        if constexpr (T::kTurns)
            ptx::bar_arrive(kFirstTurn + (wg + 1 == T::kMathWgs ? 0 : wg + 1), 256);
    };
    const auto begin = [&](uint32_t t, uint32_t block) {
        ptx::wgmma_fence();
        issue_scores<E, T::kDepth, T::kM, T::kN>(sc, q_low + q_slot_of(t) * (T::kQBytes >> 4),
                                                 k_low + slot_of(block) * kStep);
    };
    const auto add = [&] {
        if (!fresh)
            rescale_by(o, factor);
        ptx::mbarrier_wait(&s.v_full[slot_of(at)], phase_of(at));
        ptx::wgmma_fence();
        issue_weigh<E>(o, p, v_low + slot_of(at) * kStep, !fresh);
    };
    const auto scores_read = [&] {
        if (!signals)
            return;
        ptx::mbarrier_arrive(&s.k_empty[slot_of(at)]);
        if (left == 0)
            ptx::mbarrier_arrive(&s.q_empty[q_slot_of(tile)]);
    };
    const auto soften_block = [&] {
        const int key0 = left * T::kN;
        if (key0 + T::kN > least) {
            const Work &w = s.work[tile % 4];
            mask<T>(sc, key0, limit_of(a, w, row), limit_of(a, w, row + 8));
        }
        soften<T>(sc, top, total, factor, a.scale_log2);
    };
    const auto clear = [&] {
        const int rows = s.work[tile % 4].nk - left * T::kN; /* the tile has begun with this block */
        if (rows >= T::kN)
            return;
        ptx::mbarrier_wait(&s.v_full[slot_of(at)], phase_of(at));
        clear_rows<T::kN, T::kBoxes, 128 * T::kMathWgs>(s.v[slot_of(at)], rows);
        ptx::fence_proxy_async();
        ptx::bar_sync(kTail, 128 * T::kMathWgs);
    };
    const auto weighed = [&](uint32_t block) {
        ptx::wgmma_wait_group<0>();
        if (signals)
            ptx::mbarrier_arrive(&s.v_empty[slot_of(block)]);
    };
    const auto finish = [&](uint32_t t) {
        const Work &w = s.work[t % 4];
        write_row<T, E>(a, w, o, 0, row, top[0], total[0]);
        write_row<T, E>(a, w, o, 1, row + 8, top[1], total[1]);
        top[0] = top[1] = -INFINITY;
        total[0] = total[1] = 0.0f;
    };
    /* One block on, into the next tile where this one's last was; false: there is none. */
    const auto step = [&](auto last) {
        const int after = last.value ? blocks_of(tile + 1) - 1 : left - 1;
        if (after < 0)
            return false;
        const uint32_t next = at + 1;
        ptx::mbarrier_wait(&s.k_full[slot_of(next)], phase_of(next));
        turn_begins();
        begin(tile + (last.value ? 1 : 0), next);
        add();
        turn_ends();
        left = after;
        at = next;
        tile += last.value ? 1 : 0;
        ptx::wgmma_wait_group<1>();
        scores_read();
        if constexpr (last.value) { /* before the softmax, while P takes no registers */
            weighed(at - 1);
            finish(tile - 1);
            least = uniform(limit_of(a, s.work[tile % 4], 64 * wg));
        }
        soften_block();
        if constexpr (last.value)
            clear();
        else
            weighed(at - 1);
        pack<E>(p, sc);
        fresh = last.value;
        return true;
    };
    if (T::kTurns && wg == T::kMathWgs - 1)
        ptx::bar_arrive(kFirstTurn, 256);
    left = blocks_of(0) - 1;
    if (left < 0)
        return;
    least = uniform(limit_of(a, s.work[0], 64 * wg));
    ptx::mbarrier_wait(&s.k_full[0], 0);
    turn_begins();
    begin(0, 0);
    turn_ends();
    ptx::wgmma_wait_group<0>();
    scores_read();
    soften_block();
    clear();
    pack<E>(p, sc);
    do
        while (left > 0)
            step(Known<false>{});
    while (step(Known<true>{}));
    add();
    ptx::wgmma_wait_group<0>();
    finish(tile);
}

template <class T, class E>
__global__ void __launch_bounds__(T::kThreads, 1) attention_fwd_stream_sm90_kernel(const __grid_constant__ Args a)
{
    extern __shared__ char raw[];
    StreamSmem<T> &s = *reinterpret_cast<StreamSmem<T> *>(raw + (1024 - ptx::smem_address(raw) % 1024) % 1024);
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
            stream_load_role<T>(s, a);
    } else {
        ptx::setmaxnreg_inc<T::kMathRegs>();
        stream_math_role<T, E>(s, a);
    }
}

template <class T, class E> am_status launch_stream(const am_attention_args *a, cudaStream_t stream)
{
    constexpr size_t kSmem = sizeof(StreamSmem<T>) + 1024;
    static_assert(kSmem <= 232448, "227 KiB of shared memory");
    const auto kernel = attention_fwd_stream_sm90_kernel<T, E>;
    const int64_t group = a->q.shape[1] / a->k.shape[1];
    Args args = {};
    int sms = 0;
    AM_TRY(multiprocessors(&sms));
    AM_TRY(fill_args<T>(&args, a));
    AM_TRY(attention_prepare(a, T::kM / group, attention_scratch(a, false).first, args.next, stream));
    AM_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem));
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
    AM_CUDA(cudaLaunchKernelEx(&config, kernel, args));
    return AM_OK;
}

/* Rows of all tiles of kM, those behind documents too. */
template <class T> int64_t rows_of_tiles(const am_attention_args *a)
{
    const int64_t group = a->q.shape[1] / a->k.shape[1];
    int64_t rows = 0;
    for (int64_t d = 0; d + 1 < a->docs.n; d += 2)
        rows += ((a->docs.data[d + 1] - a->docs.data[d]) * group + T::kM - 1) / T::kM * T::kM;
    return rows;
}

/* Of two tiles that give the same bits the faster for this pack: `percent` is Wide's rate of Narrow's where both are
 * full of rows. */
template <class Wide, class Narrow, class E>
am_status launch_faster(const am_attention_args *a, int percent, cudaStream_t stream)
{
    static_assert(Wide::kN == Narrow::kN, "sums in one order");
    const int64_t group = a->q.shape[1] / a->k.shape[1];
    if (Wide::kM % group == 0 && rows_of_tiles<Wide>(a) * 100 <= rows_of_tiles<Narrow>(a) * percent)
        return launch_stream<Wide, E>(a, stream);
    return launch_stream<Narrow, E>(a, stream);
}

} // namespace attention_sm90

#endif
