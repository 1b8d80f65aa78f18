// What a form is, and the defaults of its parts.
//
// A form is a class, derived from FormDefaults, with its traits, an enum of its tensors in the
// order of Problem::form_tensors, and two class templates:
//   Tile<Real>   evaluates it in a tile of keys, and accumulates its gradient;
//   Page<Real>   evaluates it in a page of a cache, and bounds it from above (page.h).
//
// A tile's bias is prepared for one head (begin_head), then for one key tile (begin_tile), then for
// one query: with_row(query, function) calls function with a row, an object whose
// added_to(logits, column) adds the bias of the tile's columns column, column + 1, ... in base 2.
// The backward pass passes the gradient of the natural-log logits, zero where masked, to
// add_gradient(row, column, gradient). It then calls end_row(row, r) for each row, where r is its
// index in a group of at most kLanes<Real> rows; end_rows(queries) for each group; end_block for
// each block of queries; end_tile(keys), which may add to the outputs of these keys; and end_head,
// which alone adds to the other outputs of the problem. begin_strip(queries) and, in the backward
// pass, end_strip(queries) enclose the rows of a strip.
//
// If the key tiles of a head are divided into partitions, end_head is called for each of them in
// order. A form that has_sums adds to the outputs only once, after the last partition: end_sums()
// returns sum_elements() numbers of a partition, which are replaced by their total before end_head.
#pragma once

#include "../arithmetic.h"
#include "../math.h"
#include "../visibility.h"
#include "../workspace.h"
#include "page.h"

namespace bfa::BFA_KERNELS {

template <class T>
struct Type {
    using type = T;
};

template <class Form>
struct FormDefaults {
    // Calls function(Type<Bias>()) with the class that evaluates the form in a tile.
    template <class Arithmetic, class Function>
    static void select_tile(const Problem&, Function function) {
        function(Type<typename Form::template Tile<typename Arithmetic::Real>>());
    }
};

// Empty defaults for functions that most tile biases do not need.
struct TileDefaults {
    void begin_strip(Range) {}
    template <class Row>
    void end_row(const Row&, int) {}
    void end_rows(Range) {}
    void end_strip(Range) {}
    void end_block(Range) {}
    void end_tile(Range) {}
    static constexpr bool has_gradient = true;
    static constexpr bool has_sums = false;
};

// The rows of a form's tensor that belong to one sequence, for TensorTraits.
namespace rows {

inline RowRange one(const Problem&, const Sequence&, const FormTensor&) { return {0, 1}; }
inline RowRange all(const Problem&, const Sequence&, const FormTensor& x) { return {0, x.rows}; }
inline RowRange per_query(const Problem&, const Sequence& own, const FormTensor&) {
    return {own.first_query, own.n_query};
}
inline RowRange per_key(const Problem&, const Sequence& own, const FormTensor&) {
    return {own.first_key, own.n_key};
}
// Of the keys, and of the positions up to that of the last query.
inline RowRange per_position(const Problem&, const Sequence& own, const FormTensor&) {
    return {own.first_key, own.n_key + own.shift};
}
inline RowRange per_pair(const Problem&, const Sequence& own, const FormTensor&) {
    return {own.first_query, own.n_query, own.first_key};
}
// Of the distances that occur in the sequence.
inline RowRange per_distance(const Problem& whole, const Sequence& own, const FormTensor&) {
    const int64_t first = whole.causal ? 0 : 1 - own.n_query, end = own.n_key + own.shift;
    return {whole.causal ? 0 : whole.n_query - own.n_query,
            std::max<int64_t>(0, std::min(end, whole.window) - first)};
}

}  // namespace rows

}  // namespace bfa::BFA_KERNELS
