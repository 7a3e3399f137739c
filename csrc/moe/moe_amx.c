/* bf16 operands in tile registers: 16 x 16 sums of C, 32 deep. */
#include <immintrin.h>
#include <math.h>

#include "am_math.h"
#include "am_rows.h"
#include "moe_plan.h"

#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16,prefer-vector-width=512")

#include "am_vec_avx512.inc"
#include "am_words_bf16.inc"

#include "am_tile_amx.inc"

#include "am_operand.inc"

#include "moe_transpose512.inc"

#include "moe_cpu.inc"

const moe_row am_moe_amx = MOE_KERNELS("amx");
