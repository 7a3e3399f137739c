/* gdn_gradients_sm90.cuh -- what a block of gdn_gradients_sm90.cu works on: its shared memory, the list of chunks,
 * copies, and what its warpgroups do together before and after a chunk and a value head.
 */
#ifndef GDN_GRADIENTS_SM90_CUH
#define GDN_GRADIENTS_SM90_CUH

#include "gdn_bwd_sm90.cuh"

namespace gdn_gradients
{

using namespace gdn_sm90;
using gdn::State;

constexpr int kThreads = 384, kStateTile = 2 * kTileBytes, kLeader = 128; /* that copies */

enum Barrier { kAll = 1, kKeys = 2 };

struct Rows { /* of a value head */
    char dout[2 * kTileBytes], dr[2 * kTileBytes], v[2 * kTileBytes], p[kTileBytes];
    float4 numbers[kChunk], more[kChunk];
};

struct Item {
    int64_t token;
    int own, doc, n, key_head;                     /* own: token in the segment */
    bool s_copied, ds_copied, has_s, has_ds, last; /* last: no more */
};

enum Sum { kQueryRows, kKeyRows, kAfter, kBeta, kValue, kSums };

struct Smem {
    alignas(1024) char k[2 * kTileBytes], q[2 * kTileBytes];
    alignas(1024) char s[2 * kStateTile], ds[2 * kStateTile];
    alignas(1024) Rows rows[2];
    float sums[2][kSums][kChunk], columns[2][2][4][kChunk], whole[2][4]; /* a head's, and the one's before */
    uint64_t keys_full, s_full, ds_full, rows_full[2];
    Item items[2]; /* this chunk and the next */
    gdn::Range docs;
    int64_t first, next, end; /* the segment's first place; in the list of work */
};

struct Args {
    CUtensorMap q, k, dout, dr, v, p, s, ds;
    Call call;
    Backward b;
};

/* Whether each barrier's phase is an odd one, and the slot of the rows, in a bit each. */
struct Phases {
    enum Bit : uint32_t { kKeysFull = 1, kSFull = 2, kDsFull = 4, kRowsFull = 8, kSlot = 32 }; /* kRowsFull: two */
    uint32_t bits = 0;

