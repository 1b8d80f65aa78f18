// What the decoding kernel is told: queries, and a cache of pages found through a block table.
#pragma once

#include "params.h"

namespace bfa {

// Key j of sequence b is row j % page_size of page block_table[b][j / page_size % columns], so that
// a table as long as the sequence is paged storage, and a shorter one a ring. A page is cut into
// tiles of min(page_size, 64) keys. Query i stands at position lengths[b] - n_query + i.
struct Decode {
    Element element;
    Form form;
    int64_t batch, heads, kv_heads, n_query, head_dim, value_dim;
    double scale;
    int64_t window;   // visible past keys per query, its own included; larger than any for all
    int64_t n_terms;  // length of a distance table, which begins at distance 0
    int threads;

    int64_t page_size, columns;
    const int64_t* lengths;      // keys of each sequence, (batch,)
    const int32_t* block_table;  // (batch, columns)

    View q;       // element type
    View k, v;    // element type, (pages, kv_heads, page_size, channels)
    View terms;   // real (linear: slopes; distance: table) or float64 (sums: pages, as k without
                  // channels, of all query heads)
    View gain;    // real, one per query; data is null for none
    View o, lse;  // element type; real, natural logarithm

    // What may be left out: tiles that hold at most `tolerance` of each query's softmax mass. 0
    // computes every visible tile, and needs none of these.
    double tolerance;
    View centres;  // of each tile's keys, (pages, kv_heads, tiles of a page, head_dim)
    // (pages, kv_heads, tiles of a page, 2) real: the largest distance of a key from the centre,
    // and the largest length of one; infinite where keys or values are not finite
    View extents;
    // distance: the largest entries of each 64 of the table, real, in both; cumulative: the lowest
    // and highest sum of each tile, float64, (pages, heads, tiles of a page)
    View lowest, highest;

    int64_t group() const { return heads / kv_heads; }
    int64_t tile_keys() const { return page_size < 64 ? page_size : 64; }
    int64_t position(int64_t b, int64_t query) const { return lengths[b] - n_query + query; }
};

}  // namespace bfa
