/* gdn_gradients_sm90.cu -- all gradients of a chunk from the states before it and the gradients of those after it.
 *
 * A block has a chunk and key head and goes through its value heads; dq and dk stay in registers over them. With
 * D[i, j] = exp(c_i - c_j), M = dO V'^T, N = dR V'^T, every product a wgmma of 64 rows by one warpgroup:
 *
 *   warpgroup 0   dq += exp(c) dO S^T + (M D / |k|) k                                 sums of M P over rows and columns
 *   warpgroup 1   dk += exp(c_last - c) V' dS^T + (M^T D scale / |q|) q - (N^T D beta / |k|) k        the sum of S dS
 *   warpgroup 2   dk -= beta exp(c) dR S^T + (beta N D / |k|) k     dv = beta dR      sums of N A over rows and columns
 *   a warp of 1    dg_t: what c_i receives, summed over i >= t in float64
 *
 * S and dS of the next value head come while the small products run, its rows a head ahead of that, over the end of a
 * chunk too; a chunk's keys and first states come at its start. The sum of S dS is the diagonal of a product.
 *
 * Bytes a chunk and value head: 64 KB of states, 72 KB of rows and v, 16 KB of dv out: 5.0 GB for 32K tokens of 64
 * heads, 1.2 ms. 4,350 cycles of the tensor cores, 0.63 ms. Measured on an H200: 0.50 ms for a segment of 8K
 * tokens, 2.0 for 32K: 14,000 cycles a head, in which each scheduler issues some 4,300 instructions of its three warps.
 * The sum of S dS in warpgroup 0, and products issued while those before are worked on, made no difference (2.05).
 */
#include "gdn_gradients_sm90.cuh"

namespace
{

using namespace gdn_gradients;

/* Products of a warpgroup. */

/* sums = A S^T, A rows of 128 values, S [values, 64 keys]. */
__device__ __forceinline__ void times_state(float (&sums)[32], const char *rows, const char *state)
{
    const uint32_t a = descriptor_low(rows), b = descriptor_low(state);
    ptx::wgmma_fence();
#pragma unroll
    for (int d = 0; d < 8; d++)
        ptx::wgmma_m64n64k16_bf16_st(sums, descriptor(a + d / 4 * (kTileBytes >> 4) + d % 4 * 2),
                                     descriptor(b + d * (2048 >> 4)), d > 0);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
}

/* sums = A B^T, both rows of 128. */
__device__ __forceinline__ void times_rows_of(float (&sums)[32], const char *left, const char *right)
{
    const uint32_t a = descriptor_low(left), b = descriptor_low(right);
    ptx::wgmma_fence();
#pragma unroll
    for (int d = 0; d < 8; d++)
        ptx::wgmma_m64n64k16_bf16_ss(sums, descriptor(a + d / 4 * (kTileBytes >> 4) + d % 4 * 2),
                                     descriptor(b + d / 4 * (kTileBytes >> 4) + d % 4 * 2), d > 0);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
}

/* sums += A B, A of 64 x 64 in registers. */
__device__ __forceinline__ void add_product(float (&sums)[64], const float (&a)[32], const char *rows)
{
    uint32_t left[4][4];
    pack(left, a);
    ptx::wgmma_fence();
    times_columns(sums, left, descriptor_low(rows));
    ptx::wgmma_wait_group<0>();
}

/* The thread's place in its warpgroup's 64 rows: rows row and row + 8, columns 8 j + column and the next. */
struct Lane {
    int row, column, warp;
    __device__ Lane()
    {
        const int me = static_cast<int>(threadIdx.x % 128);
        warp = me / 32;
        row = warp * 16 + me % 32 / 4;
        column = me % 4 * 2;
    }
};

/* Two neighbouring elements of rows of 64 or 128. */
__device__ __forceinline__ float2 two_of(char *tiles, int row, int column)
{
    const uint32_t word = *reinterpret_cast<const uint32_t *>(
        piece_of(tiles + column / 64 * kTileBytes, row, column % 64 / 8) + column % 8 * 2);
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}

__device__ __forceinline__ float quad_sum(float x)
{
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

/* With H = A S^T: sums += factor[r] H; dots[r] = rows of `with` times those of H. */
__device__ __forceinline__ void add_state(float (&sums)[64], const char *rows, const char *state,
                                          const float (&factor)[2], char *with, const Lane &l, float (&dots)[2])
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float h[32];
        times_state(h, rows, state + half * kStateTile);
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const int i = 4 * j + 2 * r;
                const float2 x = two_of(with, l.row + 8 * r, 64 * half + 8 * j + l.column);
                dots[r] = fmaf(x.x, h[i], fmaf(x.y, h[i + 1], dots[r]));
                sums[32 * half + i] = fmaf(factor[r], h[i], sums[32 * half + i]);
                sums[32 * half + i + 1] = fmaf(factor[r], h[i + 1], sums[32 * half + i + 1]);
            }
    }
    dots[0] = quad_sum(dots[0]);
    dots[1] = quad_sum(dots[1]);
}

