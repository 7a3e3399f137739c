/* moe_product_sm90.cuh -- products over groups of rows in bfloat16 on Hopper, persistent and warp-specialised.
 *
 *   NT  C[r, n] = sum over k of A[r, k] W_g[n, k]      with the gate: n is 128 columns of g and the same 128 of u, and
 *                                                      act = silu(g) u is made of the sums in their registers
 *   NN  C[r, n] = sum over k of A[r, k] W_g[k, n]
 *   TN  C_g[m, n] = sum over rows r of g of A[r, m] B[r, n]      bfloat16 or float32, perhaps added to what is there
 *
 *   a cluster of two blocks makes 256 x 256 of C, each block 128 rows of it, 64 of the depth at a time
 *
 *   warpgroup 0, one thread | stage: this block's A (16 KB), its half of B (16 KB) into both blocks; four stages ahead,
 *                           | three where sums leave through shared memory
 *   warpgroups 1, 2         | 64 x 256 of C each (wgmma m64n256k16, smem x smem), at their own pace, then the epilogue,
 *                           | under which the next tile's copies run; NT and NN without the gate: 16 rows of a warp go
 *                           | to its own 8 KB, from where the copy engine takes them
 *
 * The list of work is (group, 256 rows, 256 columns), columns first, so that what runs together reads the same rows
 * from L2 and each row from memory once. Its length comes from the groups' offsets on the device. A cluster takes every
 * so-manieth place; TN, whose tiles differ, lists groups with most rows first, and a cluster draws its next place while
 * a tile runs. Of rows that a group shares a tile with, the others' are computed and not written (NT, NN), or zeroed in
 * shared memory (TN: 0 times a neighbour's NaN is NaN). Weights are read where they lie: the copy engine's boxes follow
 * their strides and give 0 behind their ends.
 *
 * Floor: 2 M N K flops at the tensor cores' rate, 790 to 810 TFLOP/s in such products. A step of a block is 4.2 MFLOP
 * and reads 32 KB from L2 (48 KB without the cluster): at 790 TFLOP/s 6.2 TB/s. 262,144 rows over 32 experts, 3072 ->
 * 2 x 1024: 3.30 TFLOP, 4.18 ms; 3.3 GB from and to memory, 0.8 ms.
 *
 * Measured in runs that the power limit slows, ours and torch's (benchmarks/results/h200/moe_variants.json): gate_up
 * 5.28 ms, 1.02 to 1.03 times torch's product and swiglu, whose product alone takes 5.04; down 1.08, gradients of rows
 * 1.01 to 1.05, of weights 1.00 to 1.02, with a third of the rows in one group 1.11, which drawing the work gave; added
 * into float32 0.15 ms more (predicted 0.2). gate_up with its epilogue through the copy engine (four stages and 4 KB a
 * warp; three and 8), with warpgroups two stages apart, with stores past L2 or weights kept in L2, which saves 0.8 of
 * the 3.9 GB that are read: 0.98 to 1.01 of the plain one's rate, tensor cores busy 0.88 of the cycles in each. What
 * power leaves is the bound there, not how the epilogue lies.
 */
#ifndef MOE_PRODUCT_SM90_CUH
#define MOE_PRODUCT_SM90_CUH

#include "bulk_sm90.cuh"
#include "moe_job.h"
#include "on_device.h"
#include "ptx_sm90.cuh"
#include "rows.cuh"
#include "tensor_map.h"
#include "wgmma_sm90.cuh"

