#include <math.h>

#include "am_product.h"
#include "norm_rows.h"

#include "am_vec_scalar.inc"

static inline void vadd_wide(double *p, vf x) { *p += (double)x; }

#include "layer.inc"

const layer_kernels am_layer_scalar = {layer, layer_grad};
