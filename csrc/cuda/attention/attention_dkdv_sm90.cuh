/* attention_dkdv_sm90.cuh -- dk and dv of attention.h for 16-bit inputs on Hopper: the first of two repeatable passes.
 *
 *   a tile is 64 keys of one document and key head; a block is 64 rows that see them, 64 / G tokens of all G heads
 *
 *   warpgroup 0, one thread | next tile -> K, V (smem); blocks of Q, two stages or four, last to first
 *   warpgroup 0, one warp   | blocks of dO, as many; lse and delta of each block
 *   warpgroup 1             | S = K Q^T (smem x smem), P = exp(S - lse) -> smem, dV += P dO (regs x smem)
 *   warpgroup 2             | dP = V dO^T (smem x smem), dS = P (dP - delta),    dK += dS Q (regs x smem)
 *
 * The two share P as float32, element by element in the same lanes, and otherwise run at their own pace: one's products
 * fill the tensor cores while the other's elements are made. S and dP are keys by rows, so that they are left operands
 * of the next product as they stand. Sums run over a group's heads and a document's rows in one order: the same bits
 * every time.
 *
 * Floor: 8 D flops a visible score at the rate of the tensor cores. Shared memory is nearer: for 64 keys and 64 rows of
 * D 256 it moves 288 KiB (128 and 64 for the products, 64 of Q and dO, 32 of P), 2,304 cycles beside 2,048 of the
 * tensor cores. From L2 a tile reads 64 KiB a block; two tiles in a cluster, kCtas, each ask for half and send it to
 * both. The first of them takes the next place of the list and tells the other.
 */
#ifndef ATTENTION_DKDV_SM90_CUH
#define ATTENTION_DKDV_SM90_CUH

#include "attention_sm90.cuh"

