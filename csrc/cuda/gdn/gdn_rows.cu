/* gdn_rows.cu -- which kernels run, and zeros in the gaps between documents. The first row that fits wins.
 *
 * Floor of the zeros: the documents read once (16 bytes each) and the gaps written; without gaps a launch is the cost.
 */
#include "gdn_rows.h"
#include "on_device.h"

namespace
{

bool always(const am_gdn_args *) { return true; }
size_t nothing(const am_gdn_args *) { return 0; }

const GdnRow forward_rows[] = {
    {"d128 bf16 sm90", gdn_forward_fits_sm90, gdn_forward_sm90, gdn_forward_sm90_scratch},
    {"simple", always, gdn_forward_simple, nothing},
};

const GdnRow backward_rows[] = {
    {"d128 bf16 sm90", gdn_backward_fits_sm90, gdn_backward_sm90, gdn_backward_sm90_scratch},
    {"simple", always, gdn_backward_simple, gdn_backward_simple_scratch},
};

const GdnRow *pick(const GdnRow *row, const am_gdn_args *a)
{
    while (!row->fits(a))
        row++;
    return row;
}

bool given(const am_tensor &t) { return t.dtype != AM_NONE; }

gdn::View view(const am_tensor &t)
{
    gdn::View v = {};
    if (given(t)) {
        v.data = t.data;
        v.token = t.stride[0];
        v.head = t.stride[1];
        v.bf16 = t.dtype == AM_BF16;
    }
    return v;
}

gdn::States states(const am_tensor &t)
{
    gdn::States s = {};
    if (given(t)) {
        s.data = static_cast<float *>(t.data);
        s.first = t.stride[0];
        s.head = t.stride[1];
        s.row = t.stride[2];
    }
    return s;
}

constexpr int kMost = 5;

struct Gaps {
    gdn::View view[kMost];
    int heads[kMost], inner[kMost];
    int n;
    const int64_t *docs;
    int64_t n_docs, tokens;
};

/* A warp a token. */
__global__ void __launch_bounds__(256) gdn_fill_gaps_kernel(const __grid_constant__ Gaps g)
{
    const int lane = static_cast<int>(threadIdx.x % 32);
    for (int64_t t = int64_t{blockIdx.x} * 8 + threadIdx.x / 32; t < g.tokens; t += int64_t{gridDim.x} * 8) {
        const auto ends_after = [&](int64_t d) { return g.docs[2 * d + 1] > t; };
        const int64_t d = gdn::first_that(0, g.n_docs, ends_after);
        if (d < g.n_docs && g.docs[2 * d] <= t)
            continue;
        for (int i = 0; i < g.n; i++)
            for (int e = lane; e < g.heads[i] * g.inner[i]; e += 32) {
                const int64_t at = t * g.view[i].token + e / g.inner[i] * g.view[i].head + e % g.inner[i];
                if (g.view[i].bf16)
                    static_cast<uint16_t *>(g.view[i].data)[at] = 0;
                else
                    static_cast<uint32_t *>(g.view[i].data)[at] = 0;
            }
    }
}

} // namespace

gdn::Call gdn_call(const am_gdn_args *a)
{
    gdn::Call p = {};
    p.q = view(a->q);
    p.k = view(a->k);
    p.v = view(a->v);
    p.o = view(a->o);
    p.dout = view(a->dout);
    p.dq = view(a->dq);
    p.dk = view(a->dk);
    p.dv = view(a->dv);
    p.g = view(a->g);
    p.beta = view(a->beta);
    p.dg = view(a->dg);
    p.dbeta = view(a->dbeta);
    p.initial = states(a->initial);
    p.final = states(a->final);
    p.kept = states(a->states);
    p.dfinal = states(a->dfinal);
    p.dinitial = states(a->dinitial);
    p.n_docs = a->docs.n / 2;
    p.docs = static_cast<const int64_t *>(a->device_docs.data);
    p.order = p.docs + 2 * p.n_docs;
    p.tokens = a->q.shape[0];
    p.key_heads = static_cast<int>(a->q.shape[1]);
    p.value_heads = static_cast<int>(a->v.shape[1]);
    p.group = p.value_heads / p.key_heads;
    p.key_dim = static_cast<int>(a->q.shape[2]);
    p.value_dim = static_cast<int>(a->v.shape[2]);
    p.slices = (p.value_dim + 63) / 64;
    p.scale = static_cast<float>(a->scale);
    p.l2norm = a->l2norm;
    return p;
}

am_status gdn_fill_gaps(const am_gdn_args *a, bool backward, cudaStream_t stream)
{
    const am_tensor *const grads[] = {&a->dq, &a->dk, &a->dv, &a->dg, &a->dbeta}, *const out[] = {&a->o};
    const am_tensor *const *const tensors = backward ? grads : out;
    const int64_t blocks = (a->q.shape[0] + 7) / 8;
    Gaps g = {};
    for (g.n = 0; g.n < (backward ? kMost : 1); g.n++) {
        const am_tensor &t = *tensors[g.n];
        g.view[g.n] = view(t);
        g.heads[g.n] = static_cast<int>(t.shape[1]);
        g.inner[g.n] = t.ndim == 3 ? static_cast<int>(t.shape[2]) : 1;
    }
    g.docs = static_cast<const int64_t *>(a->device_docs.data);
    g.n_docs = a->docs.n / 2;
    g.tokens = a->q.shape[0];
    if (g.tokens == 0)
        return AM_OK;
    gdn_fill_gaps_kernel<<<static_cast<unsigned>(blocks < 1 << 20 ? blocks : 1 << 20), 256, 0, stream>>>(g);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

extern "C" am_status am_cuda_gdn_plan(const am_gdn_args *a, bool backward, const char **row, size_t *bytes)
{
    *row = nullptr;
    *bytes = 0;
    for (const GdnRow *r = backward ? backward_rows : forward_rows;; r++) {
        const size_t needed = r->scratch(a);
        *bytes =
            needed > *bytes ? needed : *bytes; /* of k nothing may be known yet: enough for every row that follows */
        if (*row == nullptr && r->fits(a))
            *row = r->name;
        if (r->fits == always)
            return AM_OK;
    }
}

extern "C" am_status am_cuda_gdn_forward(const am_gdn_args *a, const am_exec *ex)
{
    return on_device(pick(forward_rows, a)->run, a, ex);
}

extern "C" am_status am_cuda_gdn_backward(const am_gdn_args *a, const am_exec *ex)
{
    return on_device(pick(backward_rows, a)->run, a, ex);
}
