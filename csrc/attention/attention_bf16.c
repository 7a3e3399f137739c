/* bf16 operands, two along the depth in one word, multiplied by vdpbf16ps. */
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "am_bf16.h"
#include "attention_plan.h"

#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,prefer-vector-width=512")

#include "am_vec_avx512.inc"
#include "am_vec_exp.inc"
#include "am_words_bf16.inc"

#include "am_tile.inc"

enum { PT_ROW = 1, PT_DEPTH = ATTENTION_KEYS };

/* Rows as the depth: the pairs of rows are what the broadcast of `tile` reads. */
static void pack_across(word *restrict to, const float *restrict from, int64_t rows, int64_t keys)
{
    for (int64_t r = 0; r < rows; r += 2, from += 2 * ATTENTION_KEYS, to += ATTENTION_KEYS)
        for (int64_t j = 0; j < keys; j += VL)
            _mm512_storeu_si512(to + j, round_pairs(vload(from + j), vload(from + ATTENTION_KEYS + j)));
}

#include "attention_pairs.inc"
#include "attention_cpu.inc"

const attention_row am_attention_bf16 = {"avx512_bf16", sizeof(am_bf16), {pack_keys, forward, backward, reduce}};