namespace attention_sm90
{

template <int kD_, int kCtas_, int kDepth_ = kD_> struct KeyTile {
    static constexpr int kDepth = kDepth_;
    static constexpr int kD = kD_, kCtas = kCtas_, kKeys = 64, kRows = 64, kStages = kD == 256 ? 2 : 4,
                         kBoxes = kD / 64;
    static constexpr int kBytes = 64 * kD * 2; /* of K, V, and a block of Q or dO */
    static constexpr int kLoadRegs = 40, kMathRegs = 232, kThreads = 384;
    static constexpr int kWarps = 8; /* of both math warpgroups */
};

/* What the loading thread tells the others of a tile. */
struct KeyWork {
    int key_row; /* in the tensors */
    int key0;    /* in the document */
    int keys;    /* from key0 to the document's end */
    int key_head;
    int q0, nq;        /* the document's tokens */
    int limit0;        /* keys from key0 on that its first token sees, may be negative */
    int first, blocks; /* of rows; blocks -1: no more tiles */
};

template <class T> struct KeySmem {
    alignas(1024) char k[T::kBytes];
    alignas(1024) char v[T::kBytes];
    alignas(1024) char q[T::kStages][T::kBytes];
    alignas(1024) char dout[T::kStages][T::kBytes];
    float4 p[2][T::kRows / 8][128]; /* P: four of a thread's sums at a time */
    float lse[T::kStages][T::kRows], delta[T::kStages][T::kRows];
    uint64_t kv_full, kv_empty;                             /* 1 and the bytes; a warp each and the rows' */
    uint64_t q_full[T::kStages], q_empty[T::kStages];       /* 1, the bytes and lse; a warp each of all kCtas */
    uint64_t dout_full[T::kStages], dout_empty[T::kStages]; /* 1 and the bytes, after delta; a warp each of all kCtas */
    uint64_t p_full[2], p_empty[2];                         /* a warp of one warpgroup each */
    uint64_t place_full, place_empty;                       /* the second block's, and the first block's */
    uint32_t place;
    KeyWork work[2];
};

struct KeyArgs {
    CUtensorMap q, k, v, dout;
    AttentionView dk, dv, lse, low; /* low.data may be null */
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

template <class T> __device__ __forceinline__ uint32_t rank_of() { return T::kCtas == 1 ? 0 : ptx::cluster_rank(); }

/* A stage is free in this block, and known to be in the other, which writes half of it. */
template <class T> __device__ __forceinline__ void release(uint64_t *empty)
{
    ptx::mbarrier_arrive(empty);
    if constexpr (T::kCtas == 2)
        ptx::mbarrier_arrive_at(empty, ptx::cluster_rank() ^ 1);
}

/* The next place of a pair: the first block takes it, the second is told. */
template <class T> __device__ uint32_t next_pair(KeySmem<T> &s, int64_t *next, uint32_t rank, uint32_t &phase)
{
    uint32_t place;
    if (rank == 0) {
        place = next_place(next, gridDim.x / T::kCtas);
        ptx::mbarrier_wait_cluster(&s.place_empty, phase ^ 1);
        ptx::store_at(&s.place, 1, place);
        ptx::mbarrier_arrive_cluster(&s.place_full, 1);
    } else {
        ptx::mbarrier_wait_cluster(&s.place_full, phase);
        place = *const_cast<volatile uint32_t *>(&s.place);
        ptx::mbarrier_arrive_cluster(&s.place_empty, 0);
    }
    phase ^= 1;
    return place;
}

/* Which tile a place in the list of work is; the first keys of a document, which most rows see, come first. The blocks
 * of rows are those of the pair's first keys. */
template <class T> __device__ KeyWork key_work_at(const KeyArgs &a, uint32_t place)
{
    const AttentionTile<uint32_t> t = attention_tile(a.docs, a.first, a.key_heads, place);
    const int tokens = T::kRows >> a.group_shift;
    const int64_t pair0 = static_cast<int64_t>(t.index) * T::kKeys * T::kCtas;
    const int64_t key0 = pair0 + T::kKeys * rank_of<T>(), sees = a.causal ? pair0 - (t.nk - t.nq) : 0;
    KeyWork w;
    w.key_row = static_cast<int>(t.k0 + key0);
    w.key0 = static_cast<int>(key0);
    w.keys = static_cast<int>(t.nk - key0);
    w.key_head = static_cast<int>(t.head);
    w.q0 = static_cast<int>(t.q0);
    w.nq = static_cast<int>(t.nq);
    w.limit0 = static_cast<int>(a.causal ? 1 + t.nk - t.nq - key0 : t.nk - key0);
    w.first = sees > 0 ? static_cast<int>(sees / tokens) : 0;
    w.blocks = sees < t.nq ? static_cast<int>((t.nq + tokens - 1) / tokens) - w.first : 0;
    return w;
}

template <class T> __device__ void load_tile(char *to, const CUtensorMap *map, uint64_t *full, int head, int row)
{
    for (int i = 0; i < T::kBoxes; i++)
        ptx::tma_load_3d(to + i * 64 * 128, map, full, 64 * i, head, row);
}

/* A block of rows, half of it by each block of a pair. */
template <class T> __device__ void load_rows(char *to, const CUtensorMap *map, uint64_t *full, int head, int row)
{
    if constexpr (T::kCtas == 1) {
        load_tile<T>(to, map, full, head, row);
    } else {
        constexpr int kHalf = T::kBoxes / T::kCtas;
        const int from = static_cast<int>(rank_of<T>()) * kHalf;
        for (int i = from; i < from + kHalf; i++)
            ptx::tma_load_3d_multicast(to + i * 64 * 128, map, full, 64 * i, head, row, (1 << T::kCtas) - 1);
    }
}

/* One thread: the tiles' K and V, and blocks of Q. */
template <class T> __device__ void key_load_role(KeySmem<T> &s, const KeyArgs &a)
{
    Ring<T::kStages> ring;
    uint32_t phase = 0, place = blockIdx.x / T::kCtas, place_phase = 0;
    const uint32_t total = static_cast<uint32_t>(a.first[a.docs.n]) * a.key_heads;
    const int tokens = T::kRows >> a.group_shift;
    while (place < total) {
        const KeyWork w = key_work_at<T>(a, place);
        ptx::mbarrier_wait(&s.kv_empty, phase ^ 1);
        s.work[phase] = w;
        ptx::mbarrier_arrive_expect_tx(&s.kv_full, 2 * T::kBytes);
        load_tile<T>(s.k, &a.k, &s.kv_full, w.key_head, w.key_row);
        load_tile<T>(s.v, &a.v, &s.kv_full, w.key_head, w.key_row);
        phase ^= 1;
        for (int b = w.first + w.blocks - 1; b >= w.first; b--, ring.advance()) {
            ptx::mbarrier_wait(&s.q_empty[ring.slot], ring.phase ^ 1);
            ptx::mbarrier_arrive_expect_tx(&s.q_full[ring.slot], T::kBytes);
            load_rows<T>(s.q[ring.slot], &a.q, &s.q_full[ring.slot], w.key_head << a.group_shift, w.q0 + b * tokens);
        }
        if constexpr (T::kCtas == 1)
            place = next_place(a.next, gridDim.x);
        else
            place = next_pair(s, a.next, rank_of<T>(), place_phase);
    }
    ptx::mbarrier_wait(&s.kv_empty, phase ^ 1);
    s.work[phase].blocks = -1;
    ptx::mbarrier_arrive(&s.kv_full);
}

/* lse in powers of 2 and delta of one row; 0 behind the document and for a row without keys, which no key is seen by.
 */
__device__ __forceinline__ float2 statistics_of(const KeyArgs &a, const KeyWork &w, int token, int head)
{
    constexpr float kLog2e = 1.44269504f;
    if (token >= w.nq)
        return make_float2(0.0f, 0.0f);
    const int64_t t = static_cast<int64_t>(w.q0) + token;
    const float lse = static_cast<const float *>(a.lse.data)[t * a.lse.token + head * a.lse.head];
    const float low =
        a.low.data == nullptr ? 0.0f : static_cast<const float *>(a.low.data)[t * a.low.token + head * a.low.head];
    return make_float2(lse == -INFINITY ? 0.0f : fmaf(lse, kLog2e, low * kLog2e), a.delta[t * a.heads + head]);
}

/* One warp: blocks of dO, and what rows need beside Q and dO, which it reads ahead of the stages that it waits for. */
template <class T> __device__ void row_role(KeySmem<T> &s, const KeyArgs &a)
{
    Ring<T::kStages> ring;
    const int lane = static_cast<int>(threadIdx.x % 32), group = (1 << a.group_shift) - 1;
    for (uint32_t phase = 0;; phase ^= 1) {
        ptx::mbarrier_wait(&s.kv_full, phase);
        const KeyWork w = s.work[phase];
        if (w.blocks < 0)
            return;
        for (int b = w.first + w.blocks - 1; b >= w.first; b--, ring.advance()) {
            float2 found[T::kRows / 32];
#pragma unroll
            for (int i = 0; i < T::kRows / 32; i++) {
                const int row = lane + 32 * i, token = b * (T::kRows >> a.group_shift) + (row >> a.group_shift);
                found[i] = statistics_of(a, w, token, (w.key_head << a.group_shift) + (row & group));
            }
            ptx::mbarrier_wait(&s.q_empty[ring.slot], ring.phase ^ 1);
#pragma unroll
            for (int i = 0; i < T::kRows / 32; i++)
                s.lse[ring.slot][lane + 32 * i] = found[i].x;
            __syncwarp();
            if (lane == 0)
                ptx::mbarrier_arrive(&s.q_full[ring.slot]);
            ptx::mbarrier_wait(&s.dout_empty[ring.slot], ring.phase ^ 1);
#pragma unroll
            for (int i = 0; i < T::kRows / 32; i++)
                s.delta[ring.slot][lane + 32 * i] = found[i].y;
            __syncwarp();
            if (lane == 0) {
                ptx::mbarrier_arrive_expect_tx(&s.dout_full[ring.slot], T::kBytes);
                load_rows<T>(s.dout[ring.slot], &a.dout, &s.dout_full[ring.slot], w.key_head << a.group_shift,
                             w.q0 + b * (T::kRows >> a.group_shift));
            }
        }
        __syncwarp();
        if (lane == 0)
            ptx::mbarrier_arrive(&s.kv_empty);
    }
}

/* Of a block of rows: the token of column c, from the document's first, and the keys from key0 on that it sees, 0
 * behind the document. */
struct Columns {
    int token0, nq, limit0, group_shift;
    bool causal;
    __device__ int token(int column) const { return token0 + (column >> group_shift); }
    __device__ int limit(int column) const
    {
        const int t = token(column);
        return t >= nq ? 0 : limit0 + (causal ? t : 0);
    }
};

template <class T> __device__ Columns columns_of(const KeyArgs &a, const KeyWork &w, int block)
{
    return {block * (T::kRows >> a.group_shift), w.nq, w.limit0, a.group_shift, a.causal};
}

/* Whether a row of the block does not see all of the tile, or lies behind the document. */
template <class T> __device__ bool partial(const KeyArgs &a, const Columns &c)
{
    return c.limit0 + (a.causal ? c.token0 : 0) < T::kKeys || c.token0 + (T::kRows >> a.group_shift) > c.nq;
}

/* Sums i of a thread are of rows g and g + 8 of its warp's 16 (i / 2 odd), columns 8 (i / 4) + 2 c and the next. */
__device__ __forceinline__ int column_of(int i) { return i / 4 * 8 + static_cast<int>(threadIdx.x % 4) * 2 + i % 2; }

template <int kCount>
__device__ __forceinline__ void exponentiate(float (&sc)[kCount], const float *lse, float scale_log2)
{
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
        const float2 base = *reinterpret_cast<const float2 *>(lse + column_of(i));
        sc[i] = ptx::ex2_approx(fmaf(sc[i], scale_log2, -base.x));
        sc[i + 1] = ptx::ex2_approx(fmaf(sc[i + 1], scale_log2, -base.y));
        sc[i + 2] = ptx::ex2_approx(fmaf(sc[i + 2], scale_log2, -base.x));
        sc[i + 3] = ptx::ex2_approx(fmaf(sc[i + 3], scale_log2, -base.y));
    }
}

/* Zeros where the key `row` (and row + 8) is not seen. */
template <int kCount> __device__ __forceinline__ void hide(float (&p)[kCount], const Columns &c, int row)
{
#pragma unroll
    for (int i = 0; i < kCount; i++)
        if (row + i % 4 / 2 * 8 >= c.limit(column_of(i)))
            p[i] = 0.0f;
}

/* dS in place of dP. */
template <int kCount>
__device__ __forceinline__ void differentiate(float (&dp)[kCount], const float4 (&p)[kCount / 4][128],
                                              const float *delta)
{
    const int me = static_cast<int>(threadIdx.x % 128);
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
        const float2 mean = *reinterpret_cast<const float2 *>(delta + column_of(i));
        const float4 weight = p[i / 4][me];
        dp[i] = weight.x * (dp[i] - mean.x);
        dp[i + 1] = weight.y * (dp[i + 1] - mean.y);
        dp[i + 2] = weight.z * (dp[i + 2] - mean.x);
        dp[i + 3] = weight.w * (dp[i + 3] - mean.y);
    }
}

