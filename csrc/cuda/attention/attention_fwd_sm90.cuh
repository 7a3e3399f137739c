/* attention_fwd_sm90.cuh -- out and lse of attention.h for 16-bit inputs on Hopper, persistent and warp-specialised.
 *
 *   a tile is 128 rows of one document and key head: 128 / G tokens of all G query heads that read the head, so that
 *   one key tile serves them all and the causal edge is G times finer
 *
 *   warpgroup 0, one thread  | next tile -> Q (smem) ; K and V blocks of kN keys, two stages each, right to left
 *   warpgroups 1, 2          | 64 rows each, at their own pace:
 *                            |   S' = Q K'^T  (wgmma, smem x smem)  |  issued together; the softmax of S' runs
 *                            |   O += P V     (wgmma, regs x smem)  |  under the second, and under the other's
 *
 * The running maximum only moves when a row outgrows it by 2^8: O is then rescaled, under S'. Rows of V behind the
 * document are zeroed in shared memory, since 0 times a neighbour's NaN would be NaN; scores behind it are replaced.
 * Descriptors are sums of uniform registers: made in vector registers, they leave gaps between the products (84 % of
 * the cycles busy instead of 92 %). Turns between the two warpgroups cost 2 %. What Nsight Compute read for the
 * document below: 92.3 % of the tensor cores' cycles, 7.9 GB read from L2, 0.15 GB from memory, 1.41 ms.
 *
 * Floor: 4 D flops a visible score at the rate of the tensor cores, and a tile reads its keys and values (4 D bytes a
 * key) from L2: 128 flops a byte. D 256, one causal document of 8,192 tokens and 32 heads: 1.10 TFLOP,
 * 1.39 ms at 790 TFLOP/s; 8.6 GB from L2 (6.2 TB/s), 0.3 GB from memory.
 *
 * Head dims below 256 but for 80: attention_fwd_stream_sm90.cuh.
 */
#ifndef ATTENTION_FWD_SM90_CUH
#define ATTENTION_FWD_SM90_CUH

#include "attention_sm90.cuh"

#include <math.h>

