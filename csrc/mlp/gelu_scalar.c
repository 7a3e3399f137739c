#include <math.h>

#include "am_math.h"
#include "am_product.h"
#include "gelu.h"

#include "am_vec_scalar.inc"

#include "am_vec_exp.inc"

static inline vf vlookup(const float *table, vf i) { return table[am_bits_of_float(i) & 15u]; }

static inline vf vpick(vf x, vf a, vf b) { return x < 0.0f ? a : b; }

static inline bool vany(vf x) { return x < 0.0f; }

static inline void vstore_bf16(am_bf16 *p, vf x) { *p = am_f32_to_bf16(x); }

#include "gelu_cpu.inc"

const gelu_kernels am_gelu_scalar = {gelu, gelu_grad};