/* Sums over the warp's 16 rows of a lane's eight columns, from 8 by 8 ones on, to `to`: lanes trade halves of what is
 * left. */
__device__ __forceinline__ void store_columns(float *to, float (&sums)[8], int first, const Lane &l)
{
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int step = 16, half = 4; step >= 4; step /= 2, half /= 2) {
        const bool upper = lane & step;
#pragma unroll
        for (int i = 0; i < half; i++) {
            const float other = __shfl_xor_sync(0xffffffffu, upper ? sums[i] : sums[i + half], step);
            sums[i] = (upper ? sums[i + half] : sums[i]) + other;
        }
    }
    to[8 * (first + (lane & 16) / 8 + (lane & 8) / 8) + l.column + (lane & 4) / 4] = sums[0];
}

/* The sum of S dS, its part of each warp: the diagonal of values times values. */
__device__ __forceinline__ void store_whole(float *to, const char *s, const char *ds, const Lane &l)
{
    const uint32_t a = descriptor_low(s), b = descriptor_low(ds);
    float sums[32], sum = 0.0f;
    ptx::wgmma_fence();
#pragma unroll
    for (int d = 0; d < 16; d++) {
        const uint32_t step = d / 8 * (kTileBytes >> 4) + d / 4 % 2 * (kStateTile >> 4) + d % 4 * 2;
        ptx::wgmma_m64n64k16_bf16_ss(sums, descriptor(a + step), descriptor(b + step), d > 0);
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const int row = l.row + i / 2 % 2 * 8, column = i / 4 * 8 + l.column + i % 2;
        sum += row == column ? sums[i] : 0.0f;
    }
    for (int step = 16; step > 0; step /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (threadIdx.x % 32 == 0)
        to[l.warp] = sum;
}

/* The derivative of factor x / |x|, sums being that by the result, for rows below n. */
__device__ __forceinline__ void store_units(const Call &p, const gdn::View &v, const Item &x, const float (&sums)[64],
                                            char *rows, const float (&inverse)[2], float factor, const Lane &l)
{
    __nv_bfloat16 *const base = static_cast<__nv_bfloat16 *>(v.data) + x.token * v.token + x.key_head * v.head;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = l.row + 8 * r;
        float along = 0.0f;
#pragma unroll
        for (int j = 0; j < 16; j++) {
            const float2 y = two_of(rows, row, 8 * j + l.column);
            along = fmaf(y.x, sums[4 * j + 2 * r], fmaf(y.y, sums[4 * j + 2 * r + 1], along));
        }
        along = p.l2norm ? quad_sum(along) * inverse[r] * inverse[r] : 0.0f;
        const float scale = inverse[r] * factor;
#pragma unroll
        for (int m = 0; m < 4; m++) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int j = 4 * m + i;
                const float2 y = two_of(rows, row, 8 * j + l.column);
                words[i] = pack(scale * fmaf(-along, y.x, sums[4 * j + 2 * r]),
                                scale * fmaf(-along, y.y, sums[4 * j + 2 * r + 1]));
            }
            const uint4 whole = turn(words[0], words[1], words[2], words[3]);
            if (row < x.n)
                __stwb(reinterpret_cast<uint4 *>(base + row * v.token + 32 * m + 4 * l.column), whole);
        }
    }
}

