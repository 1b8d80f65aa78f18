// Restricts a problem whose sequences are ranges of rows to one of these sequences.
//
// Everything here is static, because translation units compiled for different instruction sets must
// not share one copy of it.
#pragma once

#include <initializer_list>

#include "problem.h"

namespace bfa {

static inline Sequence sequence_at(const Problem& whole, int64_t b) {
    return whole.sequences ? whole.sequences[b]
                           : Sequence{0, whole.n_query, 0, whole.n_key, whole.shift};
}

// The total number of queries of all sequences.
static inline int64_t query_count(const Problem& whole) {
    int64_t sum = 0;
    for (int64_t b = 0; b < whole.batch; ++b) sum += sequence_at(whole, b).n_query;
    return sum;
}

static inline void advance_views(std::initializer_list<View*> views, int64_t row) {
    for (View* view : views)
        if (view->data) view->data += row * view->row_stride;
}

static inline void select_form_rows(const Problem& whole, const Sequence& rows,
                                    FormTensor* tensors) {
    for (int n = 0; n < kMaxFormTensors && whole.form->tensors[n].name; ++n) {
        const RowRange own =
            whole.form->tensors[n].sequence_rows(whole, rows, whole.form_tensors[n]);
        advance_views({&tensors[n]}, own.first);
        if (tensors[n].data) tensors[n].data += own.first_column * tensors[n].column_stride;
        tensors[n].rows = own.count;
    }
}

static inline void select_rows(const Problem& whole, Problem& one, const Sequence& rows) {
    advance_views({&one.q}, rows.first_query);
    advance_views({&one.k, &one.v}, rows.first_key);
    select_form_rows(whole, rows, one.form_tensors);
    select_form_rows(whole, rows, one.grad_form);
}

static inline void select_rows(const Forward& whole, Forward& one, const Sequence& rows) {
    select_rows(whole, static_cast<Problem&>(one), rows);
    advance_views({&one.o, &one.lse, &one.pivot, &one.log_sum}, rows.first_query);
}

static inline void select_rows(const Backward& whole, Backward& one, const Sequence& rows) {
    select_rows(whole, static_cast<Problem&>(one), rows);
    advance_views({&one.o, &one.pivot, &one.log_sum, &one.grad_o, &one.grad_lse, &one.grad_q},
                  rows.first_query);
    advance_views({&one.grad_k, &one.grad_v}, rows.first_key);
}

// Returns the problem of sequence b: its own lengths, and views that start at its first rows.
template <class AnyProblem>
static AnyProblem sequence_problem(const AnyProblem& whole, int64_t b) {
    AnyProblem one = whole;
    if (!whole.sequences) return one;
    const Sequence rows = sequence_at(whole, b);
    one.n_query = rows.n_query, one.n_key = rows.n_key, one.shift = rows.shift;
    select_rows(whole, one, rows);
    return one;
}

}  // namespace bfa
