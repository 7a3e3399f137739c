/* bf16 operands in tile registers: 16 x 16 sums of C, 32 deep. */
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "am_bf16.h"
#include "attention_plan.h"

#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16,prefer-vector-width=512")

#include "attention_vec512.inc"

enum { MR = 32, MR_TAIL = 16, DEPTH_GRAIN = 16, PT_ROW = ATTENTION_ROWS / 2, PT_DEPTH = 1 };

#include "attention_pairs.inc"

/* GCC's tile intrinsics do not tell the compiler which memory they touch. */
static inline void order_memory(void) { atomic_signal_fence(memory_order_seq_cst); }

static inline void begin(void)
{
    struct {
        uint8_t palette, start_row, zero[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } __attribute__((aligned(64))) config = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        config.row_bytes[t] = 64;
        config.rows[t] = 16;
    }
    order_memory();
    _tile_loadconfig(&config);
}

static inline void end(void) { _tile_release(); }

static inline __attribute__((always_inline)) void load_c(const bool two_rows, const bool two_columns, const float *c,
                                                         int64_t row)
{
    const int64_t bytes = row * (int64_t)sizeof *c;
    _tile_loadd(0, c, bytes);
    if (two_columns)
        _tile_loadd(1, c + 16, bytes);
    if (two_rows)
        _tile_loadd(2, c + 16 * row, bytes);
    if (two_rows && two_columns)
        _tile_loadd(3, c + 16 * row + 16, bytes);
}

static inline __attribute__((always_inline)) void store_c(const bool two_rows, const bool two_columns, float *c,
                                                          int64_t row)
{
    const int64_t bytes = row * (int64_t)sizeof *c;
    _tile_stored(0, c, bytes);
    if (two_columns)
        _tile_stored(1, c + 16, bytes);
    if (two_rows)
        _tile_stored(2, c + 16 * row, bytes);
    if (two_rows && two_columns)
        _tile_stored(3, c + 16 * row + 16, bytes);
}

/* C is tiles 0 to 3, A 4 and 5, B 6 and 7. */
static inline __attribute__((always_inline)) void tile(const int rows, const int vectors, const attention_product *x)
{
    const bool two_rows = rows > 16, two_columns = vectors > 1;
    const int64_t a_bytes = x->a_row * (int64_t)sizeof(word);
    order_memory();
    if (x->add) {
        load_c(two_rows, two_columns, x->c, x->c_row);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t d = 0; d < x->depth; d += DEPTH_GRAIN) {
        const word *const a = (const word *)x->a + d, *const b = (const word *)x->b + d * NR;
        _tile_loadd(4, a, a_bytes);
        _tile_loadd(6, b, NR * sizeof(word));
        _tile_dpbf16ps(0, 4, 6);
        if (two_columns) {
            _tile_loadd(7, b + 16, NR * sizeof(word));
            _tile_dpbf16ps(1, 4, 7);
        }
        if (two_rows) {
            _tile_loadd(5, a + 16 * x->a_row, a_bytes);
            _tile_dpbf16ps(2, 5, 6);
            if (two_columns)
                _tile_dpbf16ps(3, 5, 7);
        }
    }
    store_c(two_rows, two_columns, x->c, x->c_row);
    order_memory();
}

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

#include "attention_cpu.inc"

const attention_row am_attention_amx = {"amx", sizeof(am_bf16), {pack_keys, forward, backward, reduce}};
