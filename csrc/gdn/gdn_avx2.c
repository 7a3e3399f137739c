#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "am_bf16.h"
#include "gdn_plan.h"

#pragma GCC target("avx2,fma")

#include "am_vec_avx2.inc"
#include "gdn_cpu.inc"

const gdn_row am_gdn_avx2 = {"avx2", forward, backward};
