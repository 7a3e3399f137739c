/* attention_dkdv_narrow_sm90.cuh -- dk and dv as attention_dkdv_sm90.cuh has them, for head dims up to 80.
 *
 *   a tile is 128 keys of one document and key head; a block is 64 rows that see them, 64 / G tokens of all G heads
 *
 *   warpgroup 0, one thread | next tile -> K, V (smem); blocks of Q, four stages, last to first
 *   warpgroup 0, one warp   | blocks of dO, as many; lse and delta of each block
 *   warpgroups 1, 2         | 64 keys each: S = K Q^T and dP = V dO^T (smem x smem) of a block, dV += P dO and
 *                           | dK += dS Q (regs x smem) of the one before; P = exp(S - lse) and dS = P (dP - delta)
 *                           | are made under the last two
 *
 * dV and dK fit into one warpgroup's registers beside both sets of scores, so that P never leaves them and Q and dO
 * serve twice as many keys. The sums run in one order: the same bits every time.
 *
 * Floor: 8 D flops a visible score at the rate of the tensor cores, 128 D bytes of Q and dO from L2 for 64 rows and 128
 * keys.
 */
#ifndef ATTENTION_DKDV_NARROW_SM90_CUH
#define ATTENTION_DKDV_NARROW_SM90_CUH

#include "attention_dkdv_sm90.cuh"

namespace attention_sm90
{

template <int kD, int kDepth> struct NarrowKeyTile : KeyTile<kD, 1, kDepth> {
    static constexpr int kWgKeys = 64, kKeys = 2 * kWgKeys, kKeyBytes = kKeys * kD * 2; /* of K or V */
};

template <int kD, int kDepth> struct KeySmem<NarrowKeyTile<kD, kDepth>> {
    using T = NarrowKeyTile<kD, kDepth>;
    alignas(1024) char k[T::kKeyBytes];
    alignas(1024) char v[T::kKeyBytes];
    alignas(1024) char q[T::kStages][T::kBytes];
    alignas(1024) char dout[T::kStages][T::kBytes];
    float lse[T::kStages][T::kRows], delta[T::kStages][T::kRows];
    uint64_t kv_full, kv_empty;                             /* 1 and the bytes; a warp each and the rows' */
    uint64_t q_full[T::kStages], q_empty[T::kStages];       /* 1, the bytes and lse; a warp each */
    uint64_t dout_full[T::kStages], dout_empty[T::kStages]; /* 1 and the bytes, after delta; a warp each */
    KeyWork work[2];
};

/* One thread: the tiles' K and V, and blocks of Q. */
template <class T> __device__ void narrow_key_load_role(KeySmem<T> &s, const KeyArgs &a)
{
    Ring<T::kStages> ring;
    uint32_t phase = 0, place = blockIdx.x;
    const uint32_t total = static_cast<uint32_t>(a.first[a.docs.n]) * a.key_heads;
    while (place < total) {
        const KeyWork w = key_work_at<T>(a, place);
        ptx::mbarrier_wait(&s.kv_empty, phase ^ 1);
        s.work[phase] = w;
        ptx::mbarrier_arrive_expect_tx(&s.kv_full, 2 * T::kKeyBytes);
        for (int i = 0; i < T::kBoxes; i++) {
            ptx::tma_load_3d(s.k + i * T::kKeys * 128, &a.k, &s.kv_full, 64 * i, w.key_head, w.key_row);
            ptx::tma_load_3d(s.v + i * T::kKeys * 128, &a.v, &s.kv_full, 64 * i, w.key_head, w.key_row);
        }
        phase ^= 1;
        for (int b = w.first + w.blocks - 1; b >= w.first; b--, ring.advance()) {
            ptx::mbarrier_wait(&s.q_empty[ring.slot], ring.phase ^ 1);
            ptx::mbarrier_arrive_expect_tx(&s.q_full[ring.slot], T::kBytes);
            load_rows<T>(s.q[ring.slot], &a.q, &s.q_full[ring.slot], w.key_head << a.group_shift,
                         w.q0 + b * (T::kRows >> a.group_shift));
        }
        place = next_place(a.next);
    }
    ptx::mbarrier_wait(&s.kv_empty, phase ^ 1);
    s.work[phase].blocks = -1;
    ptx::mbarrier_arrive(&s.kv_full);
}

/* dS in place of dP. */
template <int kCount>
__device__ __forceinline__ void differentiate(float (&dp)[kCount], const float (&p)[kCount], const float *delta)
{
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
        const float2 mean = *reinterpret_cast<const float2 *>(delta + column_of(i));
        dp[i] = p[i] * (dp[i] - mean.x);
        dp[i + 1] = p[i + 1] * (dp[i + 1] - mean.y);
        dp[i + 2] = p[i + 2] * (dp[i + 2] - mean.x);
        dp[i + 3] = p[i + 3] * (dp[i + 3] - mean.y);
    }
}

/* 64 keys of every tile. The order of waits and products is the kernel, so it is read in one piece. No product is in
 * flight where the loop turns: the assembler would then put one after the other. */
