#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "am_bf16.h"
#include "gdn_plan.h"

#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")

#include "am_vec_avx512.inc"
#include "gdn_cpu.inc"

const gdn_row am_gdn_avx512 = {"avx512", forward, backward};
