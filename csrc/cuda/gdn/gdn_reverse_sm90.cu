/* gdn_reverse_sm90.cu -- the gradients of a segment's states and of R, chunk after chunk from the last.
 *
 * As gdn_fwd_sm90.cu, a pair of blocks for each document and value head, dS^T in registers:
 *   Y = dO^T P                              X = dS^T k^T                  dS -> memory, bf16
 *   U = X exp(c_last - c) / |k| + Y         dR^T = U T -> memory
 *   dS = dS exp(c_last) + (dO^T scale exp(c) / |q|) q - (dR^T beta exp(c) / |k|) k
 *
 * Rows of every tile behind the document are zeroed: here they are summed over. Where all decays of a chunk are next to
 * nothing, dS is summed at 2^64 times its size, as bfloat16 has few bits of numbers that small.
 *
 * 1,024 cycles of the tensor cores a chunk and block, as forward. Bytes a chunk and head: 48 KB out, 40 and k, q
 * in; 2.9 GB for 32K tokens, 0.7 ms. Measured on an H200: 0.25 ms for a segment of 8K tokens, 1.02 for 32K, the chain
 * of one document's chunks as in forward; the product with q in front of U T instead of behind it took the same.
 */
#include "gdn_bwd_sm90.cuh"
#include "gdn_scan_sm90.cuh"

namespace
{

using namespace gdn_sm90;

struct Smem {
    alignas(1024) char k[kStages][2 * kTileBytes];
    alignas(1024) char p[kStages][kTileBytes];
    alignas(1024) char dout[kStages][kTileBytes]; /* dR takes its place */
    alignas(1024) char q[2 * kTileBytes];
    alignas(1024) char t[kStages][kTileBytes];
    alignas(128) float4 numbers[kStages][kChunk], more[kStages][kChunk];
    uint64_t full[kStages], empty[kStages];
    uint64_t q_full, q_empty;
};

struct Args {
    CUtensorMap q, k, dout, t, p;
    Call call;
    Backward b;
};

/* The segment's documents, as pairs of blocks take them, with their chunks of the segment. */
template <class Each> __device__ __forceinline__ void for_documents(const Call &p, const Each &each)
{
    const gdn::Range docs = gdn::documents_of(p);
    const int64_t items = (docs.last - docs.first) * p.value_heads;
    for (int64_t item = blockIdx.x / kPair; item < items; item += gridDim.x / kPair) {
        Work w;
        w.doc = docs.first + item / p.value_heads;
        w.start = p.start(w.doc);
        w.end = p.end(w.doc);
        w.chunks = gdn::pieces(w.end - w.start, kChunk);
        w.head = static_cast<int>(item % p.value_heads);
        w.key_head = w.head / p.group;
        w.half = static_cast<int>(blockIdx.x % kPair);
        const gdn::Range own = gdn::chunks_of(p, w.start, w.end);
        if (own.first < own.last || w.chunks == 0)
            each(w, own);
    }
}

__device__ void load_role(Smem &s, const Args &a)
{
    uint32_t count = 0;
    for_documents(a.call, [&](const Work &w, const gdn::Range &chunks) {
        for (int64_t c = chunks.last - 1; c >= chunks.first; c--, count++) {
            const int slot = static_cast<int>(count % kStages), half = w.half;
            const int token = static_cast<int>(w.start + c * kChunk), own = token - static_cast<int>(a.call.low);
            const int64_t number = w.head * a.b.made.stride + own;
            ptx::mbarrier_wait(&s.empty[slot], count / kStages % 2 ^ 1);
            ptx::mbarrier_arrive_expect_tx(&s.full[slot], 5 * kTileBytes + 2 * sizeof s.numbers[slot]);
            ptx::tma_load_3d(s.dout[slot], &a.dout, &s.full[slot], 64 * half, w.head, token);
            if (half == 0)
                ptx::tma_load_3d_multicast(s.p[slot], &a.p, &s.full[slot], 0, w.head, own, kBoth);
            ptx::tma_load_3d_multicast(s.k[slot] + half * kTileBytes, &a.k, &s.full[slot], 64 * half, w.key_head, token,
                                       kBoth);
            ptx::bulk_load(s.numbers[slot], a.b.made.numbers + number, sizeof s.numbers[slot], &s.full[slot]);
            ptx::bulk_load(s.more[slot], a.b.made.more + number, sizeof s.more[slot], &s.full[slot]);
            if (half == 1)
                ptx::tma_load_3d_multicast(s.t[slot], &a.t, &s.full[slot], 0, w.head, own, kBoth);
            ptx::mbarrier_wait(&s.q_empty, count % 2 ^ 1);
            ptx::mbarrier_arrive_expect_tx(&s.q_full, 2 * kTileBytes);
            ptx::tma_load_3d_multicast(s.q + half * kTileBytes, &a.q, &s.q_full, 64 * half, w.key_head, token, kBoth);
        }
    });
}

constexpr float kSmall = 0x1p-64f; /* what all decays of a chunk may be below: bf16 would have few bits left of them */

__device__ void clear_tails(Smem &s, int slot, int n)
{
    char *const tiles[] = {s.k[slot],   s.k[slot] + kTileBytes, s.q, s.q + kTileBytes, s.p[slot], s.t[slot],
                           s.dout[slot]};
    for (char *tile : tiles)
        clear_tail(tile, n);
    clear_tail(s.numbers[slot], n);
    clear_tail(s.more[slot], n);
    end_clearing();
}

/* dO^T as the left operand; with kScaled times scale exp(c) / |q| and `more`. */
template <bool kScaled>
__device__ __forceinline__ void load_rows(uint32_t (&to)[4][4], char *tile, const float4 *numbers, float more)
{
    const int column = static_cast<int>(threadIdx.x % 4) * 2;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        ptx::ldmatrix_x4_trans(to[j], blocks_of(tile, 2 * j));
#pragma unroll
        for (int m = 0; m < 4 && kScaled; m++) {
            const int at = 8 * (2 * j + m / 2) + column;
            to[j][m] = pack(numbers[at].z * more * __uint_as_float(to[j][m] << 16),
                            numbers[at + 1].z * more * __uint_as_float(to[j][m] & 0xffff0000u));
        }
    }
}