/* Warpgroup 0: dq. */
__device__ void query_role(Smem &s, const Args &a)
{
    const Call &p = a.call;
    const Lane l;
    Phases at;
    while (const Item *const found = begin_chunk(s, a, at)) {
        const Item &x = *found;
        float dq[64] = {}, inverse[2] = {};
        for (int h = 0; h < p.group; h++) {
            const uint32_t slot = at.slot();
            Rows &rows = s.rows[slot];
            float row[2] = {}, sum[2] = {}, m[32];
            begin_head(s, p, x, x.key_head * p.group + h, at);
            if (x.has_s) {
                const float e[2] = {rows.numbers[l.row].w, rows.numbers[l.row + 8].w};
                add_state(dq, rows.dout, s.s, e, s.q, l, row);
            }
            end_states(s, a, x, h, at);
            times_rows_of(m, rows.dout, rows.v);
            const float c[2] = {rows.more[l.row].w, rows.more[l.row + 8].w};
            const int ahead = l.row - l.column;
#pragma unroll
            for (int half = 0; half < 8; half += 4) {
                float column[8] = {};
#pragma unroll
                for (int j = half; j < half + 4; j++) {
                    const float k[2] = {rows.more[8 * j + l.column].z, rows.more[8 * j + l.column + 1].z};
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        const float2 two = two_of(rows.p, l.row + 8 * r, 8 * j + l.column);
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            float &y = m[4 * j + 2 * r + e];
                            const float product = y * (e == 0 ? two.x : two.y);
                            const float made = y * ptx::ex2_approx(c[r] - k[e]);
                            sum[r] += product;
                            column[2 * (j - half) + e] += product;
                            y = 8 * (j - r) + e <= ahead ? made : 0.0f;
                        }
                    }
                }
                store_columns(s.columns[slot][0][l.warp], column, half, l);
            }
            add_product(dq, m, s.k);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int i = l.row + 8 * r;
                const float all = quad_sum(sum[r]) + row[r] * rows.numbers[i].z;
                inverse[r] = p.scale != 0.0f ? rows.more[i].y / p.scale : 0.0f;
                if (l.column == 0)
                    s.sums[slot][kQueryRows][i] = all;
            }
            end_head(s, a, x, h, at);
        }
        store_units(p, p.dq, x, dq, s.q, inverse, p.scale, l);
    }
}

/* dk += A^T B of a chunk's rows i and j <= i (kKeys: j < i): A V'^T, decays from j to i and a factor of i, with B. */
template <bool kOfKeys>
__device__ __forceinline__ void add_columns(float (&dk)[64], const Rows &rows, const char *left, const char *right,
                                            const Lane &l)
{
    float m[32];
    times_rows_of(m, rows.v, left);
    const float c[2] = {rows.more[l.row].w, rows.more[l.row + 8].w};
    const int behind = l.row - l.column;
#pragma unroll
    for (int k = 0; k < 16; k++) {
        const int i = k / 2 * 8 + k % 2;
        const float4 of = rows.more[i + l.column];
        const float from = kOfKeys ? 2.0f * of.w - of.z : of.w, factor = kOfKeys ? -of.x : of.y;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float &y = m[k / 2 * 4 + 2 * r + k % 2];
            const float made = y * (factor * ptx::ex2_approx(from - c[r]));
            y = (kOfKeys ? i - 8 * r > behind : i - 8 * r >= behind) ? made : 0.0f;
        }
    }
    add_product(dk, m, right);
}