namespace attention_sm90
{

/* kD columns in shared memory, in sums over keys and in O; kDepth of them in scores, where the head dim is no multiple
 * of 64: the copy engine fills the rest with zeros. */
template <int kD_, int kDepth_ = kD_> struct Tile {
    static constexpr int kD = kD_, kDepth = kDepth_, kOut = kD_;
    static constexpr int kM = 128, kN = kD == 256 ? 80 : 128, kStages = 2, kMathWgs = 2;
    static constexpr int kBoxes = kD / 64; /* of 64 elements, 128 bytes */
    static constexpr int kLoadRegs = 40, kMathRegs = 232;
    static constexpr int kThreads = 128 * (1 + kMathWgs);
    static constexpr int kQBytes = kM * kD * 2, kKvBytes = kN * kD * 2;
    static constexpr int kLaunchRegs = 65536 / kThreads / 8 * 8; /* what every thread starts with */
    static_assert(kLoadRegs + kMathWgs * kMathRegs <= (1 + kMathWgs) * kLaunchRegs, "the block's registers");
    static_assert(kD % 64 == 0 && kDepth % 16 == 0 && kDepth <= kD && kN % 16 == 0 && kM == 64 * kMathWgs,
                  "whole boxes, steps and slabs");
    static_assert(kN * 128 % 1024 == 0, "boxes start on a swizzle's period");
};

template <class T> struct Smem {
    alignas(1024) char q[T::kQBytes];
    alignas(1024) char k[T::kStages][T::kKvBytes];
    alignas(1024) char v[T::kStages][T::kKvBytes];
    uint64_t q_full, q_empty;                         /* 1 and the bytes; a warp each */
    uint64_t k_full[T::kStages], k_empty[T::kStages]; /* the same */
    uint64_t v_full[T::kStages], v_empty[T::kStages];
    Work work[2]; /* the tile's, and the one before, which may still be written out */
};

struct Args {
    CUtensorMap q, k, v;
    AttentionView out, lse, low; /* low.data may be null */
    AttentionDocs docs;
    const int64_t *first;
    int64_t *next;
    uint32_t key_heads;
    int group_shift; /* G = 1 << it */
    float scale_log2;
    int dim;
    bool causal;
};

enum Barrier { kTail = 1 }; /* named barriers; 0 is __syncthreads' */

template <class T>
__device__ void load_block(char *to, const CUtensorMap *map, uint64_t *full, uint64_t *empty, uint32_t phase,
                           int key_head, int row)
{
    ptx::mbarrier_wait(empty, phase ^ 1);
    ptx::mbarrier_arrive_expect_tx(full, T::kKvBytes);
    for (int i = 0; i < T::kBoxes; i++)
        ptx::tma_load_3d(to + i * T::kN * 128, map, full, 64 * i, key_head, row);
}

/* One thread: all copies of the block's tiles, in the order in which they are needed. */
template <class T> __device__ void load_role(Smem<T> &s, const Args &a)
{
    Ring<T::kStages> k, v;
    uint32_t q_phase = 0;
    const uint32_t total = static_cast<uint32_t>(a.first[a.docs.n]) * a.key_heads;
    uint32_t place = blockIdx.x;
    while (place < total) {
        int row, key_head;
        const Work w = work_at<T::kM, T::kN>(a, place, &row, &key_head);
        for (int n = 0; n <= w.blocks; n++) {
            const int at = row + (w.blocks - 1 - n) * T::kN;
            if (n == w.blocks)
                place = next_place(a.next);
            if (n < w.blocks) {
                load_block<T>(s.k[k.slot], &a.k, &s.k_full[k.slot], &s.k_empty[k.slot], k.phase, key_head, at);
                k.advance();
            }
            if (n == 0) {
                ptx::mbarrier_wait(&s.q_empty, q_phase ^ 1);
                s.work[q_phase] = w;
                ptx::mbarrier_arrive_expect_tx(&s.q_full, T::kQBytes);
                for (int i = 0; i < T::kBoxes; i++)
                    ptx::tma_load_3d(s.q + i * T::kM * 128, &a.q, &s.q_full, 64 * i, w.head0, w.token0);
                q_phase ^= 1;
            } else {
                load_block<T>(s.v[v.slot], &a.v, &s.v_full[v.slot], &s.v_empty[v.slot], v.phase, key_head, at + T::kN);
                v.advance();
            }
        }
    }
    ptx::mbarrier_wait(&s.q_empty, q_phase ^ 1);
    s.work[q_phase].blocks = -1;
    ptx::mbarrier_arrive(&s.q_full);
}

/* Thread's rows are g and g + 8 of its warp's 16, its columns 8 j + 2 c and the next. */
template <class T> __device__ __forceinline__ void mask(float (&sc)[T::kN / 2], int key0, int limit0, int limit1)
{
    const int column = key0 + static_cast<int>(threadIdx.x % 4) * 2;
#pragma unroll
    for (int i = 0; i < T::kN / 2; i++) {
        const int limit = i % 4 < 2 ? limit0 : limit1;
        if (column + i / 4 * 8 + i % 2 >= limit)
            sc[i] = -INFINITY;
    }
}

/* Scores become weights; `top` moves only when a row outgrows it by 2^8, and then `factor` is what O shrinks by. Maxima
 * and sums run in four chains a thread, two for each row: one would wait for itself. */
template <class T>
__device__ __forceinline__ void soften(float (&sc)[T::kN / 2], float (&top)[2], float (&total)[2], float (&factor)[2],
                                       float scale_log2)
{
    float most[4] = {sc[0], sc[1], sc[2], sc[3]}, sum[4] = {}, base[2];
#pragma unroll
    for (int i = 4; i < T::kN / 2; i++)
        most[i % 4] = fmaxf(most[i % 4], sc[i]);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float now = fmaxf(most[2 * r], most[2 * r + 1]);
        now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 1));
        now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 2));
        const bool moves = (now - top[r]) * scale_log2 > 8.0f; /* false for -inf - -inf */
        now = moves ? now : top[r];
        factor[r] = moves ? ptx::ex2_approx((top[r] - now) * scale_log2) : 1.0f;
        top[r] = now;
        base[r] = now == -INFINITY ? 0.0f : now * scale_log2;
    }
#pragma unroll
    for (int i = 0; i < T::kN / 2; i++) {
        sc[i] = ptx::ex2_approx(fmaf(sc[i], scale_log2, -base[i % 4 / 2]));
        sum[i % 4] += sc[i];
    }
#pragma unroll
    for (int r = 0; r < 2; r++)
        total[r] = fmaf(total[r], factor[r], sum[2 * r] + sum[2 * r + 1]);
}

template <class T> __device__ __forceinline__ void rescale(float (&o)[T::kD / 2], const float (&factor)[2])
{
    if (!__any_sync(0xffffffffu, factor[0] != 1.0f || factor[1] != 1.0f))
        return;
#pragma unroll
    for (int i = 0; i < T::kD / 2; i++)
        o[i] *= factor[i % 4 / 2];
}

/* Zeros in rows of V behind the document, by all math threads. */
template <class T> __device__ void clear_tail(char *v, int rows)
{
    clear_rows<T::kN, T::kBoxes>(v, rows);
    ptx::fence_proxy_async();
    ptx::bar_sync(kTail, 256);
}