/* The order of waits and products is the kernel, so it is read in one piece. */
__device__ void math_role(Smem &s, const Args &a) /* lint: allow length */
{
    const Call &p = a.call;
    const int column = static_cast<int>(threadIdx.x % 4) * 2;
    uint32_t count = 0;
    for_documents(p, [&](const Work &w, const gdn::Range &chunks) {
        float state[64];
        load_state(state, w, chunks.last == w.chunks ? p.dfinal.at(w.doc, w.head) : p.into_segment(0, w.head));
        for (int64_t c = chunks.last - 1; c >= chunks.first; c--, count++) {
            const int slot = uniform(static_cast<int>(count % kStages));
            const int64_t token = w.start + c * kChunk, own = token - p.low;
            const int n = static_cast<int>(gdn::least(w.end - token, kChunk));
            const float4 *const numbers = s.numbers[slot], *const more = s.more[slot];
            uint32_t left[8][4], rows[4][4], scaled[4][4];
            float x[32], y[32];
            pack(left, state);
            if (c + 1 < w.chunks)
                store_packed(left, w, a.b.ds + ((own / kChunk + 1) * p.value_heads + w.head) * kDim * kDim);
            ptx::mbarrier_wait(&s.full[slot], count / kStages % 2);
            if (n < kChunk) {
                ptx::mbarrier_wait(&s.q_full, count % 2);
                clear_tails(s, slot, n);
            }
            const float up = numbers[0].w < kSmall ? 1.0f / kSmall : 1.0f, last_decay = numbers[n - 1].w * up;
#pragma unroll
            for (int i = 0; i < 64; i++)
                state[i] *= last_decay;
            ptx::wgmma_fence();
            times_rows<8>(x, left, descriptor_low(s.k[slot]), false);
            load_rows<false>(rows, s.dout[slot], numbers, 1.0f);
            ptx::wgmma_fence();
            times_square(y, rows, descriptor_low(s.p[slot]));
            ptx::wgmma_wait_group<0>();
#pragma unroll
            for (int i = 0; i < 32; i++)
                y[i] = fmaf(x[i], numbers[column + i / 4 * 8 + i % 2].y, y[i]);
            pack(rows, y);
            ptx::wgmma_fence();
            times_square(x, rows, descriptor_low(s.t[slot]));
            ptx::mbarrier_wait(&s.q_full, count % 2);
            load_rows<true>(scaled, s.dout[slot], numbers, up);
            ptx::wgmma_fence();
            times_columns(state, scaled, descriptor_low(s.q));
            ptx::wgmma_wait_group<1>();
            uint32_t made[4][4];
            pack(made, x);
#pragma unroll
            for (int i = 0; i < 32; i++) {
                const int at = column + i / 4 * 8 + i % 2;
                x[i] *= -more[at].x * (numbers[at].x * up);
            }
            pack(rows, x);
            ptx::wgmma_fence();
            times_columns(state, rows, descriptor_low(s.k[slot]));
            ptx::wgmma_wait_group<1>();
            release(&s.q_empty);
            store_rows(a.b.dr + (own * p.value_heads + w.head) * kDim + 64 * w.half, p.value_heads * kDim, made,
                       s.dout[slot], n);
            ptx::wgmma_wait_group<0>();
            if (up != 1.0f)
#pragma unroll
                for (int i = 0; i < 64; i++)
                    state[i] *= kSmall;
            release(&s.empty[slot]);
        }
        if (chunks.first > 0)
            store_state(state, w, p.into_segment(-1, w.head));
        else if (p.dinitial.data != nullptr)
            store_state(state, w, p.dinitial.at(w.doc, w.head));
    });
}

