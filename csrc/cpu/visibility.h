// The keys that a query attends to, and the parts of a tile that need a mask.
#pragma once

#include <algorithm>

#include "../problem.h"
#include "arithmetic.h"

namespace bfa::BFA_KERNELS {

struct Range {
    int64_t begin, end;

    bool empty() const { return begin >= end; }

    Range relative_to(int64_t origin, int64_t length) const {
        return {std::clamp<int64_t>(begin - origin, 0, length),
                std::clamp<int64_t>(end - origin, 0, length)};
    }
};

// The keys that the queries of one head attend to: the visible ones that are in the plan, if any.
class Visibility {
public:
    explicit Visibility(const Problem& problem) : p_(problem) {}

    void begin_head(int64_t b, int64_t h) {
        if (!p_.first_key.data) return;
        first_ = p_.first_key.at<int32_t>(b, h), end_ = p_.end_key.at<int32_t>(b, h);
    }

    // Neither end decreases from one query to the next.
    Range keys(int64_t query) const {
        const int64_t position = p_.position(query);
        Range seen = {std::max<int64_t>(0, position - p_.window + 1),
                      p_.causal ? std::min(p_.n_key, position + 1) : p_.n_key};
        if (first_) {
            seen.begin = std::max<int64_t>(seen.begin, first_[query / constants::PLAN_QUERIES]);
            seen.end = std::min<int64_t>(seen.end, end_[query / constants::PLAN_QUERIES]);
        }
        return seen;
    }

    // The queries that attend to at least one of the keys [keys.begin, keys.end).
    Range queries(Range keys) const {
        const int64_t first_position = p_.position(0);
        Range seen = {p_.causal ? std::max<int64_t>(0, keys.begin - first_position) : 0,
                      std::min(p_.n_query, keys.end - 1 + p_.window - first_position)};
        if (first_) {
            seen.begin = std::max(seen.begin, count_queries(end_, keys.begin));
            seen.end = std::min(seen.end, count_queries(first_, keys.end - 1));
        }
        return seen;
    }

    // Returns approximately the number of pairs of these queries and the keys they attend to.
    double pairs(Range queries) const {
        double sum = 0;
        for (int64_t i = queries.begin; i < queries.end; i += constants::PLAN_QUERIES) {
            const int64_t last = std::min(i + constants::PLAN_QUERIES, queries.end) - 1;
            const Range first_keys = keys(i), last_keys = keys(last);
            sum += 0.5 * double(last + 1 - i) *
                   double(std::max<int64_t>(first_keys.end - first_keys.begin, 0) +
                          std::max<int64_t>(last_keys.end - last_keys.begin, 0));
        }
        return sum;
    }

private:
    // Returns the number of leading queries whose entry of the plan is at most `key`.
    int64_t count_queries(const int32_t* plan, int64_t key) const {
        int64_t low = 0,
                high = (p_.n_query + constants::PLAN_QUERIES - 1) / constants::PLAN_QUERIES;
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            plan[middle] <= key ? low = middle + 1 : high = middle;
        }
        return low * constants::PLAN_QUERIES;
    }

    const Problem& p_;
    const int32_t *first_ = nullptr, *end_ = nullptr;
};

enum class Coverage { none, partial, full };

// Whether a strip of queries attends to none, some or all of the tile `keys`. `full` requires a
// full strip and a full tile, so that the loops of that case have constant trip counts.
inline Coverage coverage(const Visibility& visible, Range queries, Range keys) {
    const Range first = visible.keys(queries.begin), last = visible.keys(queries.end - 1);
    if (last.end <= keys.begin || first.begin >= keys.end) return Coverage::none;
    const bool full = queries.end - queries.begin == kStripRows &&
                      first.end >= keys.begin + kTile && last.begin <= keys.begin;
    return full ? Coverage::full : Coverage::partial;
}

// Returns `value` in the columns [visible.begin, visible.end), and `otherwise` in the others.
template <class Real>
BFA_INLINE Vector<Real> where_visible(Range visible, int column, Vector<Real> value,
                                      Vector<Real> otherwise) {
    const Vector<Real> c = iota<Real>() + Real(column);
    const Vector<Real> kept = c >= Real(visible.begin) ? value : otherwise;
    return c < Real(visible.end) ? kept : otherwise;
}

}  // namespace bfa::BFA_KERNELS
