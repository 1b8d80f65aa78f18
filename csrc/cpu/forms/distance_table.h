// A distance table of one head, reversed, so that it is contiguous along the keys of a row.
#pragma once

#include "../arithmetic.h"
#include "../visibility.h"
#include "../workspace.h"

namespace bfa::BFA_KERNELS {

// Entry d - first_distance of the table belongs to distance d.
template <class Real>
class DistanceTable {
public:
    // The entries of a query and the keys of a tile: those of column c are at c.
    struct Row {
        const Real* values;
        Real* gradient;
    };

    // `problem` and `table` may change before begin_head.
    DistanceTable(Arena& arena, const Problem& problem, const FormTensor& table, bool with_gradient)
        : problem_(problem),
          table_(table),
          values_(arena.take<Real>(padded_length())),
          gradient_(with_gradient ? arena.take<Real>(padded_length()) : nullptr) {}

    // The values are those of `function` at the entries.
    template <class Function>
    void begin_head(int64_t b, int64_t h, Function function) {
        const Real* table = table_.at<Real>(b, h);
        const int64_t n = length();
        std::memset(values_, 0, padded_length() * sizeof(Real));
        for (int64_t x = 0; x < n; ++x) values_[kPadding + n - 1 - x] = function(table[x]);
        if (gradient_) std::memset(gradient_, 0, padded_length() * sizeof(Real));
    }

    Real largest() const { return largest_finite(values_, padded_length()); }

    void begin_tile(Range keys) {
        const int64_t first_distance = problem_.causal ? 0 : 1 - problem_.n_query;
        const int64_t distance_of_query_0 = problem_.position(0) - keys.begin;
        start_of_query_0_ = kPadding + length() - 1 - (distance_of_query_0 - first_distance);
    }

    BFA_INLINE Row row(int64_t query) const {
        const int64_t start = start_of_query_0_ - query;
        return {values_ + start, gradient_ + start};
    }

    void end_head(const FormTensor& gradient, int64_t b, int64_t h) const {
        Real* out = gradient.at<Real>(b, h);
        const int64_t n = length();
        for (int64_t x = 0; x < n; ++x) out[x] += gradient_[kPadding + n - 1 - x];
    }

private:
    // A strip with at least one visible pair reads at most a strip and a tile beyond either end.
    static constexpr int64_t kPadding = kTile + kStripRows;
    int64_t length() const { return table_.rows; }
    int64_t padded_length() const { return length() + 2 * kPadding; }

    const Problem& problem_;
    const FormTensor& table_;
    Real* values_;
    Real* gradient_;
    int64_t start_of_query_0_;
};

}  // namespace bfa::BFA_KERNELS