namespace moe_sm90
{

constexpr int kM = 128, kN = 256, kK = 64, kBlocks = 2; /* of a block; blocks of a cluster */
constexpr int kThreads = 384, kLoadRegs = 40, kMathRegs = 232;
constexpr int kABytes = kM * kK * 2, kBBytes = kN * kK * 2, kBox = 64 * 128; /* 64 rows of 128 bytes */
constexpr int kMostGroups = 1024, kBoxRows = 16, kBoxBytes = kBoxRows * 128; /* a box on its way out: 16 x 64 */

/* What places of work are found by. */
struct Tables {
    uint64_t next_full[2], next_empty[2]; /* TN: 1 and the bytes; of block 0: a warp and the loads of both blocks */
    uint64_t next[2];                     /* TN: places to come */
    int offset[kMostGroups + 1];
    int first[kMostGroups + 1]; /* NT, NN: pairs of row tiles before each group; TN: groups by size */
};

/* kBoxes: of a warp on their way to memory, 0 where it writes its sums itself. */
template <MoeKind kKind, bool kGate> struct Smem {
    static constexpr bool kSends = kKind != MOE_TN && !kGate;
    static constexpr int kStages = kSends ? 3 : 4, kBoxes = 4;
    alignas(1024) char a[kStages][kABytes];
    alignas(1024) char b[kStages][kBBytes];
    alignas(1024) char out[kSends ? 8 : 1][kSends ? kBoxes * kBoxBytes : 8];
    uint64_t full[kStages], empty[kStages]; /* 1 and the bytes; a warp of both blocks each */
    Tables tables;
};

struct Args {
    CUtensorMap a, b, c; /* c: NT, NN without the gate */
    MoeProduct p;
    int row_pairs, columns; /* TN: pairs of row tiles of a group; tiles of columns */
};

template <int kStages> struct Ring {
    int slot = 0;
    uint32_t phase = 0;
    __device__ void advance()
    {
        if (++slot == kStages) {
            slot = 0;
            phase ^= 1;
        }
    }
};

struct Tile {
    int group, column;
    int row, last; /* this block's first row, and the group's end: of C (NT, NN: rows of A too) */
    int depth0, depth;
};

/* x of lane 0, which all lanes hold: the compiler may then keep it in uniform registers. */
template <class X> __device__ __forceinline__ X uniform(X x) { return __shfl_sync(0xffffffffu, x, 0); }

/* What tiles are found by, by one warp. */
template <MoeKind kKind> __device__ void place_groups(Tables &s, const MoeProduct &p)
{
    const int lane = static_cast<int>(threadIdx.x);
    int before = 0;
    for (int g0 = 0; g0 < p.groups; g0 += 32) {
        const int g = g0 + lane, rows = g < p.groups ? p.offset[g + 1] - p.offset[g] : 0;
        int sum = (rows + kBlocks * kM - 1) / (kBlocks * kM);
        for (int far = 1; far < 32; far *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, sum, far);
            sum += lane >= far ? other : 0;
        }
        if (g < p.groups) {
            s.offset[g + 1] = p.offset[g + 1];
            s.first[kKind == MOE_TN ? g : g + 1] = kKind == MOE_TN ? p.by_size[g] : before + sum;
        }
        before += __shfl_sync(0xffffffffu, sum, 31);
    }
    if (lane == 0) {
        s.offset[0] = p.offset[0];
        if (kKind != MOE_TN)
            s.first[0] = 0;
    }
}

template <MoeKind kKind> __device__ int64_t places(const Tables &s, const Args &a)
{
    const int64_t pairs =
        kKind == MOE_TN ? static_cast<int64_t>(a.p.groups) * a.row_pairs : static_cast<int64_t>(s.first[a.p.groups]);
    return pairs * a.columns;
}

template <MoeKind kKind> __device__ Tile tile_at(const Tables &s, const Args &a, int64_t place, int rank)
{
    const int pair = static_cast<int>(place / a.columns);
    Tile t;
    t.column = static_cast<int>(place % a.columns);
    if constexpr (kKind == MOE_TN) {
        t.group = s.first[pair / a.row_pairs];
        t.row = (pair % a.row_pairs * kBlocks + rank) * kM;
        t.last = static_cast<int>(a.p.m);
        t.depth0 = s.offset[t.group];
        t.depth = s.offset[t.group + 1] - t.depth0;
    } else {
        int low = 0, high = a.p.groups - 1;
        while (low < high) { /* the last group that begins at or before the pair */
            const int middle = (low + high + 1) / 2;
            if (s.first[middle] <= pair)
                low = middle;
            else
                high = middle - 1;
        }
        t.group = low;
        t.row = s.offset[low] + ((pair - s.first[low]) * kBlocks + rank) * kM;
        t.last = s.offset[low + 1];
        t.depth0 = 0;
        t.depth = static_cast<int>(a.p.k);
    }
    return t;
}

