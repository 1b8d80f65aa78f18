// The part of one sequence in a problem whose sequences are ranges of the rows of its tensors.
//
// Everything here is static: files for different instruction sets must not share one copy of it.
#pragma once

#include <initializer_list>

#include "problem.h"

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

static inline void begin_form(const Problem& whole, const Sequence& rows, FormTensor* tensors) {
    for (int n = 0; n < kMostFormTensors; ++n) {
        const FormRows own = form_rows(whole, rows, n);
        begin_at({&tensors[n]}, own.first);
        if (tensors[n].data) tensors[n].data += own.first_column * tensors[n].column;
        tensors[n].rows = own.count;
    }
}

static inline void begin_rows(const Problem& whole, Problem& one, const Sequence& rows) {
    begin_at({&one.q}, rows.first_query);
    begin_at({&one.k, &one.v}, rows.first_key);
    begin_form(whole, rows, one.form_tensors);
    begin_form(whole, rows, one.grad_form);
}

static inline void begin_rows(const Forward& whole, Forward& one, const Sequence& rows) {
    begin_rows(whole, static_cast<Problem&>(one), rows);
    begin_at({&one.o, &one.lse}, rows.first_query);
}

static inline void begin_rows(const Backward& whole, Backward& one, const Sequence& rows) {
    begin_rows(whole, static_cast<Problem&>(one), rows);
    begin_at({&one.o, &one.lse, &one.grad_o, &one.grad_lse, &one.grad_q}, rows.first_query);
    begin_at({&one.grad_k, &one.grad_v}, rows.first_key);
}

// The problem that batch entry b has, with its own lengths and all views beginning at its rows.
template <class AnyProblem>
static AnyProblem of_sequence(const AnyProblem& whole, int64_t b) {
    AnyProblem one = whole;
    if (!whole.sequences) return one;
    const Sequence rows = rows_of(whole, b);
    one.n_query = rows.n_query, one.n_key = rows.n_key, one.shift = rows.shift;
    begin_rows(whole, one, rows);
    return one;
}

}  // namespace bfa
