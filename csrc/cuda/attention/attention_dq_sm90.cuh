/* attention_dq_sm90.cuh -- dq of attention.h for 16-bit inputs on Hopper: the second of two repeatable passes.
 *
 *   a tile is 128 rows of one document and key head, as in the forward pass: 128 / G tokens of all G query heads
 *
 *   warpgroup 0, one thread | next tile -> Q, dO (smem); blocks of 64 keys, two stages of K and one of V, right to left
 *   warpgroups 1, 2         | 64 rows each: S = Q K^T and dP = dO V^T (smem x smem), dS = P (dP - delta),
 *                           | dQ += dS K (regs x smem); one's products run under the other's elements
 *
 * K is needed by the first product and the last of a block, V by the second alone. Each row adds up its keys in one
 * order: the same bits every time.
 *
 * Floor: 6 D flops a visible score at the rate of the tensor cores; shared memory moves 384 KiB for 128 rows and 64
 * keys of D 256, 3,072 cycles, as many as the tensor cores take.
 */
#ifndef ATTENTION_DQ_SM90_CUH
#define ATTENTION_DQ_SM90_CUH

#include "attention_sm90.cuh"

namespace attention_sm90
{

template <int kD_, int kDepth_ = kD_> struct RowTile {
    static constexpr int kD = kD_, kDepth = kDepth_, kM = 128, kN = 64, kStages = 2, kBoxes = kD / 64;
    static constexpr int kRowBytes = kM * kD * 2, kKeyBytes = kN * kD * 2;
    static constexpr int kLoadRegs = 40, kMathRegs = 232, kThreads = 384;
};

template <class T> struct RowSmem {
    alignas(1024) char q[T::kRowBytes];
    alignas(1024) char dout[T::kRowBytes];
    alignas(1024) char k[T::kStages][T::kKeyBytes];
    alignas(1024) char v[T::kKeyBytes];
    uint64_t q_full, q_empty; /* of Q and dO: 1 and the bytes; a warp each */
    uint64_t k_full[T::kStages], k_empty[T::kStages];
    uint64_t v_full, v_empty;
    Work work[2];
};

struct RowArgs {
    CUtensorMap q, k, v, dout;
    AttentionView dq, lse, low; /* low.data may be null */
    AttentionDocs docs;
    const int64_t *first;
    int64_t *next;
    const float *delta; /* [T, Hq] */
    int64_t heads;
    uint32_t key_heads;
    int group_shift; /* G = 1 << it */
    float scale, scale_log2;
    int dim;
    bool causal;
};

template <class T> __device__ void row_load_role(RowSmem<T> &s, const RowArgs &a)
{
    Ring<T::kStages> k;
    uint32_t phase = 0, v_phase = 0, place = blockIdx.x;
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
        for (int n = w.blocks - 1; n >= 0; n--, k.advance(), v_phase ^= 1) {
            ptx::mbarrier_wait(&s.k_empty[k.slot], k.phase ^ 1);
            ptx::mbarrier_arrive_expect_tx(&s.k_full[k.slot], T::kKeyBytes);
            for (int i = 0; i < T::kBoxes; i++)
                ptx::tma_load_3d(s.k[k.slot] + i * T::kN * 128, &a.k, &s.k_full[k.slot], 64 * i, key_head,
                                 row + n * T::kN);
            ptx::mbarrier_wait(&s.v_empty, v_phase ^ 1);
            ptx::mbarrier_arrive_expect_tx(&s.v_full, T::kKeyBytes);
            for (int i = 0; i < T::kBoxes; i++)
                ptx::tma_load_3d(s.v + i * T::kN * 128, &a.v, &s.v_full, 64 * i, key_head, row + n * T::kN);
        }
        place = next_place(a.next);
    }
    ptx::mbarrier_wait(&s.q_empty, phase ^ 1);
    s.work[phase].blocks = -1;
    ptx::mbarrier_arrive(&s.q_full);
}

/* Of the thread's rows `row` and `row` + 8: lse in powers of 2, delta, and the keys that they see. */
struct Rows {
    float lse[2], delta[2];
    int limit[2];
};

__device__ __forceinline__ Rows rows_of(const RowArgs &a, const Work &w, int row)
{
    constexpr float kLog2e = 1.44269504f;
    Rows found = {};
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int token = (row + 8 * r) >> a.group_shift, head = w.head0 + ((row + 8 * r) & ((1 << a.group_shift) - 1));
        if (token >= w.tokens)
            continue;
        const int64_t t = static_cast<int64_t>(w.token0) + token;
        const float lse = static_cast<const float *>(a.lse.data)[t * a.lse.token + head * a.lse.head];
        const float low =
            a.low.data == nullptr ? 0.0f : static_cast<const float *>(a.low.data)[t * a.low.token + head * a.low.head];
        found.lse[r] = lse == -INFINITY ? 0.0f : fmaf(lse, kLog2e, low * kLog2e);
        found.delta[r] = a.delta[t * a.heads + head];
        found.limit[r] = limit_of(a, w, row + 8 * r);
    }
    return found;
}