__device__ inline int steps_of(const Tile &t) { return (t.depth + kK - 1) / kK; }

/* TN: the first block's loading thread draws the cluster's next place, while a tile runs, for both blocks. */
__device__ inline void draw_place(Tables &s, const Args &a, uint32_t tile, int rank)
{
    const uint32_t slot = tile % 2;
    ptx::mbarrier_arrive_expect_tx(&s.next_full[slot], sizeof s.next[0]);
    if (rank != 0)
        return;
    ptx::mbarrier_wait(&s.next_empty[slot], tile / 2 % 2 ^ 1);
    const uint64_t place = gridDim.x / kBlocks + atomicAdd(a.p.next, 1ull);
    for (int i = 0; i < kBlocks; i++)
        ptx::st_async_at(&s.next[slot], place, &s.next_full[slot], i);
}

/* The place after the cluster's tile-th; `signals`: one thread of those that share a copy of it. */
template <MoeKind kKind, bool kWarp>
__device__ __forceinline__ int64_t place_after(Tables &s, int64_t place, uint32_t tile, bool signals)
{
    if constexpr (kKind != MOE_TN)
        return place + gridDim.x / kBlocks;
    const uint32_t slot = tile % 2;
    ptx::mbarrier_wait(&s.next_full[slot], tile / 2 % 2);
    const int64_t next = static_cast<int64_t>(*static_cast<volatile uint64_t *>(&s.next[slot]));
    if constexpr (kWarp)
        __syncwarp();
    if (signals)
        ptx::mbarrier_arrive_at(&s.next_empty[slot], 0);
    return next;
}

/* One thread: every stage of the block's tiles. */
template <MoeKind kKind, bool kGate> __device__ void load_role(Smem<kKind, kGate> &s, const Args &a, int rank)
{
    constexpr uint16_t kBoth = 3;
    Ring<Smem<kKind, kGate>::kStages> ring;
    uint32_t tile = 0;
    const int64_t total = places<kKind>(s.tables, a);
    const int inner = static_cast<int>(a.p.n / 2);
    for (int64_t place = blockIdx.x / kBlocks; place < total; tile++) {
        const Tile t = tile_at<kKind>(s.tables, a, place, rank);
        if (kKind == MOE_TN)
            draw_place(s.tables, a, tile, rank);
        const int steps = steps_of(t);
        const int column = kGate ? rank * inner + t.column * (kN / 2) : t.column * kN + rank * (kN / 2);
        for (int i = 0; i < steps; i++, ring.advance()) {
            const int k = t.depth0 + i * kK;
            uint64_t *const full = &s.full[ring.slot];
            char *const to_a = s.a[ring.slot], *const to_b = s.b[ring.slot] + rank * (kBBytes / 2);
            ptx::mbarrier_wait(&s.empty[ring.slot], ring.phase ^ 1);
            ptx::mbarrier_arrive_expect_tx(full, kABytes + kBBytes);
            if constexpr (kKind == MOE_TN) {
                ptx::tma_load_3d(to_a, &a.a, full, t.row, 0, k);
                ptx::tma_load_3d(to_a + kBox, &a.a, full, t.row + 64, 0, k);
                ptx::tma_load_3d_multicast(to_b, &a.b, full, column, 0, k, kBoth);
                ptx::tma_load_3d_multicast(to_b + kBox, &a.b, full, column + 64, 0, k, kBoth);
            } else {
                ptx::tma_load_3d(to_a, &a.a, full, k, 0, t.row);
                if constexpr (kKind == MOE_NT) {
                    ptx::tma_load_3d_multicast(to_b, &a.b, full, k, column, t.group, kBoth);
                } else {
                    ptx::tma_load_3d_multicast(to_b, &a.b, full, column, k, t.group, kBoth);
                    ptx::tma_load_3d_multicast(to_b + kBox, &a.b, full, column + 64, k, t.group, kBoth);
                }
            }
        }
        place = place_after<kKind, false>(s.tables, place, tile, true);
    }
}

