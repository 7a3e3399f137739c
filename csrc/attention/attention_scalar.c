/* Plain C: one float a vector. */
#include <math.h>
#include <string.h>

#include "am_bf16.h"
#include "attention_plan.h"

enum { VL = 1, MR = 4, MR_TAIL = 4 };
typedef float vf;

static inline vf vload(const float *p) { return *p; }
static inline void vstore(float *p, vf x) { *p = x; }
static inline vf vset(float x) { return x; }
static inline vf vadd(vf a, vf b) { return a + b; }
static inline vf vsub(vf a, vf b) { return a - b; }
static inline vf vmul(vf a, vf b) { return a * b; }
static inline vf vdiv(vf a, vf b) { return a / b; }
static inline vf vfma(vf a, vf b, vf c) { return a * b + c; }
static inline vf vmax(vf a, vf b) { return a > b ? a : b; } /* b when either is NaN */
static inline vf vround(vf a) { return rintf(a); }
static inline vf vscalb(vf a, vf n) { return ldexpf(a, n == n ? (int)n : 0); }
static inline vf vzero_below(vf x, float limit, vf y) { return x < limit ? 0.0f : y; }
static inline float vhsum(vf a) { return a; }
static inline float vhmax(vf a) { return a; }
static inline float vfirst(vf a) { return a; }
static inline vf vload_bf16(const am_bf16 *p) { return am_bf16_to_f32(*p); }

#include "attention_fp32.inc"
#include "attention_cpu.inc"

const attention_row am_attention_scalar = {"scalar", sizeof(float), {pack_keys, forward, backward, reduce}};
