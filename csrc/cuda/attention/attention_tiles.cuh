/* attention_tiles.cuh -- documents and their tiles, as kernels see them.
 *
 * A tile is some consecutive rows of one document and head. The list of work goes document by document in the order of
 * work, head by head (so that one head's keys stay in L2), tile by tile; `first` (from attention_place_tiles) counts a
 * head's tiles before each document, so that a block finds its document by bisection. Everything is read from device
 * memory: a captured graph follows what the buffers hold.
 */
#ifndef ATTENTION_TILES_CUH
#define ATTENTION_TILES_CUH

#include <stdint.h>

struct AttentionView {
    void *data;
    int64_t token, head; /* strides in elements */
};

struct AttentionDocs {
    const int64_t *q, *k; /* [2 N] starts and ends */
    const int64_t *order; /* [N] */
    int64_t n;
};

template <class Place> struct AttentionTile {
    int64_t q0, nq, k0, nk; /* of the document */
    Place head;
    Place index, tiles; /* of the tile in the document; how many there are for each head */
};

/* What stands at a place in the list of work; place < first[docs.n] * heads. Place is an unsigned type wide enough. */
template <class Place>
__device__ inline AttentionTile<Place> attention_tile(const AttentionDocs &docs, const int64_t *first, Place heads,
                                                      Place place)
{
    int64_t low = 0, high = docs.n - 1;
    while (low < high) { /* the last document that starts at or before the place */
        const int64_t middle = low + (high - low + 1) / 2;
        if (static_cast<Place>(first[middle]) * heads <= place)
            low = middle;
        else
            high = middle - 1;
    }
    const int64_t d = docs.order[low];
    AttentionTile<Place> t;
    t.q0 = docs.q[2 * d];
    t.nq = docs.q[2 * d + 1] - t.q0;
    t.k0 = docs.k[2 * d];
    t.nk = docs.k[2 * d + 1] - t.k0;
    t.tiles = static_cast<Place>(first[low + 1] - first[low]);
    place -= static_cast<Place>(first[low]) * heads;
    t.head = place / t.tiles;
    t.index = place % t.tiles;
    return t;
}

/* Keys that query i of the document sees. */
template <class Place> __device__ inline int64_t attention_limit(const AttentionTile<Place> &t, bool causal, int64_t i)
{
    if (!causal)
        return t.nk;
    const int64_t limit = i + 1 + t.nk - t.nq;
    return limit < 0 ? 0 : limit < t.nk ? limit : t.nk;
}

#endif
