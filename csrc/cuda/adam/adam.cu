/* adam.cu -- AdamW over a list of tensors, simple kernels.
 *
 * The table of tensors travels as a kernel parameter (at most 32,764 bytes): no scratch, no copy, and a captured
 * graph holds it. A launch takes up to kTensors tensors of one parameter group; each block does one tile of one tensor
 * and finds it by binary search over the tiles before it. Steps are counted by a kernel of their own first, so that
 * every block of a tensor reads the same t.
 *
 * Floor: 28 bytes an element (float32 state, float32 gradient) over the copy rate of the memory.
 */
#include "cuda_check.h"

#include <math.h>
#include <stdint.h>

#include <cuda_bf16.h>

extern "C" {
#include "adam.h"
}

namespace
{

constexpr int kThreads = 256;
constexpr int kTile = 4096; /* elements of a block */
constexpr int kTensors = 448;

enum Flags : uint32_t {
    kParamBf16 = 1,
    kMomentBf16 = 2,
    kGradBf16 = 4,
    kMasterF32 = 8,
    kRemainder = 16,
    kStepI64 = 32
};

struct Row {
    void *p, *m, *v, *w;
    const void *g;
    void *step;
    int64_t n;
    uint32_t flags;
    uint32_t first_tile; /* of this tensor in the launch */
};

struct Table {
    Row rows[kTensors];
    int n_rows;
};
static_assert(sizeof(Table) <= 32000, "the table and the scalars fit in the 32,764 bytes of kernel parameters");

struct Scalars {
    double lr, beta1, beta2, eps, weight_decay;
    const float *lr_tensor, *found_inf, *grad_scale; /* null: not given */
};

__device__ bool skipped(const Scalars &s) { return s.found_inf != nullptr && *s.found_inf != 0.0f; }

__global__ void __launch_bounds__(kThreads)
    adam_step_count_kernel(const __grid_constant__ Table t, const __grid_constant__ Scalars s)
{
    if (skipped(s))
        return;
    for (int i = threadIdx.x; i < t.n_rows; i += kThreads) {
        if (t.rows[i].flags & kStepI64)
            ++*static_cast<int64_t *>(t.rows[i].step);
        else
            *static_cast<float *>(t.rows[i].step) += 1.0f;
    }
}

struct Coef {
    float b1, one_minus_b1, b2, one_minus_b2, step_size, inv_sqrt_bc2, eps, decay, inv_scale;
};

__device__ Coef coef_of(const Scalars &s, const Row &row)
{
    const double t = row.flags & kStepI64 ? static_cast<double>(*static_cast<const int64_t *>(row.step))
                                          : static_cast<double>(*static_cast<const float *>(row.step));
    const double lr = s.lr_tensor ? static_cast<double>(*s.lr_tensor) : s.lr;
    const double scale = s.grad_scale ? static_cast<double>(*s.grad_scale) : 1.0;
    Coef c;
    c.b1 = static_cast<float>(s.beta1);
    c.one_minus_b1 = static_cast<float>(1.0 - s.beta1);
    c.b2 = static_cast<float>(s.beta2);
    c.one_minus_b2 = static_cast<float>(1.0 - s.beta2);
    c.step_size = static_cast<float>(lr / (1.0 - pow(s.beta1, t)));
    c.inv_sqrt_bc2 = static_cast<float>(1.0 / sqrt(1.0 - pow(s.beta2, t)));
    c.eps = static_cast<float>(s.eps);
    c.decay = static_cast<float>(lr * s.weight_decay);
    c.inv_scale = static_cast<float>(1.0 / scale);
    return c;
}

__device__ float load(const void *base, int64_t i, bool bf16)
{
    return bf16 ? __bfloat162float(static_cast<const __nv_bfloat16 *>(base)[i]) : static_cast<const float *>(base)[i];
}

__device__ void store(void *base, int64_t i, bool bf16, float x)
{
    if (bf16)
        static_cast<__nv_bfloat16 *>(base)[i] = __float2bfloat16_rn(x);
    else
        static_cast<float *>(base)[i] = x;
}

__device__ float load_master(const Row &row, int64_t i)
{
    if (row.flags & kRemainder) {
        const uint32_t high = static_cast<uint32_t>(static_cast<const uint16_t *>(row.p)[i]) << 16;
        return __uint_as_float(high +
                               static_cast<uint32_t>(static_cast<int32_t>(static_cast<const int16_t *>(row.w)[i])));
    }
    return row.flags & kMasterF32 ? static_cast<const float *>(row.w)[i] : load(row.p, i, row.flags & kParamBf16);
}

__device__ void store_master(const Row &row, int64_t i, float x)
{
    if (row.flags & kRemainder) {
        const uint32_t bits = isnan(x) ? 0x7fc00000u : __float_as_uint(x);
        static_cast<uint16_t *>(row.p)[i] = static_cast<uint16_t>((bits + 0x8000u) >> 16);
        static_cast<int16_t *>(row.w)[i] = static_cast<int16_t>(bits);
        return;
    }
    if (row.flags & kMasterF32)
        static_cast<float *>(row.w)[i] = x;
    store(row.p, i, row.flags & kParamBf16, x);
}

/* The same operations in the same order as adam_cpu.inc: the _rn intrinsics are never contracted. */
__device__ void update(const Row &row, const Coef &c, int64_t i)
{
    const bool moment_bf16 = row.flags & kMomentBf16;
    const float g = __fmul_rn(load(row.g, i, row.flags & kGradBf16), c.inv_scale);
    const float m = __fadd_rn(__fmul_rn(c.b1, load(row.m, i, moment_bf16)), __fmul_rn(c.one_minus_b1, g));
    const float v = __fadd_rn(__fmul_rn(c.b2, load(row.v, i, moment_bf16)), __fmul_rn(__fmul_rn(c.one_minus_b2, g), g));
    const float w = load_master(row, i);
    const float denom = __fadd_rn(__fmul_rn(__fsqrt_rn(v), c.inv_sqrt_bc2), c.eps);
    store(row.m, i, moment_bf16, m);
    store(row.v, i, moment_bf16, v);
    store_master(row, i, __fsub_rn(w, __fadd_rn(__fdiv_rn(__fmul_rn(c.step_size, m), denom), __fmul_rn(c.decay, w))));
}

__device__ int row_of_tile(const Table &t, uint32_t tile)
{
    int low = 0, high = t.n_rows - 1;
    while (low < high) {
        const int middle = low + (high - low + 1) / 2;
        if (t.rows[middle].first_tile <= tile)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

__global__ void __launch_bounds__(kThreads)
    adam_step_update_kernel(const __grid_constant__ Table t, const __grid_constant__ Scalars s)
{
    __shared__ Coef coef;
    if (skipped(s))
        return;
    const Row &row = t.rows[row_of_tile(t, blockIdx.x)];
    if (threadIdx.x == 0)
        coef = coef_of(s, row);
    __syncthreads();
    const int64_t begin = static_cast<int64_t>(blockIdx.x - row.first_tile) * kTile;
    const int64_t end = row.n - begin > kTile ? begin + kTile : row.n;
    for (int64_t i = begin + threadIdx.x; i < end; i += kThreads)
        update(row, coef, i);
}

bool given(const am_tensor &t) { return t.dtype != AM_NONE && am_numel(&t) != 0; }

Row row_of(const am_adam_args *a, int64_t i)
{
    const am_tensor *w = a->masters.items && given(a->masters.items[i]) ? &a->masters.items[i] : nullptr;
    Row r = {};
    r.p = a->params.items[i].data;
    r.m = a->exp_avgs.items[i].data;
    r.v = a->exp_avg_sqs.items[i].data;
    r.w = w ? w->data : nullptr;
    r.g = a->grads.items[i].data;
    r.step = a->steps.items[i].data;
    r.n = am_numel(&a->params.items[i]);
    r.flags = (a->params.items[i].dtype == AM_BF16 ? kParamBf16 : 0u) |
              (a->exp_avgs.items[i].dtype == AM_BF16 ? kMomentBf16 : 0u) |
              (a->grads.items[i].dtype == AM_BF16 ? kGradBf16 : 0u) | (w && w->dtype == AM_F32 ? kMasterF32 : 0u) |
              (w && w->dtype == AM_I16 ? kRemainder : 0u) | (a->steps.items[i].dtype == AM_I64 ? kStepI64 : 0u);
    return r;
}

int64_t tiles_of(int64_t n) { return n / kTile + (n % kTile != 0); }

am_status launch(const Table &table, const Scalars &s, int64_t tiles, cudaStream_t stream)
{
    adam_step_count_kernel<<<1, kThreads, 0, stream>>>(table, s);
    AM_CUDA_LAUNCHED();
    if (tiles == 0)
        return AM_OK;
    adam_step_update_kernel<<<static_cast<unsigned>(tiles), kThreads, 0, stream>>>(table, s);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

const float *data_or_null(const am_tensor &t) { return given(t) ? static_cast<const float *>(t.data) : nullptr; }

Scalars scalars_of(const am_adam_args *a, int64_t group)
{
    Scalars s = {};
    s.lr = a->lr.data[group];
    s.beta1 = a->beta1.data[group];
    s.beta2 = a->beta2.data[group];
    s.eps = a->eps.data[group];
    s.weight_decay = a->weight_decay.data[group];
    s.lr_tensor = a->lr_tensors.items ? data_or_null(a->lr_tensors.items[group]) : nullptr;
    s.found_inf = data_or_null(a->found_inf);
    s.grad_scale = data_or_null(a->grad_scale);
    return s;
}

am_status step_group(const am_adam_args *a, const Scalars &s, int64_t begin, int64_t end, cudaStream_t stream)
{
    Table table;
    int64_t tiles = 0;
    table.n_rows = 0;
    for (int64_t i = begin; i < end; i++) {
        Row row = row_of(a, i);
        const int64_t own = tiles_of(row.n);
        if (table.n_rows == kTensors || tiles + own > INT32_MAX) {
            AM_TRY(launch(table, s, tiles, stream));
            table.n_rows = 0;
            tiles = 0;
        }
        row.first_tile = static_cast<uint32_t>(tiles);
        table.rows[table.n_rows++] = row;
        tiles += own;
    }
    return table.n_rows == 0 ? AM_OK : launch(table, s, tiles, stream);
}

am_status step_all(const am_adam_args *a, cudaStream_t stream)
{
    if (!a->group_sizes.present)
        return step_group(a, scalars_of(a, 0), 0, a->params.n, stream);
    int64_t begin = 0;
    for (int64_t group = 0; group < a->group_sizes.n; group++) {
        const int64_t end = begin + a->group_sizes.data[group];
        AM_TRY(step_group(a, scalars_of(a, group), begin, end, stream));
        begin = end;
    }
    return AM_OK;
}

} // namespace

extern "C" am_status am_cuda_adam_step(const am_adam_args *a, const am_exec *ex)
{
    for (int64_t i = 0; i < a->params.n; i++)
        AM_CHECK(tiles_of(am_numel(&a->params.items[i])) <= INT32_MAX, AM_ERR_UNSUPPORTED,
                 "adam_step: params[%lld] has %lld elements, CUDA takes up to %lld", (long long)i,
                 (long long)am_numel(&a->params.items[i]), (long long)INT32_MAX * kTile);
    int before = 0;
    AM_CUDA(cudaGetDevice(&before));
    AM_CUDA(cudaSetDevice(ex->dev_index));
    const am_status st = step_all(a, static_cast<cudaStream_t>(ex->stream));
    AM_CUDA(cudaSetDevice(before));
    return st;
}
