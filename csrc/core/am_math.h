/* am_math.h -- elementary functions in plain C that the compiler vectorises under each slice's target attribute.
 *
 * No branches, no tables, no errno; products are rounded apart, so every instruction set gives the same bits. NaN stays
 * NaN, and overflow and underflow go to infinity and 0. Largest errors over every 61st float: am_expf 1.0 ulp,
 * am_sigmoidf (from -87 on) 2.4 ulp; over every 244th: am_log1p_unitf 1.9 ulp.
 */
#ifndef AM_MATH_H
#define AM_MATH_H

#include <math.h>
#include <stdint.h>
#include <string.h>

static inline float am_float_of_bits(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static inline uint32_t am_bits_of_float(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

/* e^x = 2^n e^r with |r| <= ln(2) / 2. Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits. 2^n is
 * applied in two halves, so that results below 2^-126 are right. The polynomial is Cephes'. */
static inline float am_expf(float x)
{
    const float round = 12582912.0f;
    x = x > 89.0f ? 89.0f : x;
    x = x < -104.0f ? -104.0f : x;
    const float shifted = x * 1.44269504f + round;
    const float n = shifted - round;
    const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    const float y = (p * (r * r) + r) + 1.0f;
    const int32_t whole = (int32_t)(am_bits_of_float(shifted) - am_bits_of_float(round));
    const int32_t half = whole >> 1;
    const float low = am_float_of_bits(((uint32_t)half + 127u) << 23);
    const float high = am_float_of_bits(((uint32_t)whole - (uint32_t)half + 127u) << 23);
    return y * low * high;
}

static inline float am_sigmoidf(float x) { return 1.0f / (1.0f + am_expf(-x)); }

/* log(1 + t), t in [0, 1], as 2 atanh(t / (2 + t)). The polynomial is a least squares fit of the relative error. */
static inline float am_log1p_unitf(float t)
{
    const float z = t / (2.0f + t), s = z * z;
    float p = 2.4301669e-1f;
    p = p * s + 2.1427186e-1f;
    p = p * s + 2.8616965e-1f;
    p = p * s + 3.9998874e-1f;
    p = p * s + 6.6666675e-1f;
    return p * s * z + 2.0f * z;
}

#endif