/* A row that sees one key does not change it: its dS is 0, whatever rounding says. */
template <int kCount> __device__ __forceinline__ void settle(float (&ds)[kCount], const Columns &c)
{
#pragma unroll
    for (int i = 0; i < kCount; i++)
        if (c.limit(column_of(i)) == 1)
            ds[i] = 0.0f;
}

/* Waits for a tile's first block, and clears what lies behind the document in it. */
template <class T> __device__ void first_block(KeySmem<T> &s, const KeyArgs &a, const KeyWork &w, Ring<T::kStages> ring)
{
    ptx::mbarrier_wait(&s.q_full[ring.slot], ring.phase);
    ptx::mbarrier_wait(&s.dout_full[ring.slot], ring.phase);
    const int rows = (w.nq << a.group_shift) - (w.first + w.blocks - 1) * T::kRows;
    if (rows >= T::kRows)
        return;
    clear_rows<T::kRows, T::kBoxes>(s.q[ring.slot], rows);
    clear_rows<T::kRows, T::kBoxes>(s.dout[ring.slot], rows);
    ptx::fence_proxy_async();
    ptx::bar_sync(1, 256);
}

template <class T, class E>
__device__ void store_keys(const AttentionView &to, const KeyWork &w, const float (&sums)[T::kD / 2], float factor,
                           int dim)
{
    const int row = static_cast<int>(threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4);
    E *const at = static_cast<E *>(to.data) + w.key_head * to.head;
#pragma unroll
    for (int r = 0; r < 2; r++)
        store_row<E>(at + (static_cast<int64_t>(w.key_row) + row + 8 * r) * to.token, row + 8 * r < w.keys, sums, r,
                     factor, columns<T>(dim));
}