    __device__ void wait(uint64_t *bar, uint32_t bit)
    {
        ptx::mbarrier_wait(bar, bits & bit ? 1 : 0);
        bits ^= bit;
    }
    __device__ uint32_t item() const { return bits & kKeysFull ? 1 : 0; }
    __device__ uint32_t slot() const { return bits & kSlot ? 1 : 0; }
};

/* The block's next chunk, by one thread. */
__device__ inline void find_chunk(Smem &s, const Call &p, Item &x)
{
    const uint32_t heads = static_cast<uint32_t>(p.key_heads);
    x.last = true;
    for (; s.next < s.end && x.last; s.next += gridDim.x) {
        const uint32_t item = static_cast<uint32_t>(s.next);
        const gdn::Place at = gdn::find<kChunk>(p, s.docs, s.first + item / heads);
        if (at.doc < 0)
            continue;
        const int64_t left = p.end(at.doc) - p.start(at.doc) - at.index * kChunk;
        x.last = false;
        x.doc = static_cast<int>(at.doc);
        x.token = p.start(at.doc) + at.index * kChunk;
        x.own = static_cast<int>(x.token - p.low);
        x.n = static_cast<int>(gdn::least(left, kChunk));
        x.key_head = static_cast<int>(item % heads);
        x.s_copied = at.index > 0;
        x.ds_copied = left > kChunk;
        x.has_s = x.s_copied || p.initial.data != nullptr;
        x.has_ds = x.ds_copied || p.dfinal.data != nullptr;
    }
}

/* Copies, by one thread. */

__device__ inline void copy_keys(Smem &s, const Args &a, const Item &x)
{
    ptx::mbarrier_arrive_expect_tx(&s.keys_full, 4 * kTileBytes);
    for (int i = 0; i < 2; i++) {
        ptx::tma_load_3d(s.k + i * kTileBytes, &a.k, &s.keys_full, 64 * i, x.key_head, static_cast<int>(x.token));
        ptx::tma_load_3d(s.q + i * kTileBytes, &a.q, &s.keys_full, 64 * i, x.key_head, static_cast<int>(x.token));
    }
}

__device__ inline void copy_rows(Smem &s, const Args &a, const Item &x, int h, uint32_t slot)
{
    const int head = x.key_head * a.call.group + h, token = static_cast<int>(x.token), own = x.own;
    const int64_t number = head * a.b.made.stride + own;
    Rows &r = s.rows[slot];
    uint64_t *const full = &s.rows_full[slot];
    ptx::mbarrier_arrive_expect_tx(full, sizeof r);
    for (int i = 0; i < 2; i++) {
        ptx::tma_load_3d(r.dout + i * kTileBytes, &a.dout, full, 64 * i, head, token);
        ptx::tma_load_3d(r.dr + i * kTileBytes, &a.dr, full, 64 * i, head, own);
        ptx::tma_load_3d(r.v + i * kTileBytes, &a.v, full, 64 * i, head, own);
    }
    ptx::tma_load_3d(r.p, &a.p, full, 0, head, own);
    ptx::bulk_load(r.numbers, a.b.made.numbers + number, sizeof r.numbers, full);
    ptx::bulk_load(r.more, a.b.made.more + number, sizeof r.more, full);
}

__device__ inline void copy_states(Smem &s, const Args &a, const Item &x, int h)
{
    const int head = x.key_head * a.call.group + h;
    const int row = (x.own / kChunk * a.call.value_heads + head) * kDim;
    if (x.s_copied) {
        ptx::mbarrier_arrive_expect_tx(&s.s_full, 2 * kStateTile);
        for (int i = 0; i < 2; i++)
            ptx::tma_load_3d(s.s + i * kStateTile, &a.s, &s.s_full, 64 * i, 0, row);
    }
    if (x.ds_copied) {
        ptx::mbarrier_arrive_expect_tx(&s.ds_full, 2 * kStateTile);
        for (int i = 0; i < 2; i++)
            ptx::tma_load_3d(s.ds + i * kStateTile, &a.ds, &s.ds_full, 64 * i, 0, row + a.call.value_heads * kDim);
    }
}

/* The first chunk, and its first rows. */
__device__ inline void begin(Smem &s, const Args &a)
{
    const Call &p = a.call;
    s.docs = gdn::documents_of(p);
    const gdn::Range places = gdn::places_of<kChunk>(p, s.docs);
    s.first = places.first;
    s.next = blockIdx.x;
    s.end = (places.last - places.first) * p.key_heads;
    find_chunk(s, p, s.items[0]);
    for (int h = 0; h < 2 && h < p.group && !s.items[0].last; h++)
        copy_rows(s, a, s.items[0], h, static_cast<uint32_t>(h));
}

/* A document's first or last state, [keys, values] in float32, as copies bring the others. */
__device__ inline void convert(char *to, const State &from)
{
    for (int e = static_cast<int>(threadIdx.x); e < kDim * kDim / 2; e += kThreads) {
        const int value = e % kDim, pair = e / kDim;
        const float low = from.data[2 * pair * from.row + value], high = from.data[(2 * pair + 1) * from.row + value];
        *reinterpret_cast<uint32_t *>(piece_of(to + pair / 32 * kStateTile, value, pair % 32 / 4) + pair % 4 * 4) =
            pack(low, high);
    }
}

/* Zeros in rows from n on of a tile. */
__device__ inline void clear_tail(char *tile, int n)
{
    for (int i = n * 8 + static_cast<int>(threadIdx.x); i < kChunk * 8; i += kThreads)
        *reinterpret_cast<uint4 *>(tile + i * 16) = uint4{};
}

/* Rows behind the document count nothing, and decays there are the last row's. */
__device__ inline void clear_tails(Rows &rows, int n)
{
    for (int i = 0; i < 2; i++) {
        clear_tail(rows.dout + i * kTileBytes, n);
        clear_tail(rows.dr + i * kTileBytes, n);
        clear_tail(rows.v + i * kTileBytes, n);
    }
    clear_tail(rows.p, n);
    const float c = rows.more[n - 1].w;
    for (int i = n + static_cast<int>(threadIdx.x); i < kChunk; i += kThreads) {
        rows.numbers[i] = float4{};
        rows.more[i] = make_float4(0.0f, 0.0f, c, c);
    }
}

/* What all warpgroups do first and last for a chunk and for a value head; one of them has the thread that copies. */

/* Null: there are no more. */
template <bool kLeads = false> __device__ __forceinline__ const Item *begin_chunk(Smem &s, const Args &a, Phases &at)
{
    ptx::fence_proxy_async();
    ptx::bar_sync(kAll, kThreads);
    const Item &x = s.items[at.item()];
    if (x.last)
        return nullptr;
    if (kLeads && threadIdx.x == kLeader) {
        copy_keys(s, a, x);
        copy_states(s, a, x, 0);
    }
    __syncwarp();
    at.wait(&s.keys_full, Phases::kKeysFull);
    if (x.n == kChunk)
        return &x;
    for (int i = 0; i < 2; i++) {
        clear_tail(s.k + i * kTileBytes, x.n);
        clear_tail(s.q + i * kTileBytes, x.n);
    }
    return &x; /* every head of it has a barrier before products */
}

__device__ inline void begin_head(Smem &s, const Call &p, const Item &x, int head, Phases &at)
{
    at.wait(&s.rows_full[at.slot()], Phases::kRowsFull << at.slot());
    if (x.s_copied)
        at.wait(&s.s_full, Phases::kSFull);
    if (x.ds_copied)
        at.wait(&s.ds_full, Phases::kDsFull);
    const bool s_converted = x.has_s && !x.s_copied, ds_converted = x.has_ds && !x.ds_copied;
    if (!s_converted && !ds_converted && x.n == kChunk)
        return;
    if (s_converted)
        convert(s.s, p.initial.at(x.doc, head));
    if (ds_converted)
        convert(s.ds, p.dfinal.at(x.doc, head));
    if (x.n < kChunk)
        clear_tails(s.rows[at.slot()], x.n);
    ptx::fence_proxy_async();
    ptx::bar_sync(kAll, kThreads);
}

/* The states have been read, and the next ones may come. */
template <bool kLeads = false>
__device__ __forceinline__ void end_states(Smem &s, const Args &a, const Item &x, int h, const Phases &at)
{
    const int group = a.call.group;
    ptx::bar_sync(kAll, kThreads);
    if (kLeads && threadIdx.x == kLeader) {
        Item &following = s.items[at.item()];
        if (h + 1 < group)
            copy_states(s, a, x, h + 1);
        if (h == 0)
            find_chunk(s, a.call, following);
        if (group == 1 && !following.last)
            copy_rows(s, a, following, 0, at.slot() ^ 1);
    }
    __syncwarp();
}

/* dg and dbeta of a value head, by a warp. In float64: what a token gives to itself is in sums of rows and of columns,
 * and must be gone to the last bit where a decay leaves nothing beside it. */
__device__ inline void store_gates(const Smem &s, const Call &p, const Item &x, int head, uint32_t slot)
{
    const int lane = static_cast<int>(threadIdx.x % 32), i = 2 * lane;
    const float (&sums)[kSums][kChunk] = s.sums[slot];
    const float (&whole)[4] = s.whole[slot];
    double received[2], after = 0.0;
#pragma unroll
    for (int e = 0; e < 2; e++) {
        received[e] = static_cast<double>(sums[kQueryRows][i + e]) + sums[kKeyRows][i + e] - sums[kAfter][i + e];
#pragma unroll
        for (int w = 0; w < 8; w++)
            received[e] -= s.columns[slot][w / 4][w % 4][i + e];
        after += sums[kAfter][i + e];
    }
    for (int step = 16; step > 0; step /= 2)
        after += __shfl_xor_sync(0xffffffffu, after, step);
    after += (static_cast<double>(whole[0]) + whole[1] + whole[2] + whole[3]) * s.rows[slot].numbers[x.n - 1].w;
#pragma unroll
    for (int e = 0; e < 2; e++)
        received[e] += i + e == x.n - 1 ? after : 0.0;
    double sum = received[0] + received[1];
    for (int step = 1; step < 32; step *= 2) {
        const double right = __shfl_down_sync(0xffffffffu, sum, step);
        sum += lane + step < 32 ? right : 0.0;
    }
#pragma unroll
    for (int e = 0; e < 2; e++)
        if (i + e < x.n) {
            p.dg.set_number(x.token + i + e, head, static_cast<float>(e == 0 ? sum : sum - received[0]));
            p.dbeta.set_number(x.token + i + e, head, sums[kBeta][i + e] + sums[kValue][i + e]);
        }
}

/* The rows have been read, and all sums written. */
template <bool kLeads = false>
__device__ __forceinline__ void end_head(Smem &s, const Args &a, const Item &x, int h, Phases &at)
{
    const int group = a.call.group;
    ptx::bar_sync(kAll, kThreads);
    if (kLeads && threadIdx.x / 32 == kLeader / 32)
        store_gates(s, a.call, x, x.key_head * group + h, at.slot());
    __syncwarp();
    if (kLeads && threadIdx.x == kLeader) {
        const Item &following = s.items[at.item()];
        if (h + 2 < group)
            copy_rows(s, a, x, h + 2, at.slot());
        else if (group > 1 && !following.last)
            copy_rows(s, a, following, h + 2 - group, at.slot());
    }
    __syncwarp();
    at.bits ^= Phases::kSlot;
}

} // namespace gdn_gradients

#endif
