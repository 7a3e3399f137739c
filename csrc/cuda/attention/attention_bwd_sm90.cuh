/* attention_bwd_sm90.cuh -- the gradients of attention.h for 16-bit inputs on Hopper, the same bits every time: delta,
 * then dk and dv (attention_dkdv_sm90.cuh), then dq (attention_dq_sm90.cuh). S and dP are made twice: 14 D flops a
 * visible score where one pass with sums in another order every time would do with 10.
 */
#ifndef ATTENTION_BWD_SM90_CUH
#define ATTENTION_BWD_SM90_CUH

#include "attention_dkdv_sm90.cuh"
#include "attention_dq_sm90.cuh"

#include <math.h>

namespace attention_sm90
{

constexpr int kDeltaThreads = 256;

/* delta = rowsum(dout * out): a warp a row, 8 elements a lane and step. Floor: it reads both once. */
template <class E>
__global__ void __launch_bounds__(kDeltaThreads)
    attention_delta_sm90_kernel(AttentionView dout, AttentionView out, float *delta, int64_t rows, int64_t heads,
                                int dim)
{
    const int64_t step = static_cast<int64_t>(gridDim.x) * (kDeltaThreads / 32);
    const int lane = static_cast<int>(threadIdx.x % 32);
    for (int64_t r = static_cast<int64_t>(blockIdx.x) * (kDeltaThreads / 32) + threadIdx.x / 32; r < rows; r += step) {
        const int64_t token = r / heads, head = r % heads;
        const E *const x = static_cast<const E *>(dout.data) + token * dout.token + head * dout.head;
        const E *const y = static_cast<const E *>(out.data) + token * out.token + head * out.head;
        float sum = 0.0f;
        for (int d = 8 * lane; d < dim; d += 256) {
            const uint4 left = *reinterpret_cast<const uint4 *>(x + d), right = *reinterpret_cast<const uint4 *>(y + d);
            const E *const a = reinterpret_cast<const E *>(&left), *const b = reinterpret_cast<const E *>(&right);
#pragma unroll
            for (int i = 0; i < 8; i++)
                sum = fmaf(static_cast<float>(a[i]), static_cast<float>(b[i]), sum);
        }
#pragma unroll
        for (int i = 16; i > 0; i /= 2)
            sum += __shfl_xor_sync(0xffffffffu, sum, i);
        if (lane == 0)
            delta[r] = sum;
    }
}

inline bool copyable_or_absent(const am_tensor &t) { return t.dtype == AM_NONE || copyable(t); }

/* What the kernels take, of head dims from `least` to `most`. Outputs and dout are not there yet when a caller asks
 * which row will run. */
inline bool backward_fits(const am_attention_args *a, am_dtype dtype, int64_t least, int64_t most)
{
    const int64_t group = a->q.shape[1] / a->k.shape[1], dim = a->q.shape[2];
    return a->q.dtype == dtype && dim >= least && dim <= most && dim % 8 == 0 && group >= 1 && group <= 64 &&
           (group & (group - 1)) == 0 && copyable(a->q) && copyable(a->k) && copyable(a->v) &&
           copyable_or_absent(a->dout) && copyable_or_absent(a->out) && copyable_or_absent(a->dq) &&
           copyable_or_absent(a->dk) && copyable_or_absent(a->dv) &&
           a->q.shape[0] * group / RowTile<256>::kM + a->k.shape[0] / KeyTile<256, 1>::kKeys + a->docs.n <
               (1ll << 31) / a->k.shape[1];
}

template <class A> am_status fill_args(A *args, const am_attention_args *a, const AttentionScratch &s)
{
    const int64_t group = a->q.shape[1] / a->k.shape[1];
    args->lse = attention_view(a->lse);
    args->low = attention_view(a->lse_low);
    args->docs = attention_docs(a);
    args->next = s.next;
    args->delta = s.delta;
    args->heads = a->q.shape[1];
    args->key_heads = static_cast<uint32_t>(a->k.shape[1]);
    while (1 << args->group_shift < group)
        args->group_shift++;
    args->scale = static_cast<float>(a->scale);
    args->scale_log2 = static_cast<float>(a->scale * 1.4426950408889634);
    args->dim = static_cast<int>(a->q.shape[2]);
    args->causal = a->causal;
    return AM_OK;
}

template <class T, class E>
am_status launch_dkdv(const am_attention_args *a, const AttentionScratch &s, int sms, cudaStream_t stream)
{
    constexpr size_t kSmem = sizeof(KeySmem<T>) + 1024;
    static_assert(kSmem <= 232448, "227 KiB of shared memory");
    const uint32_t group = static_cast<uint32_t>(a->q.shape[1] / a->k.shape[1]);
    KeyArgs args = {};
    AM_TRY(fill_args(&args, a, s));
    AM_TRY(attention_place_tiles(a, true, T::kKeys * T::kCtas, s.first_k, s.next, stream));
    args.first = s.first_k;
    AM_TRY(tensor_map_of(&args.q, &a->q, T::kRows / group, group));
    AM_TRY(tensor_map_of(&args.dout, &a->dout, T::kRows / group, group));
    AM_TRY(tensor_map_of(&args.k, &a->k, T::kKeys, 1));
    AM_TRY(tensor_map_of(&args.v, &a->v, T::kKeys, 1));
    args.dk = attention_view(a->dk);
    args.dv = attention_view(a->dv);
    AM_CUDA(cudaFuncSetAttribute(attention_dkdv_sm90_kernel<T, E>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem));
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = T::kCtas;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(sms / T::kCtas * T::kCtas));
    config.blockDim = dim3(T::kThreads);
    config.dynamicSmemBytes = kSmem;
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = 1;
    AM_CUDA(cudaLaunchKernelEx(&config, attention_dkdv_sm90_kernel<T, E>, args));
    return AM_OK;
}

