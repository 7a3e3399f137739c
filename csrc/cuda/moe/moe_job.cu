/* moe_job.cu -- the passes: what is launched in which order, and where it finds its scratch. See moe_job.h. */
#include "moe_job.h"

#include "on_device.h"

namespace
{

bool given(const am_tensor &t) { return t.dtype != AM_NONE; }

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* The next n elements of the workspace, on 256 bytes; counts only where base is null. */
struct Taker {
    char *base;
    size_t at;
    template <typename T> void take(T *&p, int64_t n)
    {
        p = base == nullptr ? nullptr : reinterpret_cast<T *>(base + at);
        at += (static_cast<size_t>(n) * sizeof(T) + 255) / 256 * 256;
    }
};

/* Strides of a weight [E, n, k], in elements. */
void set_weight(MoeProduct *p, const am_tensor &w)
{
    p->b = w.data;
    p->b_group = w.stride[0];
    p->ldb = w.stride[1];
}

MoeProduct product_of(const MoeJob &job, MoeKind kind)
{
    MoeProduct p = {};
    p.kind = kind;
    p.dtype = p.to = job.a->hidden.dtype;
    p.rows = job.pairs;
    p.offset = job.offset;
    p.by_size = job.by_size;
    p.groups = static_cast<int>(job.experts);
    p.counts = job.a->counts.present ? job.a->counts.data : nullptr;
    return p;
}

/* Of all tokens, as one group. */
MoeProduct product_of_tokens(const MoeJob &job, MoeKind kind)
{
    MoeProduct p = product_of(job, kind);
    p.rows = job.tokens;
    p.offset = job.whole;
    p.by_size = job.order;
    p.groups = 1;
    p.counts = nullptr;
    return p;
}

MoeProduct gate_up_of(const MoeJob &job)
{
    MoeProduct p = product_of(job, MOE_NT);
    p.keep = given(job.a->products);
    p.a = job.x;
    p.c = p.keep ? job.a->products.data : job.products;
    p.gate = true;
    p.act = job.act;
    p.n = 2 * job.inner;
    p.k = p.lda = job.hidden;
    p.ldc = p.n;
    set_weight(&p, job.a->gate_up);
    return p;
}

/* Whether silu(g) u is made without the products in memory. */
bool gates_in_place(const MoeJob &job)
{
    MoeProduct p = gate_up_of(job);
    p.c = nullptr; /* products that are kept and not aligned need no scratch either */
    return moe_pick(&p)->gates;
}

void take_rows(MoeJob &job, Taker &t)
{
    const int64_t size = static_cast<int64_t>(am_dtype_size(job.a->hidden.dtype)), pairs = job.pairs;
    t.take(job.offset, job.experts + 1);
    t.take(job.by_size, job.experts);
    t.take(job.counts, job.blocks * job.experts);
    t.take(job.token, pairs);
    t.take(job.pair, pairs);
    t.take(job.place, pairs);
    if (!job.runs_experts)
        return;
    t.take(job.x, pairs * job.hidden * size);
    t.take(job.act, pairs * job.inner * size);
    t.take(job.products, job.backward || gates_in_place(job) ? 0 : pairs * 2 * job.inner * size);
    t.take(job.dy, job.backward ? pairs * job.hidden * size : 0);
    t.take(job.dproducts, job.backward ? pairs * 2 * job.inner * size : 0);
}

void take_router(MoeJob &job, Taker &t)
{
    const int64_t size = static_cast<int64_t>(am_dtype_size(job.a->hidden.dtype));
    if (!job.backward) {
        t.take(job.partial, (job.tokens + kMoeRouteTokens - 1) / kMoeRouteTokens * job.experts);
        return;
    }
    t.take(job.dweights, job.pairs);
    t.take(job.dlogits, job.tokens * job.experts * size);
    t.take(job.clean, job.tokens * job.hidden * size);
    t.take(job.parts, job.splits * job.experts * job.hidden);
}

am_status run_gate_up(const MoeJob &job, cudaStream_t stream)
{
    const MoeProduct p = gate_up_of(job);
    if (p.keep)
        AM_TRY(moe_clear_products(job, stream));
    return moe_product(&p, stream);
}

/* y, in the place of x. */
am_status run_down(const MoeJob &job, cudaStream_t stream)
{
    MoeProduct p = product_of(job, MOE_NT);
    p.a = job.act;
    p.c = job.x;
    p.n = p.ldc = job.hidden;
    p.k = p.lda = job.inner;
    set_weight(&p, job.a->down);
    return moe_product(&p, stream);
}

am_status run_experts(const MoeJob &job, cudaStream_t stream)
{
    const am_moe_args *const a = job.a;
    AM_TRY(moe_permute(job, a->hidden, job.x, stream));
    AM_TRY(run_gate_up(job, stream));
    if (!given(a->out))
        return AM_OK;
    AM_TRY(run_down(job, stream));
    return moe_unpermute(job, job.x, static_cast<const float *>(a->weights.data), nullptr, a->out, stream);
}

MoeProduct logits_of(const MoeJob &job)
{
    const am_moe_args *const a = job.a;
    MoeProduct p = product_of_tokens(job, MOE_NT);
    p.a = a->hidden.data;
    p.lda = a->hidden.stride[0];
    p.b = a->router_weight.data;
    p.ldb = a->router_weight.stride[0];
    p.c = a->logits.data;
    p.n = p.ldc = job.experts;
    p.k = job.hidden;
    return p;
}

am_status run_router(const MoeJob &job, cudaStream_t stream)
{
    const MoeProduct p = logits_of(job);
    AM_TRY(moe_product(&p, stream));
    AM_TRY(moe_route_choose(job, stream));
    AM_TRY(moe_route_sums(job, stream));
    return moe_sort_rows(job, true, stream);
}

/* dact, then what the gate makes of it: dproducts, dweights, weighted activations. */
am_status run_act_grad(const MoeJob &job, float *dweights, cudaStream_t stream)
{
    MoeProduct p = product_of(job, MOE_NN);
    p.a = job.dy;
    p.c = job.act;
    p.n = p.ldc = job.inner;
    p.k = p.lda = job.hidden;
    set_weight(&p, job.a->down);
    if (dweights != nullptr && job.pairs > 0)
        AM_CUDA(cudaMemsetAsync(dweights, 0, static_cast<size_t>(job.pairs) * sizeof(float), stream));
    AM_TRY(moe_permute(job, job.a->dout, job.dy, stream));
    AM_TRY(moe_product(&p, stream));
    return moe_swiglu_grad(job, dweights, stream);
}

am_status run_down_grad(const MoeJob &job, cudaStream_t stream)
{
    MoeProduct p = product_of(job, MOE_TN);
    p.a = job.dy;
    p.b = job.act;
    p.c = job.a->ddown.data;
    p.to = job.a->ddown.dtype;
    p.add = job.a->accumulate;
    p.next = job.next;
    p.m = p.lda = job.hidden;
    p.n = p.ldb = p.ldc = job.inner;
    p.c_group = job.hidden * job.inner;
    return moe_product(&p, stream);
}

am_status run_gate_up_grad(const MoeJob &job, cudaStream_t stream)
{
    MoeProduct p = product_of(job, MOE_TN);
    p.a = job.dproducts;
    p.b = job.x;
    p.c = job.a->dgate_up.data;
    p.to = job.a->dgate_up.dtype;
    p.add = job.a->accumulate;
    p.next = job.next + 1;
    p.m = p.lda = 2 * job.inner;
    p.n = p.ldb = p.ldc = job.hidden;
    p.c_group = 2 * job.inner * job.hidden;
    AM_TRY(moe_permute(job, job.a->hidden, job.x, stream));
    return moe_product(&p, stream);
}

/* dx, in the place of dy. */
am_status run_hidden_grad(const MoeJob &job, cudaStream_t stream)
{
    MoeProduct p = product_of(job, MOE_NN);
    p.a = job.dproducts;
    p.c = job.dy;
    p.n = p.ldc = job.hidden;
    p.k = p.lda = 2 * job.inner;
    set_weight(&p, job.a->gate_up);
    return moe_product(&p, stream);
}

am_status run_router_weight_grad(const MoeJob &job, cudaStream_t stream)
{
    const am_tensor &x = job.a->hidden;
    MoeProduct p = product_of_tokens(job, MOE_TN);
    p.offset = job.split;
    p.groups = job.splits;
    p.to = AM_F32;
    p.a = job.dlogits;
    p.m = p.lda = job.experts;
    p.b = x.data;
    p.ldb = x.stride[0];
    p.c = job.parts;
    p.next = job.next + 2;
    p.n = p.ldc = job.hidden;
    p.c_group = job.experts * job.hidden;
    if (given(job.a->padding)) { /* which may hold NaN, and 0 times NaN is NaN */
        AM_TRY(moe_without_padding(job, x, job.clean, stream));
        p.b = job.clean;
        p.ldb = job.hidden;
    }
    AM_TRY(moe_product(&p, stream));
    return moe_add_parts(job, stream);
}

am_status run_router_grad(const MoeJob &job, const float *dweights, cudaStream_t stream)
{
    const am_moe_args *const a = job.a;
    AM_TRY(moe_route_grad(job, dweights, stream));
    if (given(a->drouter))
        AM_TRY(run_router_weight_grad(job, stream));
    if (!given(a->dhidden))
        return AM_OK;
    MoeProduct p = product_of_tokens(job, MOE_NN);
    p.a = job.dlogits;
    p.k = p.lda = job.experts;
    p.b = a->router_weight.data;
    p.ldb = a->router_weight.stride[0];
    p.c = job.clean;
    p.n = p.ldc = job.hidden;
    return moe_product(&p, stream);
}

/* The experts' gradients; dweights may be null, `more` is the router's part of dhidden or null. */
am_status run_experts_grad(const MoeJob &job, const char *more, cudaStream_t stream)
{
    const am_moe_args *const a = job.a;
    if (given(a->ddown))
        AM_TRY(run_down_grad(job, stream));
    if (given(a->dgate_up))
        AM_TRY(run_gate_up_grad(job, stream));
    if (!given(a->dhidden))
        return AM_OK;
    AM_TRY(run_hidden_grad(job, stream));
    return moe_unpermute(job, job.dy, nullptr, more, a->dhidden, stream);
}

am_status check_sizes(const MoeJob &job)
{
    constexpr int64_t kMostPairs = (1ll << 31) - 1024, kMostExperts = 1024;
    AM_CHECK(job.pairs <= kMostPairs && job.tokens <= kMostPairs, AM_ERR_UNSUPPORTED,
             "moe: %lld tokens of %lld experts, less than 2^31 pairs are possible on CUDA", (long long)job.tokens,
             (long long)job.top_k);
    AM_CHECK(!job.routes || job.experts <= kMostExperts, AM_ERR_UNSUPPORTED,
             "moe: there are %lld experts, at most %lld are possible on CUDA", (long long)job.experts,
             (long long)kMostExperts);
    return AM_OK;
}

am_status start(const am_moe_args *a, bool backward, MoeJob *job, cudaStream_t stream)
{
    *job = moe_job(a, backward);
    AM_TRY(check_sizes(*job));
    AM_CHECK(static_cast<size_t>(a->workspace.shape[0]) >= job->bytes, AM_ERR_SHAPE,
             "moe: workspace has %lld bytes, %zu are needed", (long long)a->workspace.shape[0], job->bytes);
    return moe_groups(*job, stream);
}

am_status forward(const am_moe_args *a, cudaStream_t stream)
{
    MoeJob job;
    AM_TRY(start(a, false, &job, stream));
    if (job.routes)
        AM_TRY(run_router(job, stream));
    else
        AM_TRY(moe_sort_rows(job, false, stream));
    return job.runs_experts ? run_experts(job, stream) : AM_OK;
}

am_status backward(const am_moe_args *a, cudaStream_t stream)
{
    MoeJob job;
    AM_TRY(start(a, true, &job, stream));
    float *const dweights = job.routes ? job.dweights : static_cast<float *>(a->dweights.data);
    AM_TRY(moe_sort_rows(job, false, stream));
    AM_TRY(run_act_grad(job, dweights, stream));
    if (job.routes)
        AM_TRY(run_router_grad(job, dweights, stream));
    return run_experts_grad(job, job.routes ? job.clean : nullptr, stream);
}

am_status route_backward(const am_moe_args *a, cudaStream_t stream)
{
    MoeJob job;
    AM_TRY(start(a, true, &job, stream));
    AM_TRY(run_router_grad(job, static_cast<const float *>(a->dweights.data), stream));
    return given(a->dhidden) ? moe_unpermute(job, nullptr, nullptr, job.clean, a->dhidden, stream) : AM_OK;
}

} // namespace

