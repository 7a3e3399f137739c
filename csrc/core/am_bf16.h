/* am_bf16.h -- bfloat16 as the upper half of a float32. Rounds to nearest even; NaN stays NaN. */
#ifndef AM_BF16_H
#define AM_BF16_H

#include <stdint.h>
#include <string.h>

typedef uint16_t am_bf16;

static inline float am_bf16_to_f32(am_bf16 x)
{
    const uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static inline am_bf16 am_f32_to_bf16(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t quiet_nan = (bits >> 16) | 0x40u;
    return (am_bf16)((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
}

#endif