/* A math warpgroup's place in the rings, and its thread's in the tile. */
template <class T> struct Place {
    Ring<T::kStages> ring;
    Ring<2> exchange;
    const bool signals = threadIdx.x % 32 == 0;
    const int me = static_cast<int>(threadIdx.x % 128), row = me / 32 * 16 + me % 32 / 4;
};

/* P from S, in shared memory and as an operand. */
template <class T, class E>
__device__ __forceinline__ void make_weights(KeySmem<T> &s, const KeyArgs &a, const Columns &c, Place<T> &at,
                                             float (&sc)[T::kRows / 2], uint32_t (&p)[T::kRows / 16][4])
{
    exponentiate(sc, s.lse[at.ring.slot], a.scale_log2);
    if (partial<T>(a, c))
        hide(sc, c, at.row);
    ptx::mbarrier_wait(&s.p_empty[at.exchange.slot], at.exchange.phase ^ 1);
#pragma unroll
    for (int i = 0; i < T::kRows / 8; i++)
        s.p[at.exchange.slot][i][at.me] = make_float4(sc[4 * i], sc[4 * i + 1], sc[4 * i + 2], sc[4 * i + 3]);
    __syncwarp();
    if (at.signals) {
        release<T>(&s.q_empty[at.ring.slot]);
        ptx::mbarrier_arrive(&s.p_full[at.exchange.slot]);
    }
    at.exchange.advance();
    pack<E>(p, sc);
}

