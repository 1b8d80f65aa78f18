// Locates the keys of a sequence in the pages of a cache, and the keys visible to a query.
#pragma once

#include "../decode_problem.h"
#include "visibility.h"

namespace bfa::BFA_KERNELS {

// The location of a key: its page, its row in the page, and the index of its tile in the page.
struct PageSlot {
    int64_t page, row, tile;
};

inline PageSlot slot_of(const Decode& p, int64_t b, int64_t key) {
    const int64_t column = key / p.page_size % p.columns, row = key % p.page_size;
    return {p.block_table[b * p.columns + column], row, row / p.tile_keys()};
}

// Returns the row of a key in a view whose batch dimension is the pages.
template <class T = char>
T* row_at(const View& pages, const PageSlot& slot, int64_t head) {
    return pages.at<T>(slot.page, head, slot.row);
}

template <class T>
T* tile_at(const View& pages, const PageSlot& slot, int64_t head) {
    return pages.at<T>(slot.page, head, slot.tile);
}

// Consecutive queries of all heads that share a key head. With n queries, row r is query
// queries.begin + r % n of head first_head + r / n.
struct RowBlock {
    int64_t b, kv_head, first_head;
    Range queries;
    int rows;
    int64_t first_position, last_position;

    RowBlock(const Decode& p, int64_t b_, int64_t kv_head_, Range queries_)
        : b(b_),
          kv_head(kv_head_),
          first_head(kv_head_ * p.group()),
          queries(queries_),
          rows(int(p.group() * (queries_.end - queries_.begin))),
          first_position(p.position(b_, queries_.begin)),
          last_position(p.position(b_, queries_.end - 1)) {}

    int64_t head(int row) const { return first_head + row / (queries.end - queries.begin); }
    int64_t query(int row) const { return queries.begin + row % (queries.end - queries.begin); }
    int64_t position(int row) const { return first_position + query(row) - queries.begin; }

    // The tiles with keys that are visible to at least one row.
    Range tiles(const Decode& p) const {
        const int64_t begin = std::max<int64_t>(0, first_position - p.window + 1);
        if (last_position < begin) return {0, 0};
        return {begin / p.tile_keys(), last_position / p.tile_keys() + 1};
    }

    // The columns of the tile `keys` that are visible to a row.
    Range visible(const Decode& p, int row, Range keys) const {
        const int64_t end = position(row) + 1;
        return Range{end - p.window, end}.relative_to(keys.begin, keys.end - keys.begin);
    }
    bool all_visible(const Decode& p, Range keys) const {
        return keys.end <= first_position + 1 && keys.begin > last_position - p.window;
    }
};

}  // namespace bfa::BFA_KERNELS
