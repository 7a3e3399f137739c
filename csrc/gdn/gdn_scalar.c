/* Plain C: one float a vector. */
#include <math.h>
#include <string.h>

#include "am_bf16.h"
#include "gdn_plan.h"

#include "am_vec_scalar.inc"
#include "gdn_cpu.inc"

const gdn_row am_gdn_scalar = {"scalar", forward, backward};