/* A matrix descriptor: the address, the stride between boxes of columns, 1,024 bytes between groups of 8 rows, and the
 * 128-byte swizzle. Steps through a tile are added to the low word. */
__device__ __forceinline__ uint32_t descriptor_low(const void *p, uint32_t box_bytes)
{
    return (ptx::smem_address(p) & 0x3ffff) >> 4 | (box_bytes >> 4) << 16;
}

__device__ __forceinline__ uint64_t descriptor(uint32_t low) { return 0x40000040ull << 32 | low; }

/* A stage's products: 16 of a contiguous depth are 32 bytes on, of the other kind 2,048. */
template <MoeKind kKind> __device__ __forceinline__ void issue(float (&sum)[128], uint32_t a, uint32_t b)
{
#pragma unroll
    for (int j = 0; j < kK / 16; j++) {
        if constexpr (kKind == MOE_NT)
            ptx::wgmma_m64n256k16_bf16_ss(sum, descriptor(a + j * (32 >> 4)), descriptor(b + j * (32 >> 4)), true);
        else if constexpr (kKind == MOE_NN)
            ptx::wgmma_m64n256k16_bf16_st(sum, descriptor(a + j * (32 >> 4)), descriptor(b + j * (2048 >> 4)), true);
        else
            ptx::wgmma_m64n256k16_bf16_tt(sum, descriptor(a + j * (2048 >> 4)), descriptor(b + j * (2048 >> 4)), true);
    }
    ptx::wgmma_commit_group();
}

/* Zeros in rows [from, 64) of a stage's boxes, by the 256 math threads. */
template <class S> __device__ void clear_rows(S &s, int slot, int from)
{
    constexpr int kBoxesA = kABytes / kBox, kBoxes = kBoxesA + kBBytes / kBox;
    for (int i = static_cast<int>(threadIdx.x) - 128; i < (64 - from) * 8 * kBoxes; i += 256) {
        const int box = i % kBoxes, at = from * 128 + i / kBoxes * 16;
        char *const to = box < kBoxesA ? s.a[slot] + box * kBox : s.b[slot] + (box - kBoxesA) * kBox;
        *reinterpret_cast<uint4 *>(to + at) = make_uint4(0, 0, 0, 0);
    }
    ptx::fence_proxy_async();
    ptx::bar_sync(1, 256);
}

__device__ __forceinline__ uint32_t pack(float low, float high)
{
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&both);
}

/* Four words of each of a quad's lanes, turned: lane c gets everyone's word c. */
__device__ __forceinline__ uint4 turn(uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3)
{
    const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
    const uint32_t x = __shfl_xor_sync(0xffffffffu, odd ? a0 : a1, 1);
    const uint32_t y = __shfl_xor_sync(0xffffffffu, odd ? a2 : a3, 1);
    a0 = odd ? x : a0;
    a1 = odd ? a1 : x;
    a2 = odd ? y : a2;
    a3 = odd ? a3 : y;
    const uint32_t z = __shfl_xor_sync(0xffffffffu, upper ? a0 : a2, 2);
    const uint32_t w = __shfl_xor_sync(0xffffffffu, upper ? a1 : a3, 2);
    return upper ? make_uint4(z, w, a2, a3) : make_uint4(a0, a1, z, w);
}

/* Columns [0, 2 kCount) of row r of the thread's two (8 apart), `columns` of which are there, in 16-byte stores; sums
 * from kFirst on. */
