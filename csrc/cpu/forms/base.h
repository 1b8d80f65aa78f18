// Evaluates each form of a bias in a tile, and accumulates its gradient.
//
// A form is prepared for one head (begin_head), then for one key tile (begin_tile), then for one
// query: with_row(query, function) calls function with a row, an object whose
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

namespace bfa::BFA_KERNELS {

// Empty defaults for functions that most forms do not need.
struct BiasDefaults {
    void begin_strip(Range) {}
    template <class Row>
    void end_row(const Row&, int) {}
    void end_rows(Range) {}
    void end_strip(Range) {}
    void end_block(Range) {}
    void end_tile(Range) {}
    static constexpr bool has_sums = false;
};

}  // namespace bfa::BFA_KERNELS
