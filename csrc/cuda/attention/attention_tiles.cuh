/* attention_tiles.cuh -- documents and their tiles, as kernels see them.
 *
 * A tile is some consecutive rows of one document. Tiles are numbered through all documents, in the order of work;
 * `first` (from attention_place_tiles) holds the number of each document's first one, so that a block finds its
 * document by bisection. Everything is read from device memory: a captured graph follows what the buffers hold.
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

struct AttentionTile {
    int64_t q0, nq, k0, nk; /* of the document */
    int64_t index;          /* of the tile in the document */
    int64_t tiles;          /* of the document */
};

/* `rows` of a tile, of the queries or of the keys; tile < first[docs.n]. */
__device__ inline AttentionTile attention_tile(const AttentionDocs &docs, const int64_t *first, int64_t tile)
{
    int64_t low = 0, high = docs.n - 1;
    while (low < high) { /* the last document that starts at or before the tile */
        const int64_t middle = low + (high - low + 1) / 2;
        if (first[middle] <= tile)
            low = middle;
        else
            high = middle - 1;
    }
    const int64_t d = docs.order[low];
    AttentionTile t;
    t.q0 = docs.q[2 * d];
    t.nq = docs.q[2 * d + 1] - t.q0;
    t.k0 = docs.k[2 * d];
    t.nk = docs.k[2 * d + 1] - t.k0;
    t.index = tile - first[low];
    t.tiles = first[low + 1] - first[low];
    return t;
}

/* Keys that query i of the document sees. */
__device__ inline int64_t attention_limit(const AttentionTile &t, bool causal, int64_t i)
{
    if (!causal)
        return t.nk;
    const int64_t limit = i + 1 + t.nk - t.nq;
    return limit < 0 ? 0 : limit < t.nk ? limit : t.nk;
}

#endif