/* P in place of S; zeros where a key is not seen. */
template <int kCount>
__device__ __forceinline__ void weigh_keys(float (&sc)[kCount], const Rows &rows, int key0, bool edge, float scale_log2)
{
    const int column = key0 + static_cast<int>(threadIdx.x % 4) * 2;
#pragma unroll
    for (int i = 0; i < kCount; i++) {
        sc[i] = ptx::ex2_approx(fmaf(sc[i], scale_log2, -rows.lse[i % 4 / 2]));
        if (edge && column + i / 4 * 8 + i % 2 >= rows.limit[i % 4 / 2])
            sc[i] = 0.0f;
    }
}

/* dS from P and dP. A row that sees one key does not change it, and a key that is not seen counts nothing, whatever a
 * neighbour's values make of dP. */
template <int kCount>
__device__ __forceinline__ void differentiate_keys(float (&ds)[kCount], const float (&p)[kCount], const Rows &rows,
                                                   bool edge)
{
#pragma unroll
    for (int i = 0; i < kCount; i++) {
        ds[i] = p[i] * (ds[i] - rows.delta[i % 4 / 2]);
        if (edge && (p[i] == 0.0f || rows.limit[i % 4 / 2] == 1))
            ds[i] = 0.0f;
    }
}

/* 64 rows of every tile. The order of waits and products is the kernel, so it is read in one piece. */
template <class T, class E> __device__ void row_math_role(RowSmem<T> &s, const RowArgs &a) /* lint: allow length */
{
    Ring<T::kStages> k;
    uint32_t v_phase = 0;
    const int wg = uniform(static_cast<int>(threadIdx.x) / 128 - 1);
    const bool signals = threadIdx.x % 32 == 0;
    const int row = 64 * wg + static_cast<int>(threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4);
    const uint32_t q_low = uniform(descriptor_low(s.q + wg * 64 * 128, T::kM * 128));
    const uint32_t dout_low = uniform(descriptor_low(s.dout + wg * 64 * 128, T::kM * 128));
    const uint32_t v_low = uniform(descriptor_low(s.v, T::kN * 128));
    const auto k_low = [&] { return uniform(descriptor_low(s.k[k.slot], T::kN * 128)); };
    for (uint32_t phase = 0;; phase ^= 1) {
        ptx::mbarrier_wait(&s.q_full, phase);
        const Work &w = s.work[phase];
        const int blocks = uniform(w.blocks);
        if (blocks < 0)
            return;
        float dq[T::kD / 2] = {}, sc[T::kN / 2], dp[T::kN / 2];
        const Rows rows = rows_of(a, w, row);
        const int least = limit_of(a, w, 64 * wg); /* keys that every row sees */
        for (int n = blocks - 1; n >= 0; n--) {
            const bool edge = (n + 1) * T::kN > least || n == 0;
            uint32_t ds[T::kN / 16][4];
            ptx::mbarrier_wait(&s.k_full[k.slot], k.phase);
            if (w.nk - n * T::kN < T::kN) {
                clear_rows<T::kN, T::kBoxes>(s.k[k.slot], w.nk - n * T::kN);
                ptx::fence_proxy_async();
                ptx::bar_sync(1, 256);
            }
            ptx::wgmma_fence();
            issue_scores<E, T::kDepth, T::kM, T::kN>(sc, q_low, k_low());
            ptx::mbarrier_wait(&s.v_full, v_phase);
            issue_scores<E, T::kDepth, T::kM, T::kN>(dp, dout_low, v_low);
            ptx::wgmma_wait_group<1>();
            weigh_keys(sc, rows, n * T::kN, edge, a.scale_log2);
            ptx::wgmma_wait_group<0>();
            if (signals)
                ptx::mbarrier_arrive(&s.v_empty);
            v_phase ^= 1;
            differentiate_keys(dp, sc, rows, edge);
            pack<E>(ds, dp);
            ptx::wgmma_fence();
            issue_weigh<E>(dq, ds, k_low());
            ptx::wgmma_wait_group<0>();
            if (signals)
                ptx::mbarrier_arrive(&s.k_empty[k.slot]);
            k.advance();
        }
        if (signals)
            ptx::mbarrier_arrive(&s.q_empty);
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
__global__ void __launch_bounds__(T::kThreads, 1) attention_dq_sm90_kernel(const __grid_constant__ RowArgs a)
{
    extern __shared__ char raw[];
    RowSmem<T> &s = *reinterpret_cast<RowSmem<T> *>(raw + (1024 - ptx::smem_address(raw) % 1024) % 1024);
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(&s.q_full, 1);
        ptx::mbarrier_init(&s.q_empty, 8);
        for (int i = 0; i < T::kStages; i++) {
            ptx::mbarrier_init(&s.k_full[i], 1);
            ptx::mbarrier_init(&s.k_empty[i], 8);
        }
        ptx::mbarrier_init(&s.v_full, 1);
        ptx::mbarrier_init(&s.v_empty, 8);
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        ptx::setmaxnreg_dec<T::kLoadRegs>();
        if (threadIdx.x == 0)
            row_load_role<T>(s, a);
    } else {
        ptx::setmaxnreg_inc<T::kMathRegs>();
        row_math_role<T, E>(s, a);
    }
}

} // namespace attention_sm90

#endif
