#include <math.h>

#include "am_math.h"
#include "am_product.h"
#include "mlp_rows.h"

#include "am_vec_scalar.inc"

static inline vf vlookup(const float *table, vf i) { return table[am_bits_of_float(i) & 15u]; }

static inline bool vany(vf x) { return x < 0.0f; }

#include "mlp_cpu.inc"

const mlp_kernels am_mlp_scalar = MLP_KERNELS;
