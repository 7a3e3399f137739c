/* shared.cu -- out = routed + sigmoid(gate) * shared, rounded after each operation, and its gradient.
 *
 *   dshared = sigmoid(gate) dout;  dgate = sum over the row of dout shared, times sigmoid' (gate)
 *
 * A block takes a row. Floor: 3 T H elements of traffic both ways: 32K tokens of 3,072 bf16: 0.6 GB, 0.14 ms; measured
 * 0.14 both ways.
 */
#include "cuda_check.h"

extern "C" {
#include "moe.h"
}

#include "moe_device.cuh"
#include "on_device.h"

namespace
{

using moe::Word;

constexpr int kThreads = 128;

struct Join {
    const char *routed, *shared, *gate, *dout;
    char *out, *dshared, *dgate;
    int64_t routed_row, shared_row, gate_row, dout_row, out_row, dshared_row, dgate_row; /* bytes */
    int64_t words;
};

template <typename W> __device__ W at(const char *p, int64_t bytes, int64_t word)
{
    return reinterpret_cast<const W *>(p + bytes)[word];
}

template <typename T, int kPer, bool kBackward>
__global__ void __launch_bounds__(kThreads) shared_expert_kernel(const __grid_constant__ Join p)
{
    using W = Word<T, kPer>;
    const int64_t row = blockIdx.x;
    const float gate = rows::to_float(*reinterpret_cast<const T *>(p.gate + row * p.gate_row));
    const float exact = 1.0f / (1.0f + expf(-gate)), s = rows::rounded<T>(exact);
    float sum = 0.0f;
    for (int64_t i = threadIdx.x; i < p.words; i += kThreads) {
        float shared[kPer], other[kPer];
        at<W>(p.shared, row * p.shared_row, i).get(shared);
        if constexpr (kBackward)
            at<W>(p.dout, row * p.dout_row, i).get(other);
        else
            at<W>(p.routed, row * p.routed_row, i).get(other);
#pragma unroll
        for (int j = 0; j < kPer; j++) {
            if constexpr (kBackward) {
                sum = fmaf(other[j], shared[j], sum);
                shared[j] = s * other[j];
            } else {
                shared[j] = __fadd_rn(other[j], rows::rounded<T>(__fmul_rn(s, shared[j])));
            }
        }
        W word;
        word.set(shared);
        if constexpr (kBackward)
            reinterpret_cast<W *>(p.dshared + row * p.dshared_row)[i] = word;
        else
            reinterpret_cast<W *>(p.out + row * p.out_row)[i] = word;
    }
    if constexpr (kBackward) {
        sum = moe::block_sum<kThreads>(sum);
        if (threadIdx.x == 0)
            rows::from_float(reinterpret_cast<T *>(p.dgate + row * p.dgate_row), sum * exact * (1.0f - exact));
    }
}

/* Where a tensor's rows are; `wide` stays true while 16-byte words may be read. */
template <typename Pointer> void place(const am_tensor &t, Pointer *data, int64_t *row, bool *wide)
{
    if (t.dtype == AM_NONE)
        return;
    *data = static_cast<char *>(t.data);
    *row = t.stride[0] * static_cast<int64_t>(am_dtype_size(t.dtype));
    if (wide != nullptr)
        *wide = *wide && moe::aligned(t.data, t.stride[0], t.dtype);
}

template <typename T, int kPer> am_status launch(const Join &p, int64_t n_rows, bool backward, cudaStream_t stream)
{
    const unsigned blocks = static_cast<unsigned>(n_rows);
    if (backward)
        shared_expert_kernel<T, kPer, true><<<blocks, kThreads, 0, stream>>>(p);
    else
        shared_expert_kernel<T, kPer, false><<<blocks, kThreads, 0, stream>>>(p);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

am_status run(const am_shared_expert_args *a, cudaStream_t stream)
{
    const int64_t n_rows = a->shared.shape[0], n = a->shared.shape[1];
    const int64_t size = static_cast<int64_t>(am_dtype_size(a->shared.dtype));
    bool wide = n * size % 16 == 0;
    Join p = {};
    if (n_rows == 0)
        return AM_OK;
    AM_CHECK(n_rows <= moe::kMostBlocks, AM_ERR_UNSUPPORTED,
             "add_shared_expert: there are %lld rows, at most 2^31 - 1 are possible on CUDA", (long long)n_rows);
    place(a->routed, &p.routed, &p.routed_row, &wide);
    place(a->shared, &p.shared, &p.shared_row, &wide);
    place(a->dout, &p.dout, &p.dout_row, &wide);
    place(a->out, &p.out, &p.out_row, &wide);
    place(a->dshared, &p.dshared, &p.dshared_row, &wide);
    place(a->gate, &p.gate, &p.gate_row, nullptr);
    place(a->dgate, &p.dgate, &p.dgate_row, nullptr);
    p.words = wide ? n * size / 16 : n;
    if (a->shared.dtype == AM_BF16)
        return wide ? launch<__nv_bfloat16, 8>(p, n_rows, a->backward, stream)
                    : launch<__nv_bfloat16, 1>(p, n_rows, a->backward, stream);
    return wide ? launch<float, 4>(p, n_rows, a->backward, stream) : launch<float, 1>(p, n_rows, a->backward, stream);
}

} // namespace

extern "C" am_status am_cuda_shared_expert(const am_shared_expert_args *a, const am_exec *ex)
{
    return on_device(run, a, ex);
}
