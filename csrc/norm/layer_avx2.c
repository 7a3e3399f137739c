#include <immintrin.h>
#include <math.h>

#include "am_product.h"
#include "norm_rows.h"

#pragma GCC target("avx2,fma")

#include "am_vec_avx2.inc"

static inline void vadd_wide(double *p, vf x)
{
    const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x)), high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
    _mm256_storeu_pd(p, _mm256_add_pd(_mm256_loadu_pd(p), low));
    _mm256_storeu_pd(p + 4, _mm256_add_pd(_mm256_loadu_pd(p + 4), high));
}

#include "layer.inc"

const layer_kernels am_layer_avx2 = {layer, layer_grad};
