#include <immintrin.h>
#include <math.h>

#include "am_math.h"
#include "am_product.h"
#include "mlp_rows.h"

#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")

#include "am_vec_avx512.inc"

static inline vf vlookup(const float *table, vf i)
{
    return _mm512_permutexvar_ps(_mm512_castps_si512(i), vload(table));
}

static inline bool vany(vf x) { return _mm512_cmp_ps_mask(x, vset(0.0f), _CMP_LT_OQ) != 0; }

#include "mlp_cpu.inc"

const mlp_kernels am_mlp_avx512 = MLP_KERNELS;
