#include <immintrin.h>
#include <math.h>

#include "am_math.h"
#include "am_rows.h"
#include "moe_plan.h"

#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")

#include "am_vec_avx512.inc"
#include "am_words_fp32.inc"

#include "am_tile.inc"

#include "am_operand.inc"

#include "moe_transpose512.inc"

#include "moe_cpu.inc"

const moe_row am_moe_avx512 = MOE_KERNELS("avx512");
