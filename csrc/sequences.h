// One sequence's share of a problem whose sequences are ranges of the rows of its tensors.
//
// Everything here is static: files for different instruction sets must not share one copy of it.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "params.h"

namespace bfa {

static inline Sequence rows_of(const Problem& whole, int64_t b) {
    return whole.sequences ? whole.sequences[b]
                           : Sequence{0, whole.n_query, 0, whole.n_key, whole.shift};
}

// Of all sequences together.
static inline int64_t query_count(const Problem& whole) {
    int64_t sum = 0;
    for (int64_t b = 0; b < whole.batch; ++b) sum += rows_of(whole, b).n_query;
    return sum;
}

static inline void begin_at(std::initializer_list<View*> views, int64_t row) {
    for (View* view : views)
        if (view->data) view->data += row * view->row;
}

static inline void begin_rows(Problem& one, const Sequence& rows, int64_t first_term) {
    begin_at({&one.q, &one.gain}, rows.first_query);
    begin_at({&one.k, &one.v}, rows.first_key);
    begin_at({&one.terms}, first_term);
}

static inline void begin_rows(Forward& one, const Sequence& rows, int64_t first_term) {
    begin_rows(static_cast<Problem&>(one), rows, first_term);
    begin_at({&one.o, &one.lse}, rows.first_query);
}

static inline void begin_rows(Backward& one, const Sequence& rows, int64_t first_term) {
    begin_rows(static_cast<Problem&>(one), rows, first_term);
    begin_at({&one.o, &one.lse, &one.grad_o, &one.grad_lse}, rows.first_query);
    begin_at({&one.grad_q, &one.grad_gain}, rows.first_query);
    begin_at({&one.grad_k, &one.grad_v}, rows.first_key);
    begin_at({&one.grad_terms}, first_term);
}

// The problem that batch entry b has, with its own lengths and all views beginning at its rows.
template <class AnyProblem>
static AnyProblem of_sequence(const AnyProblem& whole, int64_t b) {
    AnyProblem one = whole;
    if (!whole.sequences) return one;
    const Sequence rows = rows_of(whole, b);
    one.n_query = rows.n_query, one.n_key = rows.n_key, one.shift = rows.shift;
    const int64_t places = rows.n_key + rows.shift;
    int64_t first_term = 0;
    if (whole.form == Form::distance) {
        // Of distances, those that the sequence has.
        const int64_t first = whole.causal ? 0 : 1 - rows.n_query;
        first_term = whole.causal ? 0 : whole.n_query - rows.n_query;
        one.n_terms = std::max<int64_t>(0, std::min(places, whole.window) - first);
    } else if (whole.form == Form::cumulative || whole.form == Form::log1p_square) {
        first_term = rows.first_key;
        one.n_terms = places;
    }
    begin_rows(one, rows, first_term);
    return one;
}

}  // namespace bfa
