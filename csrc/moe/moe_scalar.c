/* Plain C: one float a vector. */
#include <math.h>

#include "am_math.h"
#include "am_rows.h"
#include "moe_plan.h"

#include "am_vec_scalar.inc"
#include "am_words_fp32.inc"

#include "am_tile.inc"

#include "am_operand.inc"

static inline void transpose(word *to, int64_t to_row, const word *from, int64_t from_row)
{
    (void)to_row, (void)from_row;
    *to = *from;
}

#include "moe_cpu.inc"

const moe_row am_moe_scalar = MOE_KERNELS("scalar");
