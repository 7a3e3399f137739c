#include <immintrin.h>
#include <math.h>

#include "am_math.h"
#include "am_product.h"
#include "gelu.h"

#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")

#include "am_vec_avx512.inc"

#include "am_vec_exp.inc"

static inline vf vlookup(const float *table, vf i)
{
    return _mm512_permutexvar_ps(_mm512_castps_si512(i), vload(table));
}

static inline vf vpick(vf x, vf a, vf b)
{
    return _mm512_mask_mov_ps(b, _mm512_cmp_ps_mask(x, vset(0.0f), _CMP_LT_OQ), a);
}

static inline bool vany(vf x) { return _mm512_cmp_ps_mask(x, vset(0.0f), _CMP_LT_OQ) != 0; }

static inline void vstore_bf16(am_bf16 *p, vf x)
{
    const __m512i bits = _mm512_castps_si512(x), high = _mm512_srli_epi32(bits, 16);
    const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    const __m512i near =
        _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __m512i nan = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
    const __m512i y = _mm512_mask_mov_epi32(near, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), nan);
    _mm256_storeu_si256((void *)p, _mm512_cvtepi32_epi16(y));
}

#include "gelu_cpu.inc"

const gelu_kernels am_gelu_avx512 = {gelu, gelu_grad};