__global__ void __cluster_dims__(kPair, 1, 1) __launch_bounds__(kThreads, 2)
    gdn_reverse_sm90_kernel(const __grid_constant__ Args a)
{
    extern __shared__ char raw[];
    Smem &s = *reinterpret_cast<Smem *>(raw + (1024 - ptx::smem_address(raw) % 1024) % 1024);
    if (threadIdx.x == 0) {
        uint64_t *const empty[] = {&s.empty[0], &s.empty[1], &s.q_empty};
        uint64_t *const full[] = {&s.full[0], &s.full[1], &s.q_full};
        for (int i = 0; i < 3; i++) {
            ptx::mbarrier_init(full[i], 1);
            ptx::mbarrier_init(empty[i], 4 * kPair);
        }
        ptx::fence_mbarrier_init();
    }
    ptx::cluster_sync();
    if (threadIdx.x < 128) {
        ptx::setmaxnreg_dec<40>();
        if (threadIdx.x == 0)
            load_role(s, a);
    } else {
        ptx::setmaxnreg_inc<216>();
        math_role(s, a);
    }
    __syncwarp();
    ptx::cluster_sync();
}

} // namespace

am_status gdn_sm90::reverse(const am_gdn_args *a, const Call &p, const Backward &b, cudaStream_t stream)
{
    constexpr size_t kSmem = sizeof(Smem) + 1024;
    static_assert(2 * (kSmem + 1024) <= 233472, "two blocks' shared memory");
    Args args = {};
    int sms = 0;
    args.call = p;
    args.b = b;
    AM_TRY(multiprocessors(&sms));
    const am_tensor t = dense(b.made.t, b.tokens, p.value_heads, kChunk),
                    square = dense(b.made.p, b.tokens, p.value_heads, kChunk);
    AM_TRY(tensor_map_of(&args.q, &a->q, kChunk, 1));
    AM_TRY(tensor_map_of(&args.k, &a->k, kChunk, 1));
    AM_TRY(tensor_map_of(&args.dout, &a->dout, kChunk, 1));
    AM_TRY(tensor_map_of(&args.t, &t, kChunk, 1));
    AM_TRY(tensor_map_of(&args.p, &square, kChunk, 1));
    AM_CUDA(cudaFuncSetAttribute(gdn_reverse_sm90_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem));
    const int64_t items = p.n_docs * p.value_heads, most = 16 * sms;
    gdn_reverse_sm90_kernel<<<static_cast<unsigned>(kPair * (items < most ? items : most)), kThreads, kSmem, stream>>>(
        args);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}
