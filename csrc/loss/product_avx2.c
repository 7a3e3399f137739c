#include <immintrin.h>
#include <math.h>

#include "product_plan.h"

#pragma GCC target("avx2,fma")

#include "am_vec_avx2.inc"
#include "am_words_fp32.inc"

#include "am_tile.inc"

#include "am_operand.inc"

#include "product_cpu.inc"

const product_fn am_product_avx2 = run;
