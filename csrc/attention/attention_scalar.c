/* Plain C: one float a vector. */
#include <math.h>
#include <string.h>

#include "am_bf16.h"
#include "attention_plan.h"

#include "am_vec_scalar.inc"
#include "attention_fp32.inc"
#include "attention_cpu.inc"

const attention_row am_attention_scalar = {"scalar", sizeof(float), {pack_keys, forward, backward, reduce}};
