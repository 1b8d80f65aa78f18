// Which keys a query sees, and which parts of a tile need a mask.
#pragma once

#include <algorithm>

#include "../params.h"
#include "arithmetic.h"

namespace bfa::BFA_ISA {

struct Range {
    int64_t begin, end;

    bool empty() const { return begin >= end; }

    Range shifted_into(int64_t origin, int64_t length) const {
        return {std::clamp<int64_t>(begin - origin, 0, length),
                std::clamp<int64_t>(end - origin, 0, length)};
    }
};

// Both ends never decrease from one query to the next.
inline Range visible_keys(const Problem& problem, int64_t query) {
    const int64_t position = problem.position(query);
    return {std::max<int64_t>(0, position - problem.window + 1),
            problem.causal ? std::min(problem.n_key, position + 1) : problem.n_key};
}

// The queries that see at least one of the keys [keys.begin, keys.end).
inline Range visible_queries(const Problem& problem, Range keys) {
    const int64_t first_position = problem.position(0);
    return {problem.causal ? std::max<int64_t>(0, keys.begin - first_position) : 0,
            std::min(problem.n_query, keys.end - 1 + problem.window - first_position)};
}

enum class Coverage { none, partial, full };

// How much of the tile `keys` a strip of queries sees. Only a whole strip sees a whole tile in
// full, so that the loops of that case have constant lengths.
inline Coverage coverage(const Problem& problem, Range queries, Range keys) {
    const Range first = visible_keys(problem, queries.begin);
    const Range last = visible_keys(problem, queries.end - 1);
    if (last.end <= keys.begin || first.begin >= keys.end) return Coverage::none;
    const bool full = queries.end - queries.begin == kStripRows &&
                      first.end >= keys.begin + kTile && last.begin <= keys.begin;
    return full ? Coverage::full : Coverage::partial;
}

// value in the columns [visible.begin, visible.end) of a row, otherwise elsewhere.
template <class Real>
BFA_INLINE Vector<Real> where_visible(Range visible, int column, Vector<Real> value,
                                      Vector<Real> otherwise) {
    const Vector<Real> c = iota<Real>() + Real(column);
    const Vector<Real> kept = c >= Real(visible.begin) ? value : otherwise;
    return c < Real(visible.end) ? kept : otherwise;
}

}  // namespace bfa::BFA_ISA
