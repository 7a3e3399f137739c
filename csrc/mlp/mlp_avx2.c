#include <immintrin.h>
#include <math.h>

#include "am_math.h"
#include "am_product.h"
#include "mlp_rows.h"

#pragma GCC target("avx2,fma")

#include "am_vec_avx2.inc"

static inline vf vlookup(const float *table, vf i)
{
    const __m256i at = _mm256_castps_si256(i);
    const vf low = _mm256_permutevar8x32_ps(vload(table), at), high = _mm256_permutevar8x32_ps(vload(table + VL), at);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(at, 28)));
}

static inline bool vany(vf x) { return _mm256_movemask_ps(_mm256_cmp_ps(x, vset(0.0f), _CMP_LT_OQ)) != 0; }

#include "mlp_cpu.inc"

const mlp_kernels am_mlp_avx2 = MLP_KERNELS;