template <class T, class E> __device__ void narrow_key_role(KeySmem<T> &s, const KeyArgs &a) /* lint: allow length */
{
    Ring<T::kStages> ring;
    const int wg = uniform(static_cast<int>(threadIdx.x) / 128 - 1);
    const bool signals = threadIdx.x % 32 == 0;
    const int row = static_cast<int>(threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4);
    const uint32_t k_low = uniform(descriptor_low(s.k + wg * T::kWgKeys * 128, T::kKeys * 128));
    const uint32_t v_low = uniform(descriptor_low(s.v + wg * T::kWgKeys * 128, T::kKeys * 128));
    const uint32_t q_low = uniform(descriptor_low(s.q[0], T::kRows * 128));
    const uint32_t dout_low = uniform(descriptor_low(s.dout[0], T::kRows * 128));
    constexpr uint32_t kStep = T::kBytes >> 4; /* from stage to stage */
    for (uint32_t phase = 0;; phase ^= 1) {
        ptx::mbarrier_wait(&s.kv_full, phase);
        const KeyWork &w = s.work[phase];
        const int first = uniform(w.first), blocks = uniform(w.blocks);
        const bool settles = uniform(w.key0) == 0 && wg == 0;
        if (blocks < 0)
            return;
        float dv[T::kDepth / 2] = {}, dk[T::kDepth / 2] = {}, sc[T::kRows / 2], dp[T::kRows / 2];
        uint32_t p[T::kRows / 16][4], ds[T::kRows / 16][4];
        /* with limits from the warpgroup's first key on */
        const auto columns_at = [&](int b) {
            Columns c = columns_of<T>(a, w, b);
            c.limit0 -= wg * T::kWgKeys;
            return c;
        };
        const auto begin = [&] {
            ptx::wgmma_fence();
            issue_scores<E, T::kDepth, T::kKeys, T::kRows>(sc, k_low, q_low + ring.slot * kStep);
            issue_scores<E, T::kDepth, T::kKeys, T::kRows>(dp, v_low, dout_low + ring.slot * kStep);
        };
        const auto add = [&](int slot) {
            ptx::wgmma_fence();
            issue_weigh<E>(dv, p, dout_low + slot * kStep);
            issue_weigh<E>(dk, ds, q_low + slot * kStep);
        };
        const auto make_weights = [&](int b) {
            const Columns c = columns_at(b);
            exponentiate(sc, s.lse[ring.slot], a.scale_log2);
            if (c.limit0 + (a.causal ? c.token0 : 0) < T::kWgKeys || c.token0 + (T::kRows >> a.group_shift) > c.nq)
                hide(sc, c, row);
        };
        const auto make_scores = [&](int b) {
            const Columns c = columns_at(b);
            differentiate(dp, sc, s.delta[ring.slot]);
            if (settles && c.limit0 + (a.causal ? c.token0 : 0) <= 1)
                settle(dp, c);
        };
        const auto free = [&](int slot) {
            if (signals) {
                ptx::mbarrier_arrive(&s.dout_empty[slot]);
                ptx::mbarrier_arrive(&s.q_empty[slot]);
            }
        };
        if (blocks > 0) {
            int b = first + blocks - 1;
            first_block<T>(s, a, w, ring);
            begin();
            ptx::wgmma_wait_group<0>();
            make_weights(b);
            make_scores(b);
            pack<E>(p, sc);
            pack<E>(ds, dp);
            while (--b >= first) {
                const int before = ring.slot;
                ring.advance();
                ptx::mbarrier_wait(&s.q_full[ring.slot], ring.phase);
                ptx::mbarrier_wait(&s.dout_full[ring.slot], ring.phase);
                begin();
                add(before);
                ptx::wgmma_wait_group<3>();
                make_weights(b);
                ptx::wgmma_wait_group<2>();
                make_scores(b);
                ptx::wgmma_wait_group<0>();
                free(before);
                pack<E>(p, sc);
                pack<E>(ds, dp);
            }
            add(ring.slot);
            ptx::wgmma_wait_group<0>();
            free(ring.slot);
            ring.advance();
        }
        const auto store = [&](const AttentionView &to, const float (&sums)[T::kDepth / 2], float factor) {
            E *const at = static_cast<E *>(to.data) + w.key_head * to.head;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int key = wg * T::kWgKeys + row + 8 * r;
                store_row<E>(at + (static_cast<int64_t>(w.key_row) + key) * to.token, key < w.keys, sums, r, factor,
                             columns<T>(a.dim));
            }
        };
        store(a.dv, dv, 1.0f);
        store(a.dk, dk, a.scale);
        __syncwarp();
        if (signals)
            ptx::mbarrier_arrive(&s.kv_empty);
    }
}

template <class T, class E>
__global__ void __launch_bounds__(T::kThreads, 1) attention_dkdv_narrow_sm90_kernel(const __grid_constant__ KeyArgs a)
{
    extern __shared__ char raw[];
    KeySmem<T> &s = *reinterpret_cast<KeySmem<T> *>(raw + (1024 - ptx::smem_address(raw) % 1024) % 1024);
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(&s.kv_full, 1);
        ptx::mbarrier_init(&s.kv_empty, T::kWarps + 1);
        for (int i = 0; i < T::kStages; i++) {
            ptx::mbarrier_init(&s.q_full[i], 2);
            ptx::mbarrier_init(&s.dout_full[i], 1);
            ptx::mbarrier_init(&s.q_empty[i], T::kWarps);
            ptx::mbarrier_init(&s.dout_empty[i], T::kWarps);
        }
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        ptx::setmaxnreg_dec<T::kLoadRegs>();
        if (threadIdx.x == 0)
            narrow_key_load_role<T>(s, a);
        else if (threadIdx.x / 32 == 1)
            row_role<T>(s, a);
    } else {
        ptx::setmaxnreg_inc<T::kMathRegs>();
        narrow_key_role<T, E>(s, a);
    }
}

} // namespace attention_sm90

#endif