template <int kFirst, int kCount>
__device__ __forceinline__ void store_row(__nv_bfloat16 *to, bool real, int columns, const float (&sum)[128], int r)
{
    const int lane = static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int j = 0; j < kCount / 16; j++) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int at = kFirst + 16 * j + 4 * i + 2 * r;
            words[i] = pack(sum[at], sum[at + 1]);
        }
        const uint4 whole = turn(words[0], words[1], words[2], words[3]);
        if (real && 32 * j + 8 * lane < columns)
            *reinterpret_cast<uint4 *>(to + 32 * j + 8 * lane) = whole;
    }
}

/* 16 rows of 64 columns, sums from kFirst on, to a box with the 128-byte swizzle. */
template <int kFirst> __device__ __forceinline__ void put_box(char *box, const float (&sum)[128])
{
    const int lane = static_cast<int>(threadIdx.x % 32), row = lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            words[i] = pack(sum[kFirst + 4 * j + 2 * i], sum[kFirst + 4 * j + 2 * i + 1]);
        ptx::stmatrix_x4(box + row * 128 + ((j + lane / 16) ^ (row % 8)) * 16, words);
    }
}

/* The warp's 16 rows of 256 columns on their way, when its room is free. */
__device__ __forceinline__ void send_rows(const CUtensorMap *map, char *room, const float (&sum)[128], int column,
                                          int row)
{
    if (threadIdx.x % 32 == 0)
        ptx::bulk_wait_read<0>();
    __syncwarp();
    put_box<0>(room, sum);
    put_box<32>(room + kBoxBytes, sum);
    put_box<64>(room + 2 * kBoxBytes, sum);
    put_box<96>(room + 3 * kBoxBytes, sum);
    ptx::fence_proxy_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            ptx::tma_store_3d(map, room + i * kBoxBytes, column + 64 * i, 0, row);
        ptx::bulk_commit();
    }
}

template <int kFirst, int kCount>
__device__ __forceinline__ void store_row(float *to, bool real, int columns, const float (&sum)[128], int r)
{
    const int lane = static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int j = 0; j < kCount / 4; j++)
        if (real && 8 * j + 2 * lane < columns)
            *reinterpret_cast<float2 *>(to + 8 * j + 2 * lane) =
                make_float2(sum[kFirst + 4 * j + 2 * r], sum[kFirst + 4 * j + 2 * r + 1]);
}

/* Added to what is there, which nobody waits for: one sum an element, so that its bits repeat. */
__device__ __forceinline__ void add_row(float *to, bool real, int columns, const float (&sum)[128], int r)
{
    const int lane = static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int j = 0; j < 32; j++)
        if (real && 8 * j + 2 * lane < columns)
            ptx::red_add_v2(to + 8 * j + 2 * lane, sum[4 * j + 2 * r], sum[4 * j + 2 * r + 1]);
}

__device__ __forceinline__ void add_row(__nv_bfloat16 *to, bool real, int columns, const float (&sum)[128], int r)
{
    const int lane = static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int j = 0; j < 32; j++)
        if (real && 8 * j + 2 * lane < columns) {
            __nv_bfloat162 *const two = reinterpret_cast<__nv_bfloat162 *>(to + 8 * j + 2 * lane);
            const float2 held = __bfloat1622float2(*two);
            *two = __floats2bfloat162_rn(held.x + sum[4 * j + 2 * r], held.y + sum[4 * j + 2 * r + 1]);
        }
}

__device__ __forceinline__ float rounded(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

/* Products and silu(g) u of two rows. */
__device__ __forceinline__ void write_gate(const MoeProduct &p, const Tile &t, float (&sum)[128], int64_t row)
{
    const int64_t inner = p.n / 2, column = static_cast<int64_t>(t.column) * (kN / 2);
    const int columns = static_cast<int>(inner - column);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const bool real = p.keep && row + 8 * r < t.last;
        __nv_bfloat16 *const to = static_cast<__nv_bfloat16 *>(p.c) + (row + 8 * r) * p.ldc + column;
        store_row<0, 64>(to, real, columns, sum, r);
        store_row<64, 64>(to + inner, real, columns, sum, r);
    }
#pragma unroll
    for (int i = 0; i < 64; i++) {
        const float gate = rounded(sum[i]);
        sum[i] = __fdividef(gate, 1.0f + __expf(-gate)) * rounded(sum[64 + i]);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        __nv_bfloat16 *const to = static_cast<__nv_bfloat16 *>(p.act) + (row + 8 * r) * inner + column;
        store_row<0, 64>(to, row + 8 * r < t.last, columns, sum, r);
    }
}

