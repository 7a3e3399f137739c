/* gdn_rows.h -- the rows of the gated delta rule's dispatch tables, and what they share on the host. */
#ifndef GDN_ROWS_H
#define GDN_ROWS_H

#include "gdn_call.cuh"

typedef am_status (*gdn_run_fn)(const am_gdn_args *a, cudaStream_t stream);

struct GdnRow {
    const char *name;
    bool (*fits)(const am_gdn_args *a);
    gdn_run_fn run;
    size_t (*scratch)(const am_gdn_args *a); /* bytes; reads q, v and docs */
};

/* The call as kernels see it; without scratch. */
gdn::Call gdn_call(const am_gdn_args *a);

/* Zeros in the tokens outside every document: o, or all gradients. */
am_status gdn_fill_gaps(const am_gdn_args *a, bool backward, cudaStream_t stream);

bool gdn_forward_fits_sm90(const am_gdn_args *a);
am_status gdn_forward_sm90(const am_gdn_args *a, cudaStream_t stream);
size_t gdn_forward_sm90_scratch(const am_gdn_args *a);

bool gdn_backward_fits_sm90(const am_gdn_args *a);
am_status gdn_backward_sm90(const am_gdn_args *a, cudaStream_t stream);
size_t gdn_backward_sm90_scratch(const am_gdn_args *a);

am_status gdn_forward_simple(const am_gdn_args *a, cudaStream_t stream);
am_status gdn_backward_simple(const am_gdn_args *a, cudaStream_t stream);
size_t gdn_backward_simple_scratch(const am_gdn_args *a);

/* One segment's states and V' again, from the states that were kept: scratch s and v_new. */
am_status gdn_repeat_simple(const gdn::Call &p, bool bf16, cudaStream_t stream);

#endif