/* Warpgroup 1: the columns' part of dk, and all of it at the end; what a whole state leaves to the gates. */
__device__ void column_role(Smem &s, const Args &a)
{
    const Call &p = a.call;
    const Lane l;
    Phases at;
    while (const Item *const found = begin_chunk<true>(s, a, at)) {
        const Item &x = *found;
        float dk[64] = {}, inverse[2] = {};
        for (int h = 0; h < p.group; h++) {
            const uint32_t slot = at.slot();
            Rows &rows = s.rows[slot];
            float dots[2] = {};
            begin_head(s, p, x, x.key_head * p.group + h, at);
            if (threadIdx.x % 32 == 0 && !(x.has_s && x.has_ds))
                s.whole[slot][l.warp] = 0.0f;
            if (x.has_ds) {
                if (x.has_s)
                    store_whole(s.whole[slot], s.s, s.ds, l);
                const float last = rows.more[x.n - 1].w;
                const float f[2] = {ptx::ex2_approx(last - rows.more[l.row].w),
                                    ptx::ex2_approx(last - rows.more[l.row + 8].w)};
                add_state(dk, rows.v, s.ds, f, s.k, l, dots);
            }
            end_states<true>(s, a, x, h, at);
            add_columns<false>(dk, rows, rows.dout, s.q, l);
            add_columns<true>(dk, rows, rows.dr, s.k, l);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int j = l.row + 8 * r;
                inverse[r] = ptx::ex2_approx(rows.more[j].w - rows.more[j].z);
                if (l.column == 0)
                    s.sums[slot][kAfter][j] = dots[r] * rows.numbers[j].y;
            }
            end_head<true>(s, a, x, h, at);
        }
        ptx::bar_sync(kKeys, 256);
        const float *const other = reinterpret_cast<const float *>(s.s);
#pragma unroll
        for (int i = 0; i < 64; i++)
            dk[i] += other[(l.row + i / 2 % 2 * 8) * (kDim + 2) + i / 4 * 8 + l.column + i % 2];
        store_units(p, p.dk, x, dk, s.k, inverse, 1.0f, l);
    }
}

/* A head's rows of v on their way to L2, 128 bytes a thread. */
__device__ __forceinline__ void prefetch_values(const Call &p, const Item &x, int head)
{
    const int me = static_cast<int>(threadIdx.x % 128), row = me / 2;
    if (row < x.n)
        ptx::prefetch_l2(static_cast<const __nv_bfloat16 *>(p.v.data) + (x.token + row) * p.v.token + head * p.v.head +
                         me % 2 * 64);
}

/* A thread's two rows of v: a quad has a row, 64 bytes at a time. */
struct Values {
    uint4 words[2][4];
};

__device__ __forceinline__ void load_values(Values &to, const Call &p, const Item &x, int head)
{
    const int me = static_cast<int>(threadIdx.x % 128);
    const __nv_bfloat16 *const base =
        static_cast<const __nv_bfloat16 *>(p.v.data) + x.token * p.v.token + head * p.v.head + me % 4 * 8;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = me / 4 + 32 * r;
#pragma unroll
        for (int m = 0; m < 4; m++)
            to.words[r][m] =
                row < x.n ? __ldg(reinterpret_cast<const uint4 *>(base + row * p.v.token + 32 * m)) : uint4{};
    }
}

/* dv = beta dR, and dR . v. */
__device__ __forceinline__ void finish_values(Smem &s, const Call &p, const Item &x, const Values &v, int head,
                                              uint32_t slot)
{
    Rows &rows = s.rows[slot];
    const int me = static_cast<int>(threadIdx.x % 128);
    __nv_bfloat16 *const base =
        static_cast<__nv_bfloat16 *>(p.dv.data) + x.token * p.dv.token + head * p.dv.head + me % 4 * 8;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = me / 4 + 32 * r;
        const float beta = rows.more[row].x;
        float sum = 0.0f;
#pragma unroll
        for (int m = 0; m < 4; m++) {
            const uint4 left =
                *reinterpret_cast<const uint4 *>(piece_of(rows.dr + m / 2 * kTileBytes, row, m % 2 * 4 + me % 4));
            const uint32_t a[4] = {left.x, left.y, left.z, left.w};
            const uint32_t b[4] = {v.words[r][m].x, v.words[r][m].y, v.words[r][m].z, v.words[r][m].w};
            uint32_t made[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float low = __uint_as_float(a[j] << 16), high = __uint_as_float(a[j] & 0xffff0000u);
                sum = fmaf(low, __uint_as_float(b[j] << 16), fmaf(high, __uint_as_float(b[j] & 0xffff0000u), sum));
                made[j] = pack(beta * low, beta * high);
            }
            if (row < x.n)
                __stwb(reinterpret_cast<uint4 *>(base + row * p.dv.token + 32 * m),
                       make_uint4(made[0], made[1], made[2], made[3]));
        }
        sum = quad_sum(sum);
        if (me % 4 == 0)
            s.sums[slot][kValue][row] = sum;
    }
}

