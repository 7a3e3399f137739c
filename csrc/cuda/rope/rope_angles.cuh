/* rope_angles.cuh -- where heads lie, and tables of cosines and sines, for rope_norm. rope.cu, which has run, has its
 * own of both: sharing these changes its machine code, which is for when there is a GPU to run it on.
 */
#ifndef ROPE_ANGLES_CUH
#define ROPE_ANGLES_CUH

#include "rows.cuh"

#include <math.h>

extern "C" {
#include "rope.h"
}

namespace ropes
{

struct Heads {
    const char *in;
    char *out;
    int64_t in_token, in_head; /* bytes */
    int64_t out_token;
};

inline Heads heads_of(const am_tensor &in, const am_tensor &out)
{
    const int64_t size = static_cast<int64_t>(am_dtype_size(in.dtype));
    return {static_cast<const char *>(in.data), static_cast<char *>(out.data), in.stride[0] * size, in.stride[1] * size,
            in.shape[1] * in.shape[2] * size};
}

struct Angles {
    const void *positions;
    int64_t axis_stride, token_stride; /* elements of positions */
    rows::Divisor pairs;               /* of a head */
    bool wide;                         /* int64 positions */
    double sign;
    double frequency[AM_ROPE_MAX_PAIRS];
    uint8_t axis[AM_ROPE_MAX_PAIRS];
};

inline Angles angles_of(const am_rope_args *a)
{
    Angles of = {};
    const int64_t pairs = a->rotary_dim / 2, half = pairs / 2;
    for (int64_t i = 0; i < pairs; i++) {
        const double exponent = a->vision ? 2.0 * static_cast<double>(i % half) / static_cast<double>(pairs)
                                          : 2.0 * static_cast<double>(i) / static_cast<double>(a->rotary_dim);
        of.frequency[i] = pow(a->theta, -exponent);
        if (a->vision)
            of.axis[i] = i >= half;
        else
            of.axis[i] = i % 3 != 0 && i < 3 * a->section.data[i % 3] ? static_cast<uint8_t>(i % 3) : 0;
    }
    of.pairs = rows::divisor(static_cast<uint32_t>(pairs));
    of.sign = a->inverse ? -1.0 : 1.0;
    const am_tensor &p = a->positions;
    of.positions = p.data;
    of.axis_stride = p.ndim == 1 ? 0 : p.stride[0];
    of.token_stride = p.stride[p.ndim - 1];
    of.wide = p.dtype == AM_I64;
    return of;
}

/* Cosine and sine, the same reduction and polynomials as rope_cpu.inc's. */
__device__ inline float2 cos_sin(double angle)
{
    const double turns = rint(angle * 0.63661977236758134308);
    const float r = static_cast<float>((angle - turns * 1.57079632673412561417) - turns * 6.07710050650619224932e-11);
    const int quadrant = static_cast<int>(static_cast<int64_t>(turns) & 3);
    const float s = r * r;
    const float sin_r = ((-1.9515295891e-4f * s + 8.3321608736e-3f) * s - 1.6666654611e-1f) * s * r + r;
    const float cos_r =
        ((2.443315711809948e-5f * s - 1.388731625493765e-3f) * s + 4.166664568298827e-2f) * s * s - 0.5f * s + 1.0f;
    const float c = quadrant & 1 ? sin_r : cos_r, d = quadrant & 1 ? cos_r : sin_r;
    return make_float2(quadrant == 1 || quadrant == 2 ? -c : c, quadrant & 2 ? -d : d);
}

__device__ inline int64_t position_at(const Angles &of, int64_t token, uint32_t pair)
{
    const int64_t at = of.axis[pair] * of.axis_stride + token * of.token_stride;
    return of.wide ? static_cast<const int64_t *>(of.positions)[at] : static_cast<const int32_t *>(of.positions)[at];
}

__device__ inline float2 turn_by(const Angles &of, int64_t position, uint32_t pair)
{
    return cos_sin(of.sign * static_cast<double>(position) * of.frequency[pair]);
}

/* table[token, pair] of `tokens` tokens from `first` on, by the whole block. */
__device__ inline void fill_table(const Angles &of, int64_t first, uint32_t tokens, float2 *table)
{
    for (uint32_t i = threadIdx.x; i < tokens * of.pairs.by; i += blockDim.x) {
        const uint32_t token = rows::divide(i, of.pairs), pair = i - token * of.pairs.by;
        table[i] = turn_by(of, position_at(of, first + token, pair), pair);
    }
}

} // namespace ropes

#endif
