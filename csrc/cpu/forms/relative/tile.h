// The relative form in a tile: the sum of its two terms.
#pragma once

#include "../base.h"
#include "key_term.h"
#include "query_term.h"

namespace bfa::BFA_KERNELS {

// Arithmetic is that of the products of factors and vectors, in the form's own element type.
template <class Arithmetic>
class RelativeTile : public TileDefaults {
    using Real = typename Arithmetic::Real;

public:
    template <class QueryRow, class KeyRow>
    struct Row {
        QueryRow query;
        KeyRow key;

        BFA_INLINE Vector<Real> added_to(Vector<Real> s, int column) const {
            return s +
                   in_base_2<Real>(key.added_to(query.added_to(Vector<Real>{}, column), column));
        }
    };

    RelativeTile(Arena& arena, const Problem& problem, bool with_gradient)
        : visible_(problem),
          query_term_(arena, problem, with_gradient),
          key_term_(arena, problem, with_gradient),
          sums_(arena.take<Real>(sum_elements())) {
        query_term_.keep_sums_in(sums_);
        key_term_.keep_sums_in(sums_ + query_term_.sum_elements());
    }

    void begin_head(int64_t b, int64_t h) {
        visible_.begin_head(b, h);
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
        query_term_.with_row(r, [&](auto query_row) {
            key_term_.with_row(r, [&](auto key_row) {
                function(Row<decltype(query_row), decltype(key_row)>{query_row, key_row});
            });
        });
    }

    template <class Row>
    BFA_INLINE void add_gradient(Row& row, int column, Vector<Real> gradient) {
        row.query.add_gradient(column, gradient), row.key.add_gradient(column, gradient);
    }
    template <class Row>
    BFA_INLINE void end_row(Row& row, int) {
        row.query.end(), row.key.end();
    }

    void end_strip(Range strip) {
        query_term_.end_strip(strip, keys_, visible_);
        key_term_.end_strip(strip, keys_, visible_);
    }
    void end_tile(Range keys) { key_term_.end_tile(keys); }

    // The gradients of U, P and Q.
    static constexpr bool has_sums = true;
    int64_t sum_elements() const { return query_term_.sum_elements() + key_term_.sum_elements(); }
    Real* end_sums() {
        query_term_.end_sums(), key_term_.end_sums();
        return sums_;
    }

    void end_head(const FormTensor*, int64_t, int64_t) {
        query_term_.end_head(), key_term_.end_head();
    }

private:
    Visibility visible_;
    QueryTerm<Arithmetic> query_term_;
    KeyTerm<Arithmetic> key_term_;
    Real* sums_;

    Range keys_ = {0, 0};
    int64_t strip_begin_ = 0;
};

}  // namespace bfa::BFA_KERNELS