/* Two rows of C. */
template <MoeKind kKind, class To>
__device__ __forceinline__ void write(const MoeProduct &p, const Tile &t, const float (&sum)[128], int64_t row)
{
    const int64_t column = static_cast<int64_t>(t.column) * kN, group = kKind == MOE_TN ? t.group * p.c_group : 0;
    const int columns = static_cast<int>(p.n - column < kN ? p.n - column : kN);
    To *const to = static_cast<To *>(p.c) + group + row * p.ldc + column;
    const bool adds = kKind == MOE_TN && p.add;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const bool real = row + 8 * r < t.last;
        if (adds)
            add_row(to + 8 * r * p.ldc, real && t.depth > 0, columns, sum, r);
        else
            store_row<0, 128>(to + 8 * r * p.ldc, real, columns, sum, r);
    }
}

/* 64 rows of every tile of the block. */
template <MoeKind kKind, bool kGate, class To> __device__ void math_role(Smem<kKind, kGate> &s, const Args &a, int rank)
{
    constexpr uint32_t kStrideA = kKind == MOE_TN ? kBox : kABytes, kStrideB = kKind == MOE_NT ? kBBytes : kBox;
    using S = Smem<kKind, kGate>;
    Ring<S::kStages> ring;
    const int64_t total = places<kKind>(s.tables, a);
    const int wg = uniform(static_cast<int>(threadIdx.x) / 128 - 1), lane = static_cast<int>(threadIdx.x % 32);
    const int warp = 4 * wg + uniform(static_cast<int>(threadIdx.x / 32 % 4));
    const int row = 16 * warp + lane / 4; /* and row + 8 */
    const auto release = [&](int slot) {
        if (lane < kBlocks)
            ptx::mbarrier_arrive_at(&s.empty[slot], lane);
    };
    uint32_t tile = 0;
    for (int64_t place = blockIdx.x / kBlocks; place < total; tile++) {
        const Tile t = tile_at<kKind>(s.tables, a, place, rank);
        const int steps = uniform(steps_of(t));
        float sum[128] = {};
        int before = 0;
        for (int i = 0; i < steps; i++, ring.advance()) {
            ptx::mbarrier_wait(&s.full[ring.slot], ring.phase);
            if (kKind == MOE_TN && t.depth - i * kK < kK)
                clear_rows(s, ring.slot, t.depth - i * kK);
            ptx::wgmma_fence();
            issue<kKind>(sum, uniform(descriptor_low(s.a[ring.slot] + wg * kBox, kStrideA)),
                         uniform(descriptor_low(s.b[ring.slot], kStrideB)));
            ptx::wgmma_wait_group<1>();
            if (i > 0)
                release(before);
            before = ring.slot;
        }
        ptx::wgmma_wait_group<0>();
        if (steps > 0)
            release(before);
        const int first = t.row + 16 * warp; /* of the warp's 16 rows */
        if constexpr (kGate)
            write_gate(a.p, t, sum, t.row + row);
        else if (S::kSends && first + kBoxRows <= t.last)
            send_rows(&a.c, s.out[S::kSends ? warp : 0], sum, t.column * kN, first);
        else
            write<kKind, To>(a.p, t, sum, t.row + row);
        place = place_after<kKind, true>(s.tables, place, tile, lane == 0);
    }
    if (S::kSends && lane == 0)
        ptx::bulk_wait_read<0>();
}

