// The operands of the backward pass: the queries of one head, and the keys of one tile.
#pragma once

#include <cmath>
#include <limits>

#include "math.h"
#include "packed_rows.h"
#include "visibility.h"

namespace bfa::BFA_KERNELS {

// The rows of q and grad_o of one head, and three numbers per query: the pivot and the log_sum
// whose sum is lse_i in base 2, and delta_i = grad_o_i . o_i - grad_lse_i. Subtracting the pivot
// from logits near it is exact. A rounded lse_i has an error that grows with its size.
template <class Arithmetic>
class HeadQueries {
    using Real = typename Arithmetic::Real;
    static constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

public:
    HeadQueries(Arena& arena, const Backward& problem)
        : p_(problem),
          row_(arena.take<Real>(2 * problem.value_dim)),
          queries_(arena, padded(problem.n_query), problem.head_dim),
          grad_outputs_(arena, padded(problem.n_query), problem.value_dim),
          pivots_(arena.take<Real>(problem.n_query)),
          log_sums_(arena.take<Real>(problem.n_query)),
          delta_(arena.take<Real>(problem.n_query)) {}

    static int64_t padded(int64_t n_query) { return round_up(n_query, kRegisterRows); }

    void begin_head(int64_t b, int64_t h) {
        const int64_t n = p_.n_query, rows = padded(n);
        queries_.pack(p_.element, p_.q.at(b, h), p_.q.row_stride, n, rows);
        grad_outputs_.pack(p_.element, p_.grad_o.at(b, h), p_.grad_o.row_stride, n, rows);
        all_finite_ = queries_.all_finite(rows) && grad_outputs_.all_finite(rows);
        for (int64_t i = 0; i < n; ++i) {
            const Real log_sum = p_.log_sum.at<Real>(b, h)[i];
            // A pivot of +inf makes all P of a query without weights 0.
            const bool is_empty = log_sum == -kInfinity;
            pivots_[i] = is_empty ? kInfinity : p_.pivot.at<Real>(b, h)[i];
            log_sums_[i] = is_empty ? 0 : log_sum;
            delta_[i] = is_empty ? 0
                                 : dot_rows(p_.o.at(b, h, i), p_.grad_o.at(b, h, i)) -
                                       p_.grad_lse.at<Real>(b, h)[i];
        }
    }

    const PackedRows<Arithmetic>& queries() const { return queries_; }
    const PackedRows<Arithmetic>& grad_outputs() const { return grad_outputs_; }
    Real pivot(int64_t query) const { return pivots_[query]; }
    Real log_sum(int64_t query) const { return log_sums_[query]; }
    Real delta(int64_t query) const { return delta_[query]; }
    bool all_finite() const { return all_finite_; }

private:
    Real dot_rows(const char* a, const char* b) {
        Real* other = row_ + p_.value_dim;
        read_row(p_.element, a, p_.value_dim, row_);
        read_row(p_.element, b, p_.value_dim, other);
        double sum = 0;
        for (int64_t c = 0; c < p_.value_dim; ++c) sum += double(row_[c]) * double(other[c]);
        return Real(sum);
    }

    const Backward& p_;
    Real* row_;
    PackedRows<Arithmetic> queries_, grad_outputs_;
    Real *pivots_, *log_sums_, *delta_;
    bool all_finite_ = false;
};

// The rows of k and v of one tile, and both transposed. They are padded to `width` rows.
template <class Arithmetic>
class TileKeys {
    using Real = typename Arithmetic::Real;
    using Operand = typename Arithmetic::Operand;

public:
    TileKeys(Arena& arena, const Backward& problem)
        : p_(problem),
          keys_(arena, kTile, problem.head_dim),
          values_(arena, kTile, problem.value_dim),
          keys_transposed_(arena.take<Operand>(keys_.depth() * kTile)),
          values_transposed_(arena.take<Operand>(values_.depth() * kTile)) {}

    void begin_tile(int64_t b, int64_t kv_head, Range keys) {
        const int64_t n = keys.end - keys.begin;
        range_ = keys, width_ = int(round_up(n, kLanes<Real> * Arithmetic::pair));
        keys_.pack(p_.element, p_.k.at(b, kv_head, keys.begin), p_.k.row_stride, n, width_);
        keys_.transpose_to(keys_transposed_, width_);
        values_.pack(p_.element, p_.v.at(b, kv_head, keys.begin), p_.v.row_stride, n, width_);
        values_.transpose_to(values_transposed_, width_);
    }

    Range range() const { return range_; }
    int width() const { return width_; }
    const PackedRows<Arithmetic>& keys() const { return keys_; }
    const PackedRows<Arithmetic>& values() const { return values_; }
    RightMatrix<Operand> keys_transposed() const { return {keys_transposed_, kTile}; }
    RightMatrix<Operand> values_transposed() const { return {values_transposed_, kTile}; }
    // The values are no operands of products whose terms may be masked.
    bool all_finite() const { return keys_.all_finite(width_); }

private:
    const Backward& p_;
    PackedRows<Arithmetic> keys_, values_;
    Operand *keys_transposed_, *values_transposed_;
    Range range_ = {0, 0};
    int width_ = 0;
};

}  // namespace bfa::BFA_KERNELS
