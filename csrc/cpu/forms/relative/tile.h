// The relative form in a tile: the sum of its two terms.
#pragma once

#include "../none.h"
#include "key_term.h"
#include "query_term.h"

namespace bfa::BFA_KERNELS {

// Arithmetic is that of the products of factors and vectors, in the form's own element type.
template <class Arithmetic>
class RelativeTile : public TileDefaults {
    using Real = typename Arithmetic::Real;

public:
    template <bool kHasQueryTerm, bool kHasKeyTerm>
    struct Row {
        TermRow<Real> query, key;

        BFA_INLINE Vector<Real> added_to(Vector<Real> s, int column) const {
            Vector<Real> bias = {};
            if constexpr (kHasQueryTerm) bias += load(query.bias + column);
            if constexpr (kHasKeyTerm) bias += load(key.bias + column);
            return s + bias * Real(kLog2e);
        }
    };

    RelativeTile(Arena& arena, const Problem& problem, bool with_gradient)
        : query_term_(arena, problem, with_gradient),
          key_term_(arena, problem, with_gradient),
          sums_(arena.take<Real>(sum_elements())) {
        query_term_.keep_sums_in(sums_);
        key_term_.keep_sums_in(sums_ + query_term_.sum_elements());
    }

    void begin_head(int64_t b, int64_t h) {
        query_term_.begin_head(b, h), key_term_.begin_head(b, h);
        std::memset(sums_, 0, sum_elements() * sizeof(Real));
    }
    void begin_tile(Range keys) {
        keys_ = keys;
        key_term_.begin_tile(keys);
    }
    void begin_strip(Range strip) {
        strip_begin_ = strip.begin;
        query_term_.begin_strip(strip, keys_), key_term_.begin_strip(strip, keys_);
    }

    template <class Function>
    BFA_INLINE void with_row(int64_t query, Function function) const {
        const int64_t r = query - strip_begin_;
        const TermRow<Real> query_row = query_term_.row(r), key_row = key_term_.row(r);
        if (query_term_.is_present() && key_term_.is_present())
            return function(Row<true, true>{query_row, key_row});
        if (query_term_.is_present()) return function(Row<true, false>{query_row, {}});
        if (key_term_.is_present()) return function(Row<false, true>{{}, key_row});
        function(typename None::Tile<Real>::Row{});
    }

    template <bool kHasQueryTerm, bool kHasKeyTerm>
    BFA_INLINE void add_gradient(Row<kHasQueryTerm, kHasKeyTerm>& row, int column,
                                 Vector<Real> gradient) {
        if constexpr (kHasQueryTerm) query_term_.add_gradient(row.query, column, gradient);
        if constexpr (kHasKeyTerm) key_term_.add_gradient(row.key, column, gradient);
    }
    void add_gradient(typename None::Tile<Real>::Row&, int, Vector<Real>) {}

    void end_strip(Range strip) { query_term_.end_strip(strip), key_term_.end_strip(strip); }
    void end_tile(Range keys) { key_term_.end_tile(keys); }

    // The gradients of U, P and Q.
    static constexpr bool has_sums = true;
    int64_t sum_elements() const { return query_term_.sum_elements() + key_term_.sum_elements(); }
    Real* end_sums() {
        query_term_.end_sums();
        return sums_;
    }

    void end_head(const FormTensor*, int64_t, int64_t) {
        query_term_.end_head(), key_term_.end_head();
    }

private:
    QueryTerm<Arithmetic> query_term_;
    KeyTerm<Arithmetic> key_term_;
    Real* sums_;

    Range keys_ = {0, 0};
    int64_t strip_begin_ = 0;
};

}  // namespace bfa::BFA_KERNELS