/* Row r of the thread's two (8 apart): out, and lse by the quad's first lane. */
template <class T, class E>
__device__ __forceinline__ void write_row(const Args &a, const Work &w, const float (&o)[T::kOut / 2], int r, int row,
                                          float top, float total)
{
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
    const int token = row >> a.group_shift, head = w.head0 + (row & ((1 << a.group_shift) - 1));
    const int64_t t = static_cast<int64_t>(w.token0) + token;
    const bool real = token < w.tokens;
    const int lane = static_cast<int>(threadIdx.x % 4);
    store_row<E>(static_cast<E *>(a.out.data) + t * a.out.token + head * a.out.head, real, o, r, inverse,
                 columns<T>(a.dim));
    if (!real || lane != 0)
        return;
    const float log_total = logf(total), most = top * a.scale_log2 * 0.69314718056f, both = most + log_total;
    static_cast<float *>(a.lse.data)[t * a.lse.token + head * a.lse.head] = total == 0.0f ? -INFINITY : both;
    if (a.low.data != nullptr)
        static_cast<float *>(a.low.data)[t * a.low.token + head * a.low.head] =
            total == 0.0f ? 0.0f : log_total - (both - most);
}

/* 64 rows of every tile. What is rarely needed of the tile stays in shared memory: registers are short. The order of
 * waits and products is the kernel, so it is read in one piece. */
template <class T, class E> __device__ void math_role(Smem<T> &s, const Args &a) /* lint: allow length */
{
    uint32_t q_phase = 0, at = 0; /* at: blocks of K begun; those of V follow by one */
    const auto slot_of = [](uint32_t block) { return block % T::kStages; };
    const auto phase_of = [](uint32_t block) { return block / T::kStages % 2; };
    const int wg = uniform(static_cast<int>(threadIdx.x) / 128 - 1);
    const bool signals = threadIdx.x % 32 == 0;                                                   /* a warp's arrival */
    const int row = 64 * wg + static_cast<int>(threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4); /* and row + 8 */
    const uint32_t q_low = uniform(descriptor_low(s.q + wg * 64 * 128, T::kM * 128));
    const auto k_low = [&](uint32_t block) { return uniform(descriptor_low(s.k[slot_of(block)], T::kN * 128)); };
    const auto v_low = [&](uint32_t block) { return uniform(descriptor_low(s.v[slot_of(block)], T::kN * 128)); };
    for (;; q_phase ^= 1) {
        ptx::mbarrier_wait(&s.q_full, q_phase);
        const Work &w = s.work[q_phase];
        const int blocks = uniform(w.blocks);
        int key0 = (blocks - 1) * T::kN;
        if (blocks < 0)
            return;
        float o[T::kD / 2] = {}, sc[T::kN / 2], top[2] = {-INFINITY, -INFINITY}, total[2] = {}, factor[2];
        if (blocks > 0) {
            const int least = limit_of(a, w, 64 * wg), tail = w.nk - key0;
            uint32_t p[T::kN / 16][4];
            ptx::mbarrier_wait(&s.k_full[slot_of(at)], phase_of(at));
            ptx::wgmma_fence();
            issue_scores<E, T::kDepth, T::kM, T::kN>(sc, q_low, k_low(at));
            ptx::wgmma_wait_group<0>();
            if (signals)
                ptx::mbarrier_arrive(&s.k_empty[slot_of(at)]);
            if (tail < T::kN) {
                ptx::mbarrier_wait(&s.v_full[slot_of(at)], phase_of(at));
                clear_tail<T>(s.v[slot_of(at)], tail);
            }
            at++;
            mask<T>(sc, key0, limit_of(a, w, row), limit_of(a, w, row + 8));
            soften<T>(sc, top, total, factor, a.scale_log2);
            pack<E>(p, sc);
            while ((key0 -= T::kN) >= 0) {
                ptx::mbarrier_wait(&s.k_full[slot_of(at)], phase_of(at));
                ptx::wgmma_fence();
                issue_scores<E, T::kDepth, T::kM, T::kN>(sc, q_low, k_low(at));
                rescale<T>(o, factor);
                ptx::mbarrier_wait(&s.v_full[slot_of(at - 1)], phase_of(at - 1));
                ptx::wgmma_fence();
                issue_weigh<E>(o, p, v_low(at - 1));
                ptx::wgmma_wait_group<1>();
                if (signals)
                    ptx::mbarrier_arrive(&s.k_empty[slot_of(at)]);
                if (key0 + T::kN > least)
                    mask<T>(sc, key0, limit_of(a, w, row), limit_of(a, w, row + 8));
                soften<T>(sc, top, total, factor, a.scale_log2);
                ptx::wgmma_wait_group<0>();
                if (signals)
                    ptx::mbarrier_arrive(&s.v_empty[slot_of(at - 1)]);
                at++;
                pack<E>(p, sc);
            }
            if (signals)
                ptx::mbarrier_arrive(&s.q_empty);
            rescale<T>(o, factor);
            ptx::mbarrier_wait(&s.v_full[slot_of(at - 1)], phase_of(at - 1));
            ptx::wgmma_fence();
            issue_weigh<E>(o, p, v_low(at - 1));
            ptx::wgmma_wait_group<0>();
            if (signals)
                ptx::mbarrier_arrive(&s.v_empty[slot_of(at - 1)]);
        } else if (signals) {
            ptx::mbarrier_arrive(&s.q_empty);
        }
        write_row<T, E>(a, w, o, 0, row, top[0], total[0]);
        write_row<T, E>(a, w, o, 1, row + 8, top[1], total[1]);
    }
}