/* Warpgroup 2: the rows' part of dk, dv and dbeta. What lives when decides the registers: read in one piece. */
__device__ void row_role(Smem &s, const Args &a) /* lint: allow length */
{
    const Call &p = a.call;
    const Lane l;
    Phases at;
    while (const Item *const found = begin_chunk(s, a, at)) {
        const Item &x = *found;
        float dk[64] = {};
        for (int h = 0; h < p.group; h++) {
            const int head = x.key_head * p.group + h;
            const uint32_t slot = at.slot();
            Rows &rows = s.rows[slot];
            float (&to)[kChunk] = s.sums[slot][kBeta];
            float row[2] = {}, sum[2] = {}, kk[32], n[32];
            Values v;
            prefetch_values(p, x, head);
            begin_head(s, p, x, head, at);
            if (x.has_s) {
                const float e[2] = {-rows.more[l.row].x * rows.numbers[l.row].w,
                                    -rows.more[l.row + 8].x * rows.numbers[l.row + 8].w};
                add_state(dk, rows.dr, s.s, e, s.k, l, row);
            }
            if (l.column == 0)
                for (int r = 0; r < 2; r++)
                    to[l.row + 8 * r] = row[r] * rows.numbers[l.row + 8 * r].x;
            end_states(s, a, x, h, at);
            times_rows_of(kk, s.k, s.k);
            times_rows_of(n, rows.dr, rows.v);
            const float c[2] = {rows.more[l.row].w, rows.more[l.row + 8].w};
            const float beta[2] = {-rows.more[l.row].x, -rows.more[l.row + 8].x};
            const float both[2] = {beta[0] * ptx::ex2_approx(c[0] - rows.more[l.row].z),
                                   beta[1] * ptx::ex2_approx(c[1] - rows.more[l.row + 8].z)};
            const int ahead = l.row - l.column;
#pragma unroll
            for (int half = 0; half < 16; half += 8) {
                float column[8] = {};
#pragma unroll
                for (int j = half; j < half + 8; j++) {
                    const float from = rows.more[j / 2 * 8 + l.column + j % 2].z;
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        const int place = j / 2 * 4 + 2 * r + j % 2;
                        const float made = n[place] * ptx::ex2_approx(c[r] - from);
                        const float seen = (j / 2 - r) * 8 + j % 2 < ahead ? made : 0.0f, product = seen * kk[place];
                        sum[r] += product;
                        column[j - half] = fmaf(both[r], product, column[j - half]);
                        n[place] = beta[r] * seen;
                    }
                }
                store_columns(s.columns[slot][1][l.warp], column, half / 2, l);
            }
            add_product(dk, n, s.k);
            load_values(v, p, x, head);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int i = l.row + 8 * r;
                const float all = -ptx::ex2_approx(rows.more[i].w - rows.more[i].z) * quad_sum(sum[r]) - to[i];
                if (l.column == 0) {
                    to[i] = all;
                    s.sums[slot][kKeyRows][i] = rows.more[i].x * all;
                }
            }
            finish_values(s, p, x, v, head, slot);
            end_head(s, a, x, h, at);
        }
        float *const other = reinterpret_cast<float *>(s.s);
#pragma unroll
        for (int i = 0; i < 64; i++)
            other[(l.row + i / 2 % 2 * 8) * (kDim + 2) + i / 4 * 8 + l.column + i % 2] = dk[i];
        ptx::bar_sync(kKeys, 256);
    }
}

__global__ void __launch_bounds__(kThreads, 1) gdn_gradients_sm90_kernel(const __grid_constant__ Args a)
{
    extern __shared__ char raw[];
    Smem &s = *reinterpret_cast<Smem *>(raw + (1024 - ptx::smem_address(raw) % 1024) % 1024);
    if (threadIdx.x == 0) {
        uint64_t *const full[] = {&s.keys_full, &s.s_full, &s.ds_full, &s.rows_full[0], &s.rows_full[1]};
        for (uint64_t *bar : full)
            ptx::mbarrier_init(bar, 1);
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x == kLeader)
        begin(s, a);
    if (threadIdx.x < 128)
        query_role(s, a);
    else if (threadIdx.x < 256)
        column_role(s, a);
    else
        row_role(s, a);
}

