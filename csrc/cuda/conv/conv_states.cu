/* conv_states.cu -- packed causal convolution: final_state forward, dstate backward.
 *
 * Thread: one number of one document's state; dstate makes the slopes of the document's first rows again.
 */
#include "conv.cuh"

using namespace convs;

namespace
{

constexpr int kBlock = 256;

struct States {
    View out, dy, x;
    int64_t numbers; /* documents * channels * (width - 1) */
};

/* Number q of the document's state and rows. */
__device__ float input(const Call &p, const States &s, int64_t doc, int64_t start, int channel, int64_t q)
{
    if (q >= p.width - 1)
        return s.x.at(start + q - (p.width - 1), channel, 0);
    return p.state.data == nullptr ? 0.0f : p.state.at(doc, channel, q);
}

template <typename T>
__device__ float gradient(const Call &p, const States &s, int64_t doc, int64_t start, int64_t length, int channel,
                          int place)
{
    float out = place >= length && p.dfinal.data != nullptr ? p.dfinal.at(doc, channel, place - length) : 0.0f;
    for (int t = 0; t <= place && t < length; t++) {
        float dz = s.dy.at(start + t, channel, 0);
        if (p.silu) {
            float z = p.bias.data == nullptr ? 0.0f : p.bias.at(channel, 0, 0);
            for (int j = 0; j < p.width; j++)
                z = fmaf(p.weight.at(channel, j, 0), input(p, s, doc, start, channel, t + j), z);
            dz *= slope<T>(z);
        }
        out = fmaf(p.weight.at(channel, place - t, 0), dz, out);
    }
    return out;
}

template <typename T, bool kBackward>
__global__ void __launch_bounds__(kBlock)
    conv_states_kernel(const __grid_constant__ Call p, const __grid_constant__ States s)
{
    for (int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x; i < s.numbers; i += int64_t{gridDim.x} * kBlock) {
        const int place = static_cast<int>(i % (p.width - 1));
        const int64_t rest = i / (p.width - 1);
        const int doc = static_cast<int>(rest / p.channels);
        const int channel = static_cast<int>(rest % p.channels);
        const int64_t start = p.docs.start(doc), length = p.docs.end(doc) - start;
        const float value = kBackward ? gradient<T>(p, s, doc, start, length, channel, place)
                                      : input(p, s, doc, start, channel, length + place);
        s.out.set(doc, channel, place, value);
    }
}

template <typename T> am_status launch(const Call &p, const States &s, bool backward, cudaStream_t stream)
{
    const int64_t blocks = (s.numbers + kBlock - 1) / kBlock;
    const unsigned grid = static_cast<unsigned>(blocks < INT32_MAX ? blocks : INT32_MAX);
    if (backward)
        conv_states_kernel<T, true><<<grid, kBlock, 0, stream>>>(p, s);
    else
        conv_states_kernel<T, false><<<grid, kBlock, 0, stream>>>(p, s);
    AM_CUDA_LAUNCHED();
    return AM_OK;
}

} // namespace

am_status convs::call_of(const am_conv_args *a, Call *p)
{
    const am_tensor &out = a->backward ? a->dx : a->y;
    const int64_t size = static_cast<int64_t>(am_dtype_size(a->x.dtype)), channels = a->x.shape[1];
    const struct {
        const char *name;
        int64_t n;
    } counts[] = {{"rows", a->x.shape[0]},
                  {"channels", channels},
                  {"documents", a->docs.n / 2},
                  {"runs", a->backward ? a->partials.shape[0] : 0}};
    for (const auto &c : counts)
        AM_CHECK(c.n <= INT32_MAX / 2, AM_ERR_UNSUPPORTED, "causal_conv1d: %lld %s, CUDA takes up to %d",
                 (long long)c.n, c.name, INT32_MAX / 2);
    p->out = static_cast<char *>(out.data);
    p->out_stride = out.stride[0] * size;
    p->x = static_cast<const char *>(a->x.data);
    p->x_stride = a->x.stride[0] * size;
    if (a->backward) {
        p->dy = static_cast<const char *>(a->dy.data);
        p->dy_stride = a->dy.stride[0] * size;
        p->runs = static_cast<int>(a->partials.shape[0]);
        if (rows::given(a->dweight) || rows::given(a->dbias))
            p->partials = static_cast<double *>(a->partials.data);
    }
    p->weight = view(a->weight);
    p->bias = view(a->bias);
    p->state = view(a->initial_state);
    p->dfinal = view(a->dfinal);
    p->docs.n = static_cast<int>(a->docs.n / 2);
    if (rows::given(a->device_docs)) {
        p->docs.ends = static_cast<const int64_t *>(a->device_docs.data);
    } else if (p->docs.n == 1) {
        p->docs.first = static_cast<int>(a->docs.data[0]);
        p->docs.last = static_cast<int>(a->docs.data[1]);
    }
    p->rows = static_cast<int>(a->x.shape[0]);
    p->channels = static_cast<int>(channels);
    p->width = static_cast<int>(a->weight.shape[1]);
    p->silu = a->silu;
    return AM_OK;
}

am_status convs::states(const am_conv_args *a, const Call &p, cudaStream_t stream)
{
    States s = {};
    s.out = view(a->backward ? a->dstate : a->final_state);
    s.dy = view(a->dy);
    s.x = view(a->x);
    s.numbers = int64_t{p.docs.n} * p.channels * (p.width - 1);
    if (s.numbers == 0)
        return AM_OK;
    return a->x.dtype == AM_BF16 ? launch<__nv_bfloat16>(p, s, a->backward, stream)
                                 : launch<float>(p, s, a->backward, stream);
}
