// Arguments of the decoding kernel: queries, and a paged cache addressed through a block table.
#pragma once

#include "problem.h"

namespace bfa {

// Key j of sequence b is row j % page_size of page block_table[b][j / page_size % columns]: a table
// that covers the sequence is paged storage, and a shorter one is a ring buffer. A page is divided
// into tiles of min(page_size, constants::TILE_KEYS) keys. Query i has position lengths[b] -
// n_query + i. k and v are (pages, kv_heads, page_size, channels); a per-key form tensor is (pages,
// heads, page_size), or has channels in addition. first_key, end_key and sequences are not used.
struct Decode : Problem {
    int64_t page_size, columns;
    const int64_t* lengths;      // number of keys of each sequence, (batch,)
    const int32_t* block_table;  // (batch, columns)
    View o;                      // element type
    View lse;                    // real, natural logarithm

    // Tiles that together hold at most a fraction `tolerance` of every query's softmax mass may be
    // skipped. With 0, every visible tile is computed and the views below are not read.
    double tolerance;
    View centres;  // centre of each tile's keys, (pages, kv_heads, tiles per page, head_dim)
    // (pages, kv_heads, tiles per page, 2), real: the largest distance of a key from the centre,
    // and the largest norm of a key; infinite where keys or values are not finite
    View extents;
    // For a form with a per-key tensor, as far as the form needs them: its minimum and maximum in
    // each tile or, for vectors, their largest norm, (pages, heads, tiles per page).
    View lowest, highest;
    // The same for tables over distances: those of each block of constants::PEAK_DISTANCES entries,
    // real, (batch, heads, blocks).
    View table_lowest, table_highest;

    int64_t tile_keys() const {
        return page_size < constants::TILE_KEYS ? page_size : constants::TILE_KEYS;
    }
    int64_t position(int64_t b, int64_t query) const { return lengths[b] - n_query + query; }
};

}  // namespace bfa