/* S, P and dV. The next S is issued behind dV, so that only the first and the last block stand outside the loop. */
template <class T, class E> __device__ void weight_role(KeySmem<T> &s, const KeyArgs &a)
{
    Place<T> at;
    const uint32_t k_low = uniform(descriptor_low(s.k, 64 * 128));
    const auto q_low = [&] { return uniform(descriptor_low(s.q[at.ring.slot], 64 * 128)); };
    const auto dout_low = [&] { return uniform(descriptor_low(s.dout[at.ring.slot], 64 * 128)); };
    for (uint32_t phase = 0;; phase ^= 1) {
        ptx::mbarrier_wait(&s.kv_full, phase);
        const KeyWork &w = s.work[phase];
        const int first = uniform(w.first), blocks = uniform(w.blocks);
        if (blocks < 0)
            return;
        float dv[T::kD / 2] = {}, sc[T::kRows / 2];
        if (blocks > 0) {
            uint32_t p[T::kRows / 16][4];
            first_block<T>(s, a, w, at.ring);
            ptx::wgmma_fence();
            issue_scores<E, T::kDepth, T::kKeys, T::kRows>(sc, k_low, q_low());
            ptx::wgmma_wait_group<0>();
            int b = first + blocks - 1;
            for (; b > first; b--) {
                make_weights<T, E>(s, a, columns_of<T>(a, w, b), at, sc, p);
                ptx::mbarrier_wait(&s.dout_full[at.ring.slot], at.ring.phase);
                ptx::wgmma_fence();
                issue_weigh<E>(dv, p, dout_low());
                const int slot = at.ring.slot;
                at.ring.advance();
                ptx::mbarrier_wait(&s.q_full[at.ring.slot], at.ring.phase);
                ptx::wgmma_fence();
                issue_scores<E, T::kDepth, T::kKeys, T::kRows>(sc, k_low, q_low());
                ptx::wgmma_wait_group<1>();
                if (at.signals)
                    release<T>(&s.dout_empty[slot]);
                ptx::wgmma_wait_group<0>();
            }
            make_weights<T, E>(s, a, columns_of<T>(a, w, b), at, sc, p);
            ptx::mbarrier_wait(&s.dout_full[at.ring.slot], at.ring.phase);
            ptx::wgmma_fence();
            issue_weigh<E>(dv, p, dout_low());
            ptx::wgmma_wait_group<0>();
            if (at.signals)
                release<T>(&s.dout_empty[at.ring.slot]);
            at.ring.advance();
        }
        store_keys<T, E>(a.dv, w, dv, 1.0f, a.dim);
        __syncwarp();
        if (at.signals)
            ptx::mbarrier_arrive(&s.kv_empty);
    }
}

/* dS from dP and the other warpgroup's P. */
template <class T, class E>
__device__ __forceinline__ void make_scores(KeySmem<T> &s, const KeyArgs &a, const Columns &c, bool settles,
                                            Place<T> &at, float (&dp)[T::kRows / 2], uint32_t (&ds)[T::kRows / 16][4])
{
    ptx::mbarrier_wait(&s.p_full[at.exchange.slot], at.exchange.phase);
    differentiate(dp, s.p[at.exchange.slot], s.delta[at.ring.slot]);
    __syncwarp();
    if (at.signals) {
        ptx::mbarrier_arrive(&s.p_empty[at.exchange.slot]);
        release<T>(&s.dout_empty[at.ring.slot]);
    }
    at.exchange.advance();
    if (settles && c.limit0 + (a.causal ? c.token0 : 0) <= 1)
        settle(dp, c);
    pack<E>(ds, dp);
}

