#include <immintrin.h>
#include <math.h>

#include "product_plan.h"

#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16,prefer-vector-width=512")

#include "am_vec_avx512.inc"
#include "am_words_bf16.inc"

#include "am_tile_amx.inc"

#include "am_operand.inc"

#include "product_cpu.inc"

const product_fn am_product_amx = run;
