/* rope_angles.h -- what the operators that turn heads share on the CPU: checks, and a token's cosines and sines. */
#ifndef AM_ROPE_ANGLES_H
#define AM_ROPE_ANGLES_H

#include "rope.h"

typedef struct am_rope_angles {
    int64_t pairs;
    double frequency[AM_ROPE_MAX_PAIRS];
    int axis[AM_ROPE_MAX_PAIRS];
} am_rope_angles;

/* All arguments but q_out and k_out; `name` is set. */
am_status am_rope_check(const am_rope_args *a);

/* A tensor of heads [T, heads, D] beside q. */
am_status am_rope_check_heads(const char *fn, const char *name, const am_tensor *t, const am_tensor *q);
am_status am_rope_check_output(const char *fn, const char *name, const am_tensor *out, const am_tensor *in);

am_rope_angles am_rope_angles_of(const am_rope_args *a);
void am_rope_cos_sin(float *cosine, float *sine, const am_rope_angles *of, const am_rope_args *a, int64_t token);

#endif