/* Whether pairs of key tiles, which read rows from L2 once, are faster: each waits for the other's slower warpgroup,
 * and a pair's second tile for rows that only its first sees. ms of the backward with pairs and without, 16 query heads
 * a key head of 256 on one H200: 128K 1,574 and 1,653; 32K 98.1 and 99.2; 8K 5.73 and 5.69; 4 of 8K 26.1 and 25.5; 32K
 * in uneven documents 7.22 and 6.97. Both give the same bits. */
inline bool pairs_pay(const am_attention_args *a)
{
    constexpr double kRows = 200000; /* of queries that a key is seen by, in the mean */
    const am_i64_array &of = a->docs_k.present ? a->docs_k : a->docs;
    double area = 0, keys = 0;
    for (int64_t d = 0; d + 1 < a->docs.n; d += 2) {
        const double nq = static_cast<double>(a->docs.data[d + 1] - a->docs.data[d]);
        const double nk = static_cast<double>(of.data[d + 1] - of.data[d]);
        const double hidden = !a->causal ? 0 : nk <= nq ? nk * nq - nk * nk / 2 : nq * nq / 2;
        area += nk * nq - hidden;
        keys += nk;
    }
    return area * static_cast<double>(a->q.shape[1] / a->k.shape[1]) >= kRows * keys && keys > 0;
}

template <int kD, class E, int kDepth>
am_status launch_dkdv(const am_attention_args *a, const AttentionScratch &s, int sms, cudaStream_t stream)
{
    if constexpr (kD == 256)
        if (pairs_pay(a) && sms > 1)
            return launch_dkdv<KeyTile<kD, 2>, E>(a, s, sms, stream);
    return launch_dkdv<KeyTile<kD, 1, kDepth>, E>(a, s, sms, stream);
}

template <int kD, class E, int kDepth>
am_status launch_dq(const am_attention_args *a, const AttentionScratch &s, int sms, cudaStream_t stream)
{
    using T = RowTile<kD, kDepth>;
    constexpr size_t kSmem = sizeof(RowSmem<T>) + 1024;
    static_assert(kSmem <= 232448, "227 KiB of shared memory");
    const uint32_t group = static_cast<uint32_t>(a->q.shape[1] / a->k.shape[1]);
    RowArgs args = {};
    AM_TRY(fill_args(&args, a, s));
    AM_TRY(attention_place_tiles(a, false, T::kM / group, s.first, s.next, stream));
    args.first = s.first;
    AM_TRY(tensor_map_of(&args.q, &a->q, T::kM / group, group));
    AM_TRY(tensor_map_of(&args.dout, &a->dout, T::kM / group, group));
    AM_TRY(tensor_map_of(&args.k, &a->k, T::kN, 1));
    AM_TRY(tensor_map_of(&args.v, &a->v, T::kN, 1));
    args.dq = attention_view(a->dq);
    AM_CUDA(cudaFuncSetAttribute(attention_dq_sm90_kernel<T, E>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem));
    attention_dq_sm90_kernel<T, E><<<sms, T::kThreads, kSmem, stream>>>(args);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

/* kD and kDepth: as of the forward pass's Tile. */
template <int kD, class E, int kDepth = kD> am_status launch_backward(const am_attention_args *a, cudaStream_t stream)
{
    const AttentionScratch s = attention_scratch(a, true);
    const int64_t rows = a->q.shape[0] * a->q.shape[1];
    int sms = 0;
    AM_TRY(multiprocessors(&sms));
    AM_TRY(attention_fill_gaps(a, true, stream));
    attention_delta_sm90_kernel<E><<<8 * sms, kDeltaThreads, 0, stream>>>(
        attention_view(a->dout), attention_view(a->out), s.delta, rows, a->q.shape[1], static_cast<int>(a->q.shape[2]));
    AM_CUDA_LAUNCHED();
    AM_TRY((launch_dkdv<kD, E, kDepth>(a, s, sms, stream)));
    return launch_dq<kD, E, kDepth>(a, s, sms, stream);
}

} // namespace attention_sm90

#endif
