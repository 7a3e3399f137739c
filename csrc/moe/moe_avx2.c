#include <immintrin.h>
#include <math.h>

#include "am_math.h"
#include "am_rows.h"
#include "moe_plan.h"

#pragma GCC target("avx2,fma")

#include "am_vec_avx2.inc"
#include "am_words_fp32.inc"

#include "am_tile.inc"

#include "am_operand.inc"

/* Pairs of rows, fours of rows, then the halves. */
static inline void transpose(word *restrict to, int64_t to_row, const word *restrict from, int64_t from_row)
{
    __m256 x[8], y[8];
    for (int i = 0; i < 8; i++)
        x[i] = _mm256_loadu_ps(from + i * from_row);
    for (int i = 0; i < 8; i += 2) {
        y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
        y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        x[i] = _mm256_shuffle_ps(y[i], y[i + 2], 0x44);
        x[i + 1] = _mm256_shuffle_ps(y[i], y[i + 2], 0xee);
        x[i + 2] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0x44);
        x[i + 3] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(to + i * to_row, _mm256_permute2f128_ps(x[i], x[i + 4], 0x20));
        _mm256_storeu_ps(to + (i + 4) * to_row, _mm256_permute2f128_ps(x[i], x[i + 4], 0x31));
    }
}

#include "moe_cpu.inc"

const moe_row am_moe_avx2 = MOE_KERNELS("avx2");
