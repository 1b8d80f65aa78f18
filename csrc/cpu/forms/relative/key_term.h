// W Q: its rows are the keys of a tile, so that its products are transposed.
#pragma once

#include "../../visibility.h"
#include "term.h"

namespace bfa::BFA_KERNELS {

template <class Arithmetic>
class KeyTerm : public RelativeTerm<Arithmetic, kTile, kStripRows> {
    using Term = RelativeTerm<Arithmetic, kTile, kStripRows>;
    using Term::b_, Term::end_, Term::ends_, Term::h_, Term::is_beyond, Term::is_present,
        Term::problem_, Term::products_, Term::repeats_ends_, Term::rows_, Term::vectors_,
        Term::with_gradient_;
    using typename Term::Products;
    using typename Term::Real;

public:
    using Term::exists;

    KeyTerm(Arena& arena, const Problem& problem, bool with_gradient)
        : Term(arena, problem, Term::kKeyFactors, Term::kKeyTable, false, kTile, with_gradient),
          bias_(arena.take<Real>(exists() ? kStripRows * kTile : 0)),
          gradient_(arena.take<Real>(exists() && with_gradient ? 2 * kTile * kTile : 0)),
          factor_gradients_(arena.take<Real>(with_gradient ? kTile * rows_.columns() : 0)) {}

    // The gradient of Q is in memory of the caller, who clears it for each head.
    int64_t sum_elements() const { return vectors_.gradient_elements(); }
    void keep_sums_in(Real* sums) { vectors_.keep_gradient_in(sums); }

    void begin_head(int64_t b, int64_t h) {
        if (!exists()) return;
        b_ = b, h_ = h;
        vectors_.begin_head(b, h);
        if (with_gradient_) ends_.clear_vector_gradients();
    }

    void begin_tile(Range keys) {
        if (!exists()) return;
        Term::pack(keys.begin, keys.end - keys.begin);
        if (repeats_ends_) ends_.compute(0, kTile, rows_.left(0), vectors_);
        if (with_gradient_) {
            ends_.clear_gradients();
            std::memset(factor_gradients_, 0, kTile * rows_.columns() * sizeof(Real));
        }
    }

    void begin_strip(Range strip, Range keys) {
        if (!exists()) return;
        Term::begin_strip(problem_.position(strip.begin) - keys.begin - (kTile - 1));
        if (!is_present()) return;
        // Beyond the table, all rows of the strip have the same products.
        next_row_ = is_beyond() ? 0 : kTile;
        first_row_ = {is_beyond() ? ends_.products(end_) : bias_, gradient_};
        const int rows = is_beyond() ? 1 : kStripRows;
        if (with_gradient_) std::memset(gradient_, 0, rows * kTile * sizeof(Real));
        if (is_beyond()) return;
        Term::compute_products();
        transpose(products_.row(0), kTile, kStripRows, Products::kNextRow, bias_);
    }

    // Of row r of the strip.
    template <class Function>
    BFA_INLINE void with_row(int64_t r, Function function) const {
        if (!is_present()) return function(AbsentRow<Real>{});
        function(Row{first_row_.products + r * next_row_, first_row_.gradients + r * next_row_});
    }

    void end_strip(Range strip, Range keys, const Visibility& visible) {
        if (!is_present()) return;
        if (is_beyond()) {
            double* sums = ends_.gradients(end_);
            for (int c = 0; c < kTile; ++c) sums[c] += gradient_[c];
            return;
        }
        transpose_gradient();
        Term::add_gradients(factor_gradients(), [&](int row) {
            const int64_t key = keys.begin + row;
            if (key >= keys.end) return Range{};
            return visible.queries({key, key + 1})
                .relative_to(strip.begin, strip.end - strip.begin);
        });
    }

    // Each row of the gradient of W belongs to one tile, so it is added to the output directly.
    void end_tile(Range keys) {
        if (!exists()) return;
        const int64_t n = keys.end - keys.begin;
        ends_.add_gradients(0, n, rows_.left(0), factor_gradients(), vectors_);
        Term::add_factor_gradients(keys.begin, n, factor_gradients());
    }

    void end_sums() const {
        if (exists()) ends_.add_vector_gradients(vectors_);
    }
    void end_head() const {
        if (exists()) Term::add_table_gradient();
    }

private:
    // Beyond the table, the gradient of a key is the sum of a column.
    using Row = ProductsRow<Real, true>;

    Result<Real> factor_gradients() const { return {factor_gradients_, rows_.columns()}; }

    // Writes the gradient of the strip to the rows of the keys.
    void transpose_gradient() {
        Real* transposed = gradient_ + kTile * kTile;
        transpose(gradient_, kStripRows, kTile, kTile, transposed);
        for (int c = 0; c < kTile; ++c)
            std::memcpy(products_.gradient_row(c), transposed + c * kTile,
                        kStripRows * sizeof(Real));
    }

    Real *bias_, *gradient_;  // (kStripRows, kTile); the latter twice, once transposed
    Real* factor_gradients_;  // of the tile
    Row first_row_ = {};
    int64_t next_row_ = 0;
};

}  // namespace bfa::BFA_KERNELS