/* dP, dS and dK, in the same way. */
template <class T, class E> __device__ void score_role(KeySmem<T> &s, const KeyArgs &a)
{
    Place<T> at;
    const uint32_t v_low = uniform(descriptor_low(s.v, 64 * 128));
    const auto q_low = [&] { return uniform(descriptor_low(s.q[at.ring.slot], 64 * 128)); };
    const auto dout_low = [&] { return uniform(descriptor_low(s.dout[at.ring.slot], 64 * 128)); };
    for (uint32_t phase = 0;; phase ^= 1) {
        ptx::mbarrier_wait(&s.kv_full, phase);
        const KeyWork &w = s.work[phase];
        const int first = uniform(w.first), blocks = uniform(w.blocks);
        const bool settles = uniform(w.key0) == 0;
        if (blocks < 0)
            return;
        float dk[T::kD / 2] = {}, dp[T::kRows / 2];
        if (blocks > 0) {
            uint32_t ds[T::kRows / 16][4];
            first_block<T>(s, a, w, at.ring);
            ptx::wgmma_fence();
            issue_scores<E, T::kDepth, T::kKeys, T::kRows>(dp, v_low, dout_low());
            ptx::wgmma_wait_group<0>();
            int b = first + blocks - 1;
            for (; b > first; b--) {
                make_scores<T, E>(s, a, columns_of<T>(a, w, b), settles, at, dp, ds);
                ptx::mbarrier_wait(&s.q_full[at.ring.slot], at.ring.phase);
                ptx::wgmma_fence();
                issue_weigh<E>(dk, ds, q_low());
                const int slot = at.ring.slot;
                at.ring.advance();
                ptx::mbarrier_wait(&s.dout_full[at.ring.slot], at.ring.phase);
                ptx::wgmma_fence();
                issue_scores<E, T::kDepth, T::kKeys, T::kRows>(dp, v_low, dout_low());
                ptx::wgmma_wait_group<1>();
                if (at.signals)
                    release<T>(&s.q_empty[slot]);
                ptx::wgmma_wait_group<0>();
            }
            make_scores<T, E>(s, a, columns_of<T>(a, w, b), settles, at, dp, ds);
            ptx::mbarrier_wait(&s.q_full[at.ring.slot], at.ring.phase);
            ptx::wgmma_fence();
            issue_weigh<E>(dk, ds, q_low());
            ptx::wgmma_wait_group<0>();
            if (at.signals)
                release<T>(&s.q_empty[at.ring.slot]);
            at.ring.advance();
        }
        store_keys<T, E>(a.dk, w, dk, a.scale, a.dim);
        __syncwarp();
        if (at.signals)
            ptx::mbarrier_arrive(&s.kv_empty);
    }
}

template <class T, class E>
__global__ void __launch_bounds__(T::kThreads, 1) attention_dkdv_sm90_kernel(const __grid_constant__ KeyArgs a)
{
    extern __shared__ char raw[];
    KeySmem<T> &s = *reinterpret_cast<KeySmem<T> *>(raw + (1024 - ptx::smem_address(raw) % 1024) % 1024);
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(&s.kv_full, 1);
        ptx::mbarrier_init(&s.kv_empty, T::kWarps + 1);
        for (int i = 0; i < T::kStages; i++) {
            ptx::mbarrier_init(&s.q_full[i], 2);
            ptx::mbarrier_init(&s.dout_full[i], 1);
            ptx::mbarrier_init(&s.q_empty[i], T::kWarps * T::kCtas);
            ptx::mbarrier_init(&s.dout_empty[i], T::kWarps * T::kCtas);
        }
        for (int i = 0; i < 2; i++) {
            ptx::mbarrier_init(&s.p_full[i], T::kWarps / 2);
            ptx::mbarrier_init(&s.p_empty[i], T::kWarps / 2);
        }
        ptx::mbarrier_init(&s.place_full, 1);
        ptx::mbarrier_init(&s.place_empty, 1);
        ptx::fence_mbarrier_init();
    }
    if constexpr (T::kCtas == 1)
        __syncthreads();
    else
        ptx::cluster_sync();
    if (threadIdx.x < 128) {
        ptx::setmaxnreg_dec<T::kLoadRegs>();
        if (threadIdx.x == 0)
            key_load_role<T>(s, a);
        else if (threadIdx.x / 32 == 1)
            row_role<T>(s, a);
    } else {
        ptx::setmaxnreg_inc<T::kMathRegs>();
        if (threadIdx.x < 256)
            weight_role<T, E>(s, a);
        else
            score_role<T, E>(s, a);
    }
    if constexpr (T::kCtas > 1)
        ptx::cluster_sync(); /* the other block still arrives here */
}

} // namespace attention_sm90

#endif
