#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "am_bf16.h"
#include "attention_plan.h"

#pragma GCC target("avx2,fma")

#include "am_vec_avx2.inc"
#include "attention_fp32.inc"
#include "attention_cpu.inc"

const attention_row am_attention_avx2 = {"avx2", sizeof(float), {pack_keys, forward, backward, reduce}};
