/* attention_dq_narrow_sm90.cuh -- dq as attention_dq_sm90.cuh has it, for head dims up to 80.
 *
 *   a tile is 192 rows of one document and key head: 192 / G tokens of all G query heads
 *
 *   warpgroup 0, one thread | next tile -> Q, dO (smem); blocks of 64 keys and values, three stages, right to left
 *   warpgroups 1, 2, 3      | 64 rows each: S = Q K^T and dP = dO V^T (smem x smem) of a block, dQ += dS K
 *                           | (regs x smem) of the one before, under which dS = P (dP - delta) is made
 *
 * Elements, not products, are most of the time at these head dims: three warps a scheduler hide what one waits for.
 * Each row adds up its keys in one order: the same bits every time.
 *
 * Floor: 6 D flops a visible score at the rate of the tensor cores.
 */
#ifndef ATTENTION_DQ_NARROW_SM90_CUH
#define ATTENTION_DQ_NARROW_SM90_CUH

#include "attention_dq_sm90.cuh"

namespace attention_sm90
{

/* As NarrowKeyTile. */
template <int kD_, int kDepth_> struct NarrowRowTile {
    static constexpr int kD = kD_, kDepth = kDepth_, kWgs = 3, kM = 64 * kWgs, kN = 64, kStages = 3, kBoxes = kD / 64;
    static constexpr int kRowBytes = kM * kD * 2, kKeyBytes = kN * kD * 2;
    static constexpr int kLoadRegs = 32, kMathRegs = 160, kThreads = 128 * (1 + kWgs);
};

template <class T> struct NarrowRowSmem {
    alignas(1024) char q[T::kRowBytes];
    alignas(1024) char dout[T::kRowBytes];
    alignas(1024) char k[T::kStages][T::kKeyBytes];
    alignas(1024) char v[T::kStages][T::kKeyBytes];
    uint64_t q_full, q_empty;                         /* of Q and dO: 1 and the bytes; a warp each */
    uint64_t k_full[T::kStages], k_empty[T::kStages]; /* the same */
    uint64_t v_full[T::kStages], v_empty[T::kStages];
    Work work[2];
};

template <class T>
__device__ void load_keys(char *to, const CUtensorMap *map, uint64_t *full, uint64_t *empty, uint32_t phase,
                          int key_head, int row)
{
    ptx::mbarrier_wait(empty, phase ^ 1);
    ptx::mbarrier_arrive_expect_tx(full, T::kKeyBytes);
    for (int i = 0; i < T::kBoxes; i++)
        ptx::tma_load_3d(to + i * T::kN * 128, map, full, 64 * i, key_head, row);
}

template <class T> __device__ void narrow_row_load_role(NarrowRowSmem<T> &s, const RowArgs &a)
{
    Ring<T::kStages> ring;
    uint32_t phase = 0, place = blockIdx.x;
    const uint32_t total = static_cast<uint32_t>(a.first[a.docs.n]) * a.key_heads;
    while (place < total) {
        int row, key_head;
        const Work w = work_at<T::kM, T::kN>(a, place, &row, &key_head);
        ptx::mbarrier_wait(&s.q_empty, phase ^ 1);
        s.work[phase] = w;
        ptx::mbarrier_arrive_expect_tx(&s.q_full, 2 * T::kRowBytes);
        for (int i = 0; i < T::kBoxes; i++) {
            ptx::tma_load_3d(s.q + i * T::kM * 128, &a.q, &s.q_full, 64 * i, w.head0, w.token0);
            ptx::tma_load_3d(s.dout + i * T::kM * 128, &a.dout, &s.q_full, 64 * i, w.head0, w.token0);
        }
        phase ^= 1;
        for (int n = w.blocks - 1; n >= 0; n--, ring.advance()) {
            const int i = ring.slot, at = row + n * T::kN;
            load_keys<T>(s.k[i], &a.k, &s.k_full[i], &s.k_empty[i], ring.phase, key_head, at);
            load_keys<T>(s.v[i], &a.v, &s.v_full[i], &s.v_empty[i], ring.phase, key_head, at);
        }
        place = next_place(a.next);
    }
    ptx::mbarrier_wait(&s.q_empty, phase ^ 1);
    s.work[phase].blocks = -1;
    ptx::mbarrier_arrive(&s.q_full);
}

/* 64 rows of every tile, as narrow_key_role. */
template <class T, class E>
__device__ void narrow_row_role(NarrowRowSmem<T> &s, const RowArgs &a) /* lint: allow length */
{
    Ring<T::kStages> ring;
    const int wg = uniform(static_cast<int>(threadIdx.x) / 128 - 1);
    const bool signals = threadIdx.x % 32 == 0;
    const int row = 64 * wg + static_cast<int>(threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4);
    const uint32_t q_low = uniform(descriptor_low(s.q + wg * 64 * 128, T::kM * 128));
    const uint32_t dout_low = uniform(descriptor_low(s.dout + wg * 64 * 128, T::kM * 128));
    const uint32_t k_low = uniform(descriptor_low(s.k[0], T::kN * 128));
    const uint32_t v_low = uniform(descriptor_low(s.v[0], T::kN * 128));
    constexpr uint32_t kStep = T::kKeyBytes >> 4; /* from stage to stage */
    for (uint32_t phase = 0;; phase ^= 1) {
        ptx::mbarrier_wait(&s.q_full, phase);
        const Work &w = s.work[phase];
        const int blocks = uniform(w.blocks);
        if (blocks < 0)
            return;
        float dq[T::kDepth / 2] = {}, sc[T::kN / 2], dp[T::kN / 2];
        uint32_t ds[T::kN / 16][4];
        const Rows rows = rows_of(a, w, row);
        const int least = uniform(limit_of(a, w, 64 * wg)); /* keys that every row sees */
        const auto edge = [&](int n) { return (n + 1) * T::kN > least || n == 0; };
        const auto wait = [&] {
            ptx::mbarrier_wait(&s.k_full[ring.slot], ring.phase);
            ptx::mbarrier_wait(&s.v_full[ring.slot], ring.phase);
        };
        const auto begin = [&] {
            ptx::wgmma_fence();
            issue_scores<E, T::kDepth, T::kM, T::kN>(sc, q_low, k_low + ring.slot * kStep);
            issue_scores<E, T::kDepth, T::kM, T::kN>(dp, dout_low, v_low + ring.slot * kStep);
        };
        const auto add = [&](int slot) {
            ptx::wgmma_fence();
            issue_weigh<E>(dq, ds, k_low + slot * kStep);
        };
        const auto free = [&](uint64_t *empty) {
            if (signals)
                ptx::mbarrier_arrive(empty);
        };
        if (blocks > 0) {
            int n = blocks - 1;
            wait();
            if (w.nk - n * T::kN < T::kN) {
                clear_rows<T::kN, T::kBoxes, 128 * T::kWgs>(s.k[ring.slot], w.nk - n * T::kN);
                ptx::fence_proxy_async();
                ptx::bar_sync(1, 128 * T::kWgs);
            }
            begin();
            ptx::wgmma_wait_group<0>();
            free(&s.v_empty[ring.slot]);
            weigh_keys(sc, rows, n * T::kN, edge(n), a.scale_log2);
            differentiate_keys(dp, sc, rows, edge(n));
            pack<E>(ds, dp);
            while (--n >= 0) {
                const int before = ring.slot;
                ring.advance();
                wait();
                begin();
                add(before);
                ptx::wgmma_wait_group<2>();
                weigh_keys(sc, rows, n * T::kN, edge(n), a.scale_log2);
                ptx::wgmma_wait_group<1>();
                free(&s.v_empty[ring.slot]);
                differentiate_keys(dp, sc, rows, edge(n));
                ptx::wgmma_wait_group<0>();
                free(&s.k_empty[before]);
                pack<E>(ds, dp);
            }
            add(ring.slot);
            ptx::wgmma_wait_group<0>();
            free(&s.k_empty[ring.slot]);
            ring.advance();
        }
        free(&s.q_empty);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int token = (row + 8 * r) >> a.group_shift;
            const int head = w.head0 + ((row + 8 * r) & ((1 << a.group_shift) - 1));
            const int64_t t = static_cast<int64_t>(w.token0) + token;
            store_row<E>(static_cast<E *>(a.dq.data) + t * a.dq.token + head * a.dq.head, token < w.tokens, dq, r,
                         a.scale, columns<T>(a.dim));
        }
    }
}

template <class T, class E>
__global__ void __launch_bounds__(T::kThreads, 1) attention_dq_narrow_sm90_kernel(const __grid_constant__ RowArgs a)
{
    extern __shared__ char raw[];
    NarrowRowSmem<T> &s = *reinterpret_cast<NarrowRowSmem<T> *>(raw + (1024 - ptx::smem_address(raw) % 1024) % 1024);
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(&s.q_full, 1);
        ptx::mbarrier_init(&s.q_empty, 4 * T::kWgs);
        for (int i = 0; i < T::kStages; i++) {
            ptx::mbarrier_init(&s.k_full[i], 1);
            ptx::mbarrier_init(&s.v_full[i], 1);
            ptx::mbarrier_init(&s.k_empty[i], 4 * T::kWgs);
            ptx::mbarrier_init(&s.v_empty[i], 4 * T::kWgs);
        }
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        ptx::setmaxnreg_dec<T::kLoadRegs>();
        if (threadIdx.x == 0)
            narrow_row_load_role<T>(s, a);
    } else {
        ptx::setmaxnreg_inc<T::kMathRegs>();
        narrow_row_role<T, E>(s, a);
    }
}

} // namespace attention_sm90

#endif