template <MoeKind kKind, bool kGate, class To>
__global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kThreads, 1)
    moe_product_sm90_kernel(const __grid_constant__ Args a)
{
    extern __shared__ char raw[];
    using S = Smem<kKind, kGate>;
    S &s = *reinterpret_cast<S *>(raw + (1024 - ptx::smem_address(raw) % 1024) % 1024);
    const int rank = static_cast<int>(ptx::cluster_rank());
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::kStages; i++) {
            ptx::mbarrier_init(&s.full[i], 1);
            ptx::mbarrier_init(&s.empty[i], kBlocks * 8);
        }
        for (int i = 0; i < 2; i++) {
            ptx::mbarrier_init(&s.tables.next_full[i], 1);
            ptx::mbarrier_init(&s.tables.next_empty[i], kBlocks * 9);
        }
        ptx::fence_mbarrier_init();
    }
    if (threadIdx.x < 32)
        place_groups<kKind>(s.tables, a.p);
    __syncthreads();
    ptx::cluster_sync();
    if (threadIdx.x < 128) {
        ptx::setmaxnreg_dec<kLoadRegs>();
        if (threadIdx.x == 0)
            load_role<kKind, kGate>(s, a, rank);
    } else {
        ptx::setmaxnreg_inc<kMathRegs>();
        math_role<kKind, kGate, To>(s, a, rank);
    }
    ptx::cluster_sync(); /* the other block's arrivals and copies come here until it is done */
}

/* A tensor [rows, columns], or one for each group, to the copy engine. */
inline am_tensor view(const void *data, int64_t outer, int64_t outer_stride, int64_t middle, int64_t middle_stride,
                      int64_t inner)
{
    am_tensor t = {};
    t.data = const_cast<void *>(data);
    t.dtype = AM_BF16;
    t.ndim = 3;
    t.shape[0] = outer, t.shape[1] = middle, t.shape[2] = inner;
    t.stride[0] = outer_stride, t.stride[1] = middle_stride, t.stride[2] = 1;
    return t;
}

template <MoeKind kKind, bool kGate, class To> am_status launch(const MoeProduct *p, cudaStream_t stream)
{
    constexpr size_t kSmem = sizeof(Smem<kKind, kGate>) + 1024;
    static_assert(kSmem <= 232448, "227 KiB of shared memory");
    static_assert(kLoadRegs + 2 * kMathRegs <= 3 * (65536 / kThreads / 8 * 8), "the block's registers");
    Args args = {};
    const int64_t group = p->b_group > 0 ? p->b_group : p->ldb; /* of one group alone any stride will do */
    int sms = 0;
    args.p = *p;
    args.row_pairs = static_cast<int>((p->m + kBlocks * kM - 1) / (kBlocks * kM));
    args.columns = static_cast<int>(kGate ? (p->n / 2 + kN / 2 - 1) / (kN / 2) : (p->n + kN - 1) / kN);
    const am_tensor a = view(p->a, p->rows, p->lda, 1, p->lda, kKind == MOE_TN ? p->m : p->k);
    const am_tensor b = kKind == MOE_TN   ? view(p->b, p->rows, p->ldb, 1, p->ldb, p->n)
                        : kKind == MOE_NT ? view(p->b, p->groups, group, p->n, p->ldb, p->k)
                                          : view(p->b, p->groups, group, p->k, p->ldb, p->n);
    if (Smem<kKind, kGate>::kSends) {
        const am_tensor c = view(p->c, p->rows, p->ldc, 1, p->ldc, p->n);
        AM_TRY(tensor_map_of(&args.c, &c, kBoxRows, 1));
    }
    AM_TRY(multiprocessors(&sms));
    AM_TRY(tensor_map_of(&args.a, &a, kKind == MOE_TN ? kK : kM, 1));
    AM_TRY(tensor_map_of(&args.b, &b, kKind == MOE_TN ? kK : 1, kKind == MOE_NT ? kN / 2 : kKind == MOE_NN ? kK : 1));
    AM_CUDA(cudaFuncSetAttribute(moe_product_sm90_kernel<kKind, kGate, To>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 kSmem));
    moe_product_sm90_kernel<kKind, kGate, To>
        <<<static_cast<unsigned>(sms / kBlocks * kBlocks), kThreads, kSmem, stream>>>(args);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

} // namespace moe_sm90

#endif
