#include <math.h>

#include "product_plan.h"

#include "am_vec_scalar.inc"
#include "am_words_fp32.inc"

#include "am_tile.inc"

#include "am_operand.inc"

#include "product_cpu.inc"

const product_fn am_product_scalar = run;
