#include <immintrin.h>
#include <math.h>

#include "am_math.h"
#include "am_product.h"
#include "gelu.h"

#pragma GCC target("avx2,fma")

#include "am_vec_avx2.inc"

#include "am_vec_exp.inc"

static inline vf vlookup(const float *table, vf i)
{
    const __m256i at = _mm256_castps_si256(i);
    const vf low = _mm256_permutevar8x32_ps(vload(table), at), high = _mm256_permutevar8x32_ps(vload(table + VL), at);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(at, 28)));
}

static inline vf vpick(vf x, vf a, vf b) { return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, vset(0.0f), _CMP_LT_OQ)); }

static inline bool vany(vf x) { return _mm256_movemask_ps(_mm256_cmp_ps(x, vset(0.0f), _CMP_LT_OQ)) != 0; }

static inline void vstore_bf16(am_bf16 *p, vf x)
{
    const __m256i bits = _mm256_castps_si256(x), high = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    const __m256i near =
        _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i nan = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    const __m256i y = _mm256_blendv_epi8(near, nan, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
    _mm_storeu_si128((void *)p, _mm_packus_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1)));
}

#include "gelu_cpu.inc"

const gelu_kernels am_gelu_avx2 = {gelu, gelu_grad};
