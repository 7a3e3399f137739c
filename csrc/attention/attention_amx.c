/* bf16 operands in tile registers: 16 x 16 sums of C, 32 deep. */
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "am_bf16.h"
#include "attention_plan.h"

#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16,prefer-vector-width=512")

#include "am_vec_avx512.inc"
#include "am_vec_exp.inc"
#include "am_words_bf16.inc"

#include "am_tile_amx.inc"

enum { PT_ROW = ATTENTION_ROWS / 2, PT_DEPTH = 1 };

/* Rows as the depth, which lies along the rows of tile registers: pairs of rows, transposed. */
static void pack_across(word *restrict to, const float *restrict from, int64_t rows, int64_t keys)
{
    for (int64_t r = 0; r < rows; r += 2, from += 2 * ATTENTION_KEYS)
        for (int64_t j = 0; j < keys; j += VL) {
            word pairs[VL];
            _mm512_storeu_si512(pairs, round_pairs(vload(from + j), vload(from + ATTENTION_KEYS + j)));
            for (int64_t i = 0; i < VL; i++)
                to[(j + i) * PT_ROW + r / 2] = pairs[i];
        }
}

#include "attention_pairs.inc"
#include "attention_cpu.inc"

const attention_row am_attention_amx = {"amx", sizeof(am_bf16), {pack_keys, forward, backward, reduce}};
