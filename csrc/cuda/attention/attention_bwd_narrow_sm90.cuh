/* attention_bwd_narrow_sm90.cuh -- the gradients as attention_bwd_sm90.cuh has them, for head dims up to 80: delta,
 * then attention_dkdv_narrow_sm90.cuh, then attention_dq_narrow_sm90.cuh. The same bits every time.
 *
 * Head dim 72, 16 heads, not causal, bf16, one H200; TFLOP/s of five products (the passes make seven):
 *
 *                                  64 x 256   16 x 1,024   4 x 4,096   256 to 4,096
 *   these                          93         214          305         279
 *   attention_bwd_sm90.cuh                    158                      185
 *   torch's SDPA, varlen; cuDNN    3, 88; 122 48, 151; 235 246, 185; 308 140, 175
 *
 * Head dim 64, 32 heads of queries and 8 of keys, 8K: 275; FlashAttention-3 321, cuDNN 397. Short documents wait for
 * the beginning of a tile, whose keys have one stage, and for four small launches before the two passes.
 */
#ifndef ATTENTION_BWD_NARROW_SM90_CUH
#define ATTENTION_BWD_NARROW_SM90_CUH

#include "attention_bwd_sm90.cuh"
#include "attention_dkdv_narrow_sm90.cuh"
#include "attention_dq_narrow_sm90.cuh"

namespace attention_sm90
{

template <class T, class E>
am_status launch_narrow_keys(const am_attention_args *a, const AttentionScratch &s, int sms, cudaStream_t stream)
{
    constexpr size_t kSmem = sizeof(KeySmem<T>) + 1024;
    static_assert(kSmem <= 232448, "227 KiB of shared memory");
    const auto kernel = attention_dkdv_narrow_sm90_kernel<T, E>;
    const uint32_t group = static_cast<uint32_t>(a->q.shape[1] / a->k.shape[1]);
    KeyArgs args = {};
    AM_TRY(fill_args(&args, a, s));
    AM_TRY(attention_place_tiles(a, true, T::kKeys, s.first_k, s.next, stream));
    args.first = s.first_k;
    AM_TRY(tensor_map_of(&args.q, &a->q, T::kRows / group, group));
    AM_TRY(tensor_map_of(&args.dout, &a->dout, T::kRows / group, group));
    AM_TRY(tensor_map_of(&args.k, &a->k, T::kKeys, 1));
    AM_TRY(tensor_map_of(&args.v, &a->v, T::kKeys, 1));
    args.dk = attention_view(a->dk);
    args.dv = attention_view(a->dv);
    AM_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem));
    kernel<<<sms, T::kThreads, kSmem, stream>>>(args);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

template <class T, class E>
am_status launch_narrow_rows(const am_attention_args *a, const AttentionScratch &s, int sms, cudaStream_t stream)
{
    constexpr size_t kSmem = sizeof(NarrowRowSmem<T>) + 1024;
    static_assert(kSmem <= 232448, "227 KiB of shared memory");
    const auto kernel = attention_dq_narrow_sm90_kernel<T, E>;
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
    AM_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem));
    kernel<<<sms, T::kThreads, kSmem, stream>>>(args);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

/* kD and kDepth: as of the forward pass's Tile. */
template <int kD, class E, int kDepth = kD>
am_status launch_narrow_backward(const am_attention_args *a, cudaStream_t stream)
{
    const AttentionScratch s = attention_scratch(a, true);
    const int64_t rows = a->q.shape[0] * a->q.shape[1];
    int sms = 0;
    AM_TRY(multiprocessors(&sms));
    AM_TRY(attention_fill_gaps(a, true, stream));
    attention_delta_sm90_kernel<E><<<8 * sms, kDeltaThreads, 0, stream>>>(
        attention_view(a->dout), attention_view(a->out), s.delta, rows, a->q.shape[1], static_cast<int>(a->q.shape[2]));
    AM_CUDA_LAUNCHED();
    AM_TRY((launch_narrow_keys<NarrowKeyTile<kD, kDepth>, E>(a, s, sms, stream)));
    return launch_narrow_rows<NarrowRowTile<kD, kDepth>, E>(a, s, sms, stream);
}

} // namespace attention_sm90

#endif