MoeJob moe_job(const am_moe_args *a, bool backward)
{
    MoeJob job = {};
    job.a = a;
    job.backward = backward;
    job.routes = given(a->router_weight);
    job.runs_experts = given(a->down);
    job.tokens = a->hidden.shape[0];
    job.hidden = a->hidden.shape[1];
    job.experts = job.routes ? a->router_weight.shape[0] : a->down.shape[0];
    job.inner = job.runs_experts ? a->down.shape[2] : 0;
    job.top_k = a->top_k;
    job.pairs = job.tokens * job.top_k;
    job.blocks = static_cast<int>((job.tokens + kMoeTokens - 1) / kMoeTokens);
    job.splits = static_cast<int>(smaller(8, job.tokens / 512 + 1));
    Taker t = {static_cast<char *>(a->workspace.data), 0};
    if (t.base != nullptr) /* the first address on 256 bytes */
        t.at = (256 - reinterpret_cast<uintptr_t>(t.base) % 256) % 256;
    const size_t before = t.at;
    t.take(job.whole, 2);
    t.take(job.split, job.splits + 1);
    t.take(job.order, job.splits);
    t.take(job.next, kMoeNext);
    take_rows(job, t);
    if (job.routes)
        take_router(job, t);
    job.bytes = t.at - before + 256;
    return job;
}

extern "C" am_status am_cuda_moe_plan(const am_moe_args *a, const char **row, size_t *bytes)
{
    const MoeJob job = moe_job(a, a->backward);
    AM_TRY(check_sizes(job));
    const MoeProduct p = job.runs_experts ? gate_up_of(job) : logits_of(job);
    *row = moe_pick(&p)->name;
    *bytes = job.bytes;
    return AM_OK;
}

extern "C" am_status am_cuda_moe_forward(const am_moe_args *a, const am_exec *ex) { return on_device(forward, a, ex); }

extern "C" am_status am_cuda_moe_backward(const am_moe_args *a, const am_exec *ex)
{
    return on_device(a->down.dtype == AM_NONE ? route_backward : backward, a, ex);
}
