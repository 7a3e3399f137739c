#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "am_bf16.h"
#include "attention_plan.h"

#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")

#include "am_vec_avx512.inc"
#include "attention_fp32.inc"
#include "attention_cpu.inc"

const attention_row am_attention_avx512 = {"avx512", sizeof(float), {pack_keys, forward, backward, reduce}};
