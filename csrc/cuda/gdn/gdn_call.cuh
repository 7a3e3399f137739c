/* gdn_call.cuh -- what the kernels of the gated delta rule share: a call as the device sees it, and where documents,
 * their steps of 1,024 tokens and their chunks of 64 are.
 *
 * The backward pass goes through the token axis in segments from the last to the first, so that scratch does not grow
 * with the pack: a step belongs to the segment that its first token lies in, a chunk to its step's. Of a document's
 * states those before chunks 1, 2, .. are kept or made again; their first tokens are at least 64 apart (1,024 for kept
 * ones), in one document as in the next, so token / 64 is a place that no two of them share.
 */
#ifndef GDN_CALL_CUH
#define GDN_CALL_CUH

#include <stdint.h>

#include <cuda_bf16.h>

#include "cuda_check.h"

extern "C" {
#include "gdn.h"
}

namespace gdn
{

constexpr int kChunk = 64;
constexpr int64_t kStepChunks = AM_GDN_STEP / kChunk;
constexpr int64_t kSegment = 8192; /* tokens; a multiple of AM_GDN_STEP */

/* [T, heads, dim], or [T, heads] of either dtype. */
struct View {
    void *data;
    int64_t token, head; /* elements */
    bool bf16;

    __device__ float number(int64_t t, int64_t h) const
    {
        const int64_t e = t * token + h * head;
        return bf16 ? __bfloat162float(static_cast<const __nv_bfloat16 *>(data)[e])
                    : static_cast<const float *>(data)[e];
    }
    __device__ void set_number(int64_t t, int64_t h, float x) const
    {
        const int64_t e = t * token + h * head;
        if (bf16)
            static_cast<__nv_bfloat16 *>(data)[e] = __float2bfloat16_rn(x);
        else
            static_cast<float *>(data)[e] = x;
    }
};

/* One head's state [Dk, Dv]; data is null for zeros. */
struct State {
    float *data;
    int64_t row;
};

/* [.., Hv, Dk, Dv]; data is null where the tensor was not given. */
struct States {
    float *data;
    int64_t first, head, row;

    __device__ State at(int64_t n, int64_t h) const
    {
        return {data == nullptr ? nullptr : data + n * first + h * head, row};
    }
};

struct Call {
    View q, k, v, o, dout, dq, dk, dv, g, beta, dg, dbeta;
    States initial, final, kept, dfinal, dinitial;
    const int64_t *docs, *order;
    int64_t n_docs, tokens;
    int key_heads, value_heads, group, key_dim, value_dim;
    int slices; /* of 64 values */
    float scale;
    bool l2norm;

    /* backward: one segment */
    int64_t low, high;   /* its tokens; the last one's high is INT64_MAX */
    States s, ds;        /* before chunk [token / 64 - low / 64]; dS after a chunk, by the next one */
    States carry;        /* dS of the one document that goes on in the next segment; two, for segments in turn */
    View v_new, dr;      /* float32 [token - low, Hv, Dv]: V', gradient of R */
    View dq_sum, dk_sum; /* float32 [token - low, Hk, Dk]: over value heads */

    /* What a document's steps in later segments leave to this one, or (-1) this one to the segment before. */
    __device__ State into_segment(int64_t offset, int64_t h) const
    {
        return carry.at((low / kSegment + offset) & 1, h);
    }
    __device__ int64_t start(int64_t d) const { return __ldg(docs + 2 * d); }
    __device__ int64_t end(int64_t d) const { return __ldg(docs + 2 * d + 1); }

    /* The state before chunk c > 0 of a document, once it was kept or made again. */
    __device__ State before(int64_t doc, int64_t doc_start, int64_t c, int64_t h) const
    {
        const int64_t token = doc_start + c * kChunk;
        if (c == 0)
            return initial.at(doc, h);
        return c % kStepChunks == 0 ? kept.at(token / AM_GDN_STEP - 1, h) : s.at((token - low) / kChunk, h);
    }
};

__device__ inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

__device__ inline int64_t pieces(int64_t n, int64_t size) { return n > 0 ? (n + size - 1) / size : 0; }

/* The first of [low, high) that `is` true of; `is` never becomes false again. */
template <typename Is> __device__ int64_t first_that(int64_t low, int64_t high, const Is &is)
{
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (is(middle))
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* The documents with a step in the segment, or without rows and inside it. */
struct Range {
    int64_t first, last; /* last: one past */
};

__device__ inline Range documents_of(const Call &p)
{
    const auto reaches = [&](int64_t d) { return p.end(d) > p.low || p.start(d) >= p.low; };
    const auto begins_after = [&](int64_t d) { return p.start(d) >= p.high; };
    const int64_t first = first_that(0, p.n_docs, reaches);
    return {first, first_that(first, p.n_docs, begins_after)};
}

/* The segment's steps of a document: [first, last). */
__device__ inline Range steps_of(const Call &p, int64_t start, int64_t end)
{
    Range r;
    r.first = pieces(p.low - start, AM_GDN_STEP);
    r.last = pieces(end - start, AM_GDN_STEP);
    if (p.high != INT64_MAX)
        r.last = least(r.last, pieces(p.high - start, AM_GDN_STEP));
    return r;
}

__device__ inline Range chunks_of(const Call &p, int64_t start, int64_t end)
{
    const Range steps = steps_of(p, start, end);
    const int64_t n = pieces(end - start, kChunk); /* no step of it may begin in the segment */
    return {least(steps.first * kStepChunks, n), least(steps.last * kStepChunks, n)};
}

/* A document's pieces have the places from start / size + its number on, which no other document's have. */
struct Place {
    int64_t doc, index; /* doc: -1 where the place is nobody's */
};

template <int64_t kSize> __device__ int64_t place_of(const Call &p, int64_t doc) { return p.start(doc) / kSize + doc; }

template <int64_t kSize> __device__ Range own_of(const Call &p, int64_t doc)
{
    return kSize == kChunk ? chunks_of(p, p.start(doc), p.end(doc)) : steps_of(p, p.start(doc), p.end(doc));
}

/* All places that the segment's pieces of these documents have, [first, last), with others among them. */
template <int64_t kSize> __device__ Range places_of(const Call &p, const Range &docs)
{
    if (docs.first >= docs.last)
        return {0, 0};
    const int64_t d = docs.last - 1;
    return {place_of<kSize>(p, docs.first) + own_of<kSize>(p, docs.first).first,
            place_of<kSize>(p, d) + own_of<kSize>(p, d).last};
}

template <int64_t kSize> __device__ Place find(const Call &p, const Range &docs, int64_t place)
{
    const auto is_behind = [&](int64_t d) { return place_of<kSize>(p, d) > place; };
    const int64_t d = first_that(docs.first, docs.last, is_behind) - 1;
    if (d < docs.first)
        return {-1, 0};
    const int64_t index = place - place_of<kSize>(p, d);
    const Range own = own_of<kSize>(p, d);
    return {index >= own.first && index < own.last ? d : -1, index};
}

} // namespace gdn

#endif