am_status launch_segments(const am_gdn_args *a, Call p, const Backward &b, cudaStream_t stream)
{
    const int64_t tokens = a->q.shape[0], segments = (tokens + gdn::kSegment - 1) / gdn::kSegment;
    for (int64_t i = segments - 1; i >= 0; i--) {
        p.low = i * gdn::kSegment;
        p.high = i + 1 < segments ? p.low + gdn::kSegment : INT64_MAX;
        AM_TRY(gdn_sm90::prepare(p, b.made, b.tokens, stream));
        if (a->part != AM_GDN_EARLY)
            AM_TRY(gdn_sm90::repeat(a, p, b, stream));
        AM_TRY(gdn_sm90::reverse(a, p, b, stream));
        if (a->part != AM_GDN_EARLY)
            AM_TRY(gdn_sm90::gradients(a, p, b, stream));
    }
    return AM_OK;
}

} // namespace

am_status gdn_sm90::gradients(const am_gdn_args *a, const Call &p, const Backward &b, cudaStream_t stream)
{
    constexpr size_t kSmem = sizeof(Smem) + 1024;
    static_assert(kSmem <= 232448, "227 KiB of shared memory");
    static_assert(sizeof(Rows) % 1024 == 0, "tiles start on a swizzle's period");
    Args args = {};
    int sms = 0;
    args.call = p;
    args.b = b;
    AM_TRY(multiprocessors(&sms));
    const am_tensor dr = dense(b.dr, b.tokens, p.value_heads, kDim), v = dense(b.v_new, b.tokens, p.value_heads, kDim),
                    square = dense(b.made.p, b.tokens, p.value_heads, kChunk),
                    s = dense(b.s, b.places * p.value_heads * kDim, 1, kDim),
                    ds = dense(b.ds, b.places * p.value_heads * kDim, 1, kDim);
    AM_TRY(tensor_map_of(&args.q, &a->q, kChunk, 1));
    AM_TRY(tensor_map_of(&args.k, &a->k, kChunk, 1));
    AM_TRY(tensor_map_of(&args.dout, &a->dout, kChunk, 1));
    AM_TRY(tensor_map_of(&args.dr, &dr, kChunk, 1));
    AM_TRY(tensor_map_of(&args.v, &v, kChunk, 1));
    AM_TRY(tensor_map_of(&args.p, &square, kChunk, 1));
    AM_TRY(tensor_map_of(&args.s, &s, kDim, 1));
    AM_TRY(tensor_map_of(&args.ds, &ds, kDim, 1));
    AM_CUDA(cudaFuncSetAttribute(gdn_gradients_sm90_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem));
    gdn_gradients_sm90_kernel<<<static_cast<unsigned>(sms), kThreads, kSmem, stream>>>(args);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

bool gdn_backward_fits_sm90(const am_gdn_args *a)
{
    const auto fine = [](const am_tensor &t) { return t.dtype == AM_NONE || copyable(t); };
    return gdn_sm90::has_dims(a) && copyable(a->q) && copyable(a->k) && copyable(a->v) && fine(a->dout) &&
           fine(a->dq) && fine(a->dk) && fine(a->dv);
}

size_t gdn_backward_sm90_scratch(const am_gdn_args *a)
{
    gdn_sm90::Place place = {};
    if (!gdn_sm90::has_dims(a))
        return 0;
    place_backward(a, &place);
    return place.at + 128;
}

am_status gdn_backward_sm90(const am_gdn_args *a, cudaStream_t stream)
{
    gdn_sm90::Place place = {aligned(a->workspace), 0};
    const Backward b = place_backward(a, &place);
    Call p = gdn_call(a);
    p.carry = {b.carry, int64_t{p.value_heads} * kDim * kDim, kDim * kDim, kDim};
    AM_TRY(gdn_fill_gaps(a, true, stream));
    return p.n_docs == 0 ? AM_OK : launch_segments(a, p, b, stream);
}
