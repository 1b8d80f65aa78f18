// U P: its rows are the queries of a strip.
#pragma once

#include "../../visibility.h"
#include "term.h"

namespace bfa::BFA_KERNELS {

template <class Arithmetic>
class QueryTerm : public RelativeTerm<Arithmetic, kStripRows, kTile> {
    using Term = RelativeTerm<Arithmetic, kStripRows, kTile>;
    using Term::b_, Term::end_, Term::ends_, Term::factors_, Term::h_, Term::is_beyond,
        Term::is_present, Term::problem_, Term::products_, Term::repeats_ends_, Term::rows_,
        Term::vectors_, Term::with_gradient_;
    using typename Term::Real;

public:
    using Term::exists;

    QueryTerm(Arena& arena, const Problem& problem, bool with_gradient)
        : Term(arena, problem, Term::kQueryFactors, Term::kQueryTable, true,
               problem.n_query + kStripRows, with_gradient),
          padded_queries_(exists() ? problem.n_query + kStripRows : 0) {}

    // The gradients of U and P are in memory of the caller, who clears it for each head.
    int64_t sum_elements() const { return factor_elements() + vectors_.gradient_elements(); }
    void keep_sums_in(Real* sums) {
        factor_gradients_ = sums;
        vectors_.keep_gradient_in(sums + factor_elements());
    }

    void begin_head(int64_t b, int64_t h) {
        if (!exists()) return;
        b_ = b, h_ = h;
        const bool has_other_vectors = vectors_.begin_head(b, h);
        if (repeats_ends_ && (has_other_factors() || has_other_vectors))
            for_each_strip([&](Range strip) {
                ends_.compute(strip.begin, int(strip.end - strip.begin), rows_.left(0), vectors_);
            });
        if (with_gradient_) ends_.clear_gradients(), ends_.clear_vector_gradients();
    }

    void begin_strip(Range strip, Range keys) {
        if (!exists()) return;
        Term::begin_strip(problem_.position(strip.begin) + kStripRows - 1 - keys.begin);
        strip_begin_ = strip.begin;
        if (!is_present() || is_beyond()) return;
        pack_strip(strip.begin);
        Term::compute_products();
        // Not every entry of a part of a strip gets a gradient.
        const bool is_whole =
            strip.end - strip.begin == kStripRows && keys.end - keys.begin == kTile;
        if (with_gradient_ && !is_whole) products_.clear_rows();
    }

    // Of row r of the strip.
    template <class Function>
    BFA_INLINE void with_row(int64_t r, Function function) const {
        if (!is_present()) return function(AbsentRow<Real>{});
        if (!is_beyond())
            return function(ProductsRow<Real, false>{products_.row(r), products_.gradient_row(r)});
        const int64_t query = strip_begin_ + r;
        function(EndRow<Real>{ends_.products(end_)[query], ends_.gradients(end_) + query});
    }

    void end_strip(Range strip, Range keys, const Visibility& visible) {
        if (!is_present() || is_beyond()) return;
        Term::add_gradients(factor_gradients(strip.begin), [&](int row) {
            const int64_t query = strip.begin + row;
            return query < strip.end ? visible.keys(query).relative_to(keys.begin, kTile) : Range{};
        });
    }

    void end_sums() {
        if (exists() && repeats_ends_)
            for_each_strip([&](Range strip) {
                ends_.add_gradients(strip.begin, strip.end - strip.begin, rows_.left(0),
                                    factor_gradients(strip.begin), vectors_);
            });
        if (exists()) ends_.add_vector_gradients(vectors_);
    }

    void end_head() const {
        if (!exists()) return;
        Term::add_table_gradient();
        Term::add_factor_gradients(0, problem_.n_query, factor_gradients(0));
    }

private:
    int64_t factor_elements() const {
        return with_gradient_ ? padded_queries_ * rows_.columns() : 0;
    }
    Result<Real> factor_gradients(int64_t query) const {
        return {factor_gradients_ + query * rows_.columns(), rows_.columns()};
    }

    // Returns whether the factors are others than at the last call.
    bool has_other_factors() {
        const char* first = problem_.form_tensors[factors_].template at<char>(b_, h_);
        if (first == first_factor_ && problem_.n_query == n_query_) return false;
        first_factor_ = first, n_query_ = problem_.n_query;
        return true;
    }

    void pack_strip(int64_t begin) {
        Term::pack(begin, std::min<int64_t>(kStripRows, problem_.n_query - begin));
    }
    // Calls function(strip) for all queries of the head, with the factors of each strip packed.
    template <class Function>
    void for_each_strip(Function function) {
        for (int64_t begin = 0; begin < problem_.n_query; begin += kStripRows) {
            pack_strip(begin);
            function(Range{begin, std::min(begin + kStripRows, problem_.n_query)});
        }
    }

    const int64_t padded_queries_;
    Real* factor_gradients_ = nullptr;
    const char* first_factor_ = nullptr;  // those of ends_
    int64_t n_query_ = 0;
    int64_t strip_begin_ = 0;
};

}  // namespace bfa::BFA_KERNELS
