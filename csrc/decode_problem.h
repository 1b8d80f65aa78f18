// What the decoding kernel is told: queries, and a cache of pages found through a block table.
#pragma once

#include "problem.h"

namespace bfa {

// Key j of sequence b is row j % page_size of page block_table[b][j / page_size % columns], so that
// a table as long as the sequence is paged storage, and a shorter one a ring. A page is cut into
// tiles of min(page_size, limits::TILE_KEYS) keys. Query i stands at position lengths[b] - n_query
// + i. k and v are (pages, kv_heads, page_size, channels), and so, without channels, is a form
// tensor with numbers of keys, of all query heads. There is neither a plan nor a sequence.
struct Decode : Problem {
    int64_t page_size, columns;
    const int64_t* lengths;      // keys of each sequence, (batch,)
    const int32_t* block_table;  // (batch, columns)
    View o, lse;                 // element type; real, natural logarithm

    // What may be left out: tiles that hold at most `tolerance` of each query's softmax mass. 0
    // computes every visible tile, and needs none of these.
    double tolerance;
    View centres;  // of each tile's keys, (pages, kv_heads, tiles of a page, head_dim)
    // (pages, kv_heads, tiles of a page, 2) real: the largest distance of a key from the centre,
    // and the largest length of one; infinite where keys or values are not finite
    View extents;
    // of a form with numbers of keys, the lowest and highest of each tile, float64, (pages, heads,
    // tiles of a page); of one with numbers of distances, only highest: real, the largest of each
    // limits::PEAK_DISTANCES, (batch, heads, blocks)
    View lowest, highest;

    int64_t tile_keys() const {
        return page_size < limits::TILE_KEYS ? page_size : limits::TILE_KEYS;
    }
    int64_t position(int64_t b, int64_t query) const { return lengths[b] - n_query + query; }
};

}  // namespace bfa
