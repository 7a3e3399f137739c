/* attention_places.cu -- what every row needs first: where tiles lie, and zeros in the gaps between documents.
 *
 * Floor: both read the documents once (16 bytes each) and write the gaps; on a pack without gaps a launch is the cost.
 */
#include "attention_rows.h"
#include "ptx_sm90.cuh"

#include <cuda_bf16.h>

namespace
{

constexpr int kThreads = 1024;

__device__ int64_t tiles_of(const int64_t *of, const int64_t *order, int64_t place, int64_t rows)
{
    const int64_t d = order[place];
    return (of[2 * d + 1] - of[2 * d] + rows - 1) / rows;
}

/* One block: each thread sums a run of documents, the block scans the sums, each thread counts through its run. */
__device__ void place_tiles(const int64_t *of, const int64_t *order, int64_t n, int64_t rows, int64_t *first,
                            int64_t *next)
{
    __shared__ int64_t sums[kThreads];
    const int me = static_cast<int>(threadIdx.x);
    const int64_t run = (n + kThreads - 1) / kThreads;
    const int64_t begin = me * run < n ? me * run : n, end = begin + run < n ? begin + run : n;
    int64_t sum = 0;
    for (int64_t i = begin; i < end; i++)
        sum += tiles_of(of, order, i, rows);
    sums[me] = sum;
    for (int step = 1; step < kThreads; step *= 2) {
        __syncthreads();
        const int64_t left = me >= step ? sums[me - step] : 0;
        __syncthreads();
        sums[me] += left;
    }
    int64_t at = sums[me] - sum;
    for (int64_t i = begin; i < end; i++) {
        first[i] = at;
        at += tiles_of(of, order, i, rows);
    }
    if (me == kThreads - 1) {
        first[n] = sums[me];
        *next = 0;
    }
}

__global__ void __launch_bounds__(kThreads)
    attention_place_tiles_kernel(const int64_t *of, const int64_t *order, int64_t n, int64_t rows, int64_t *first,
                                 int64_t *next)
{
    place_tiles(of, order, n, rows, first, next);
}

struct Gap {
    AttentionView view;
    int64_t heads, inner; /* a token's elements */
    int bytes;            /* of an element: 2 or 4 */
    uint32_t bits;        /* what to write */
};

struct Gaps {
    Gap gap[3];
    int n;
    const int64_t *docs;
    int64_t n_docs, tokens;
};

__device__ bool outside(const int64_t *docs, int64_t n, int64_t token)
{
    int64_t low = -1, high = n - 1; /* the last document that starts at or before the token; -1: none */
    while (low < high) {
        const int64_t middle = low + (high - low + 1) / 2;
        if (docs[2 * middle] <= token)
            low = middle;
        else
            high = middle - 1;
    }
    return low < 0 || token >= docs[2 * low + 1];
}

__device__ void fill_token(const Gaps &g, int64_t t, int lane)
{
    for (int i = 0; i < g.n; i++)
        for (int64_t e = lane; e < g.gap[i].heads * g.gap[i].inner; e += 32) {
            const AttentionView &v = g.gap[i].view;
            const int64_t at = t * v.token + e / g.gap[i].inner * v.head + e % g.gap[i].inner;
            if (g.gap[i].bytes == 4)
                static_cast<uint32_t *>(v.data)[at] = g.gap[i].bits;
            else
                static_cast<uint16_t *>(v.data)[at] = static_cast<uint16_t>(g.gap[i].bits);
        }
}

/* A warp a token. */
__global__ void __launch_bounds__(256) attention_fill_gaps_kernel(const __grid_constant__ Gaps g)
{
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int64_t step = static_cast<int64_t>(gridDim.x) * 8;
    for (int64_t t = static_cast<int64_t>(blockIdx.x) * 8 + threadIdx.x / 32; t < g.tokens; t += step) {
        if (!outside(g.docs, g.n_docs, t))
            continue;
        fill_token(g, t, lane);
    }
}

/* Both at once: block 0 counts tiles; of the others a thread looks at a token, its warp fills what is a gap. */
__global__ void __launch_bounds__(kThreads)
    attention_prepare_kernel(const __grid_constant__ Gaps g, const int64_t *order, int64_t rows, int64_t *first,
                             int64_t *next)
{
    ptx::griddepcontrol_launch_dependents();
    if (blockIdx.x == 0) {
        place_tiles(g.docs, order, g.n_docs, rows, first, next);
        return;
    }
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int64_t step = static_cast<int64_t>(gridDim.x - 1) * kThreads;
    for (int64_t t = static_cast<int64_t>(blockIdx.x - 1) * kThreads + threadIdx.x - lane; t < g.tokens; t += step) {
        const bool gap = t + lane < g.tokens && outside(g.docs, g.n_docs, t + lane);
        for (uint32_t left = __ballot_sync(0xffffffffu, gap); left != 0; left &= left - 1)
            fill_token(g, t + __ffs(static_cast<int>(left)) - 1, lane);
    }
}

void add_gap(Gaps &g, const am_tensor &t, uint32_t bits)
{
    if (t.dtype == AM_NONE)
        return;
    Gap &gap = g.gap[g.n++];
    gap.view = attention_view(t);
    gap.heads = t.shape[1];
    gap.inner = t.ndim == 3 ? t.shape[2] : 1;
    gap.bytes = t.dtype == AM_F32 ? 4 : 2;
    gap.bits = bits;
}

am_status fill(const Gaps &g, cudaStream_t stream)
{
    constexpr int64_t kMost = 1 << 20;
    if (g.tokens == 0)
        return AM_OK;
    const int64_t blocks = (g.tokens + 7) / 8;
    attention_fill_gaps_kernel<<<static_cast<unsigned>(blocks < kMost ? blocks : kMost), 256, 0, stream>>>(g);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

Gaps forward_gaps(const am_attention_args *a)
{
    constexpr uint32_t kMinusInfinity = 0xff800000u;
    const AttentionDocs docs = attention_docs(a);
    Gaps g = {};
    g.n_docs = docs.n;
    g.docs = docs.q;
    g.tokens = a->q.shape[0];
    add_gap(g, a->out, 0);
    add_gap(g, a->lse, kMinusInfinity);
    add_gap(g, a->lse_low, 0);
    return g;
}

} // namespace

AttentionView attention_view(const am_tensor &t)
{
    AttentionView v;
    v.data = t.data;
    v.token = t.stride[0];
    v.head = t.stride[1];
    return v;
}

AttentionDocs attention_docs(const am_attention_args *a)
{
    AttentionDocs d;
    d.n = a->docs.n / 2;
    d.q = static_cast<const int64_t *>(a->device_docs.data);
    d.k = a->docs_k.present ? d.q + 2 * d.n : d.q;
    d.order = d.k + 2 * d.n;
    return d;
}

AttentionScratch attention_scratch(const am_attention_args *a, bool backward)
{
    const uintptr_t start = (reinterpret_cast<uintptr_t>(a->workspace.data) + 15) / 16 * 16;
    const int64_t n = a->docs.n / 2;
    AttentionScratch s;
    s.next = reinterpret_cast<int64_t *>(start);
    s.first = s.next + 1;
    s.first_k = s.first + n + 1;
    s.delta = reinterpret_cast<float *>(s.first_k + n + 1);
    s.bytes = 16 + static_cast<size_t>(2 * n + 3) * sizeof(int64_t);
    s.bytes += backward ? static_cast<size_t>(a->q.shape[0] * a->q.shape[1]) * sizeof(float) : 0;
    return s;
}

am_status attention_place_tiles(const am_attention_args *a, bool of_keys, int64_t rows, int64_t *first, int64_t *next,
                                cudaStream_t stream)
{
    const AttentionDocs docs = attention_docs(a);
    attention_place_tiles_kernel<<<1, kThreads, 0, stream>>>(of_keys ? docs.k : docs.q, docs.order, docs.n, rows, first,
                                                             next);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

am_status attention_fill_gaps(const am_attention_args *a, bool backward, cudaStream_t stream)
{
    if (!backward)
        return fill(forward_gaps(a), stream);
    const AttentionDocs docs = attention_docs(a);
    Gaps g = {};
    g.n_docs = docs.n;
    g.docs = docs.q;
    g.tokens = a->q.shape[0];
    add_gap(g, a->dq, 0);
    AM_TRY(fill(g, stream));
    g.n = 0;
    g.docs = docs.k;
    g.tokens = a->k.shape[0];
    add_gap(g, a->dk, 0);
    add_gap(g, a->dv, 0);
    return fill(g, stream);
}

am_status attention_prepare(const am_attention_args *a, int64_t rows, int64_t *first, int64_t *next,
                            cudaStream_t stream)
{
    constexpr int64_t kMost = 1024;
    const Gaps g = forward_gaps(a);
    const int64_t blocks = (g.tokens + kThreads - 1) / kThreads;
    attention_prepare_kernel<<<static_cast<unsigned>(1 + (blocks < kMost ? blocks : kMost)), kThreads, 0, stream>>>(
        g, attention_docs(a).order, rows, first, next);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}
