/* gdn_bwd_sm90.cuh -- scratch of the Hopper backward pass: of one segment, and what the segments leave each other. */
#ifndef GDN_BWD_SM90_CUH
#define GDN_BWD_SM90_CUH

#include "gdn_sm90.cuh"

namespace gdn_sm90
{

struct Backward {
    Prepared made;
    __nv_bfloat16 *v_new, *dr; /* [tokens, Hv, 128] from the segment's first token on: V', gradient of R */
    __nv_bfloat16 *s, *ds;  /* [places, Hv, 128 values, 128 keys], place token / 64: S before a chunk, dS after the one
                               before it */
    float *carry;           /* [2, Hv, 128 keys, 128 values] */
    int64_t tokens, places; /* room for */
};

inline Backward place_backward(const am_gdn_args *a, Place *place)
{
    const int64_t most = gdn::kSegment + AM_GDN_STEP, tokens = a->q.shape[0], heads = a->v.shape[1];
    Backward b;
    b.tokens = tokens < most ? tokens : most;
    b.places = b.tokens / kChunk + 1;
    b.made = place_prepared(place, b.tokens, heads, true);
    b.v_new = place->take<__nv_bfloat16>(b.tokens * heads * kDim);
    b.dr = place->take<__nv_bfloat16>(b.tokens * heads * kDim);
    b.s = place->take<__nv_bfloat16>(b.places * heads * kDim * kDim);
    b.ds = place->take<__nv_bfloat16>(b.places * heads * kDim * kDim);
    b.carry = place->take<float>(2 * heads * kDim * kDim);
    return b;
}

am_status repeat(const am_gdn_args *a, const Call &p, const Backward &b, cudaStream_t stream);
am_status reverse(const am_gdn_args *a, const Call &p, const Backward &b, cudaStream_t stream);
am_status gradients(const am_gdn_args *a, const Call &p, const Backward &b, cudaStream_t stream);

} // namespace gdn_sm90

#endif