template <class T, class E>
__global__ void __launch_bounds__(T::kThreads, 1) attention_fwd_sm90_kernel(const __grid_constant__ Args a)
{
    extern __shared__ char raw[];
    Smem<T> &s = *reinterpret_cast<Smem<T> *>(raw + (1024 - ptx::smem_address(raw) % 1024) % 1024);
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(&s.q_full, 1);
        ptx::mbarrier_init(&s.q_empty, 4 * T::kMathWgs);
        for (int i = 0; i < T::kStages; i++) {
            ptx::mbarrier_init(&s.k_full[i], 1);
            ptx::mbarrier_init(&s.v_full[i], 1);
            ptx::mbarrier_init(&s.k_empty[i], 4 * T::kMathWgs);
            ptx::mbarrier_init(&s.v_empty[i], 4 * T::kMathWgs);
        }
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        ptx::setmaxnreg_dec<T::kLoadRegs>();
        if (threadIdx.x == 0)
            load_role<T>(s, a);
    } else {
        ptx::setmaxnreg_inc<T::kMathRegs>();
        math_role<T, E>(s, a);
    }
}

/* What the kernel takes, beside dtype and head dims from `least` to `most`. `out` is not there yet when a caller asks
 * which row will run. */
inline bool fits(const am_attention_args *a, am_dtype dtype, int64_t least, int64_t most)
{
    const int64_t group = a->q.shape[1] / a->k.shape[1], dim = a->q.shape[2];
    return a->q.dtype == dtype && dim >= least && dim <= most && dim % 8 == 0 && group >= 1 && group <= 128 &&
           (group & (group - 1)) == 0 && copyable(a->q) && copyable(a->k) && copyable(a->v) &&
           (a->out.dtype == AM_NONE || copyable(a->out)) && a->scale >= 0.0 &&
           a->q.shape[0] * group / Tile<256>::kM + a->docs.n / 2 < (1ll << 31) / a->k.shape[1];
}

template <class T> am_status fill_args(Args *to, const am_attention_args *a)
{
    constexpr float kLeast = 1e-30f; /* a scale of 0 would make NaN of hidden scores */
    const AttentionScratch scratch = attention_scratch(a, false);
    const int64_t group = a->q.shape[1] / a->k.shape[1];
    Args &args = *to;
    AM_TRY(tensor_map_of(&args.q, &a->q, static_cast<uint32_t>(T::kM / group), static_cast<uint32_t>(group)));
    AM_TRY(tensor_map_of(&args.k, &a->k, T::kN, 1));
    AM_TRY(tensor_map_of(&args.v, &a->v, T::kN, 1));
    args.out = attention_view(a->out);
    args.lse = attention_view(a->lse);
    args.low = attention_view(a->lse_low);
    args.docs = attention_docs(a);
    args.first = scratch.first;
    args.next = scratch.next;
    args.key_heads = static_cast<uint32_t>(a->k.shape[1]);
    while (1 << args.group_shift < group)
        args.group_shift++;
    args.scale_log2 = fmaxf(static_cast<float>(a->scale * 1.4426950408889634), kLeast);
    args.dim = static_cast<int>(a->q.shape[2]);
    args.causal = a->causal;
    return AM_OK;
}

template <class T, class E> am_status launch(const am_attention_args *a, cudaStream_t stream)
{
    constexpr size_t kSmem = sizeof(Smem<T>) + 1024;
    static_assert(kSmem <= 232448, "227 KiB of shared memory");
    const int64_t group = a->q.shape[1] / a->k.shape[1];
    Args args = {};
    int sms = 0;
    AM_TRY(multiprocessors(&sms));
    AM_TRY(fill_args<T>(&args, a));
    AM_TRY(attention_fill_gaps(a, false, stream));
    AM_TRY(attention_place_tiles(a, false, T::kM / group, attention_scratch(a, false).first, args.next, stream));
    AM_CUDA(cudaFuncSetAttribute(attention_fwd_sm90_kernel<T, E>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem));
    attention_fwd_sm90_kernel<T, E><<<static_cast<unsigned>(sms), T::kThreads, kSmem, stream>>>(args);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

} // namespace attention_sm90

#endif
