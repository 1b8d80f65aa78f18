// What the forms share. A form is a class with
//
//     kExists               false if the bias is 0
//     kHasSides             whether distances only tell keys up to the query from later ones. They
//                           are `Past` where none of the latter are visible, else a float.
//     kNumbers<n>           the floats that it needs in shared memory for a tile of n keys
//     stage<n>(...)         writes them, for keys j, j + 1, ...; a whole warp calls it
//     Query, query(...)     what it needs of a query
//     bias(...)             the bias of a pair in base 2. column: of the key in its tile; distance:
//                           p - j. For pairs that are not visible, the value is arbitrary.
//
// In the forward pass, products are added to the bias, which may take few instructions:
//
//     kStarts               whether this is so, and there is
//     kStartNumbers<n>, stage_start<n>(...)    like kNumbers and stage
//     side<n>(...)          the side of all queries of the block on which the keys of a tile are,
//                           if it matters: see below. If 0, bias(...) computes the start.
//     Start, start<n>(...)  what a thread needs of a query and a tile. column: its first one;
//                           distance: of the key in that column; unit: the product that is 1 in
//                           base 2
//     at(n)                 of a Start, the bias n columns later, in units of products
//
// and, for the backward pass, the same with queries and keys exchanged,
//
//     kNumbersOfQueries<n>, stage_queries<n>(...), Key, key(...), bias_of_key(...)
//
// There, the bias of a tile may be separated into b_i + side f_i b_j, with numbers of queries and
// of keys:
//
//     kSeparates            whether this is so
//     kHasFactors           whether f_i is the query's gain in base 2; else it is 1
//     Separated             of a block and a head, with
//         side(...)             1 or -1; 0 if the bias of a tile is not separated
//         of_query(...)         b_i in base 2
//     query_at(...)         a query that stage_queries has written
//     separated_key(...)    b_j
//
// and what a trained bias adds to the gradients of its operands:
//
//     kTrainsGain, kTrainsSums    which ones it has
//     add_gradient(...)           adds the dS of a pair to those of its query
//     gradient_of_key(...)        that of its key
//     kTrainsTable                whether it has a table of distances, whose gradient is dS
//
// Of other forms, warps compute the bias of a whole tile: WarpQueries and WarpKeys below, instead
// of bias(...) and bias_of_key(...).
#pragma once

#include "head.cuh"
#include "softmax.cuh"
#include "wgmma.cuh"

namespace bfa::cuda {

// A slope or a gain, or the beta of -log(1 + beta^2), saturated.
__device__ inline float limited_gain(float x) { return limited(x, float(BFA_LARGEST_GAIN)); }

// The queries first, first + 1, ... of a head that a block computes, or such keys.
struct Block {
    const Problem& problem;
    const Bias& bias;
    const Head& head;
    int first, rows;

    // The last query that exists.
    __device__ int last() const { return minimum(first + rows, head.n_query) - 1; }
    // The keys that the query at position p attends to. i: a query of the same tile of the plan.
    __device__ Range visible_to(int p, int i) const {
        return visible_keys(problem, planned_keys(problem, head, i), p);
    }
};

// The distance of a key up to the query, for forms that need no number.
struct Past {};

// 1 if keys j, ..., j + count - 1 are up to all queries of a block, -1 if they are after all of
// them, and otherwise 0.
__device__ inline int side_of_keys(const Block& block, int j, int count) {
    const int first = block.head.position(block.first);
    return j + count - 1 <= first ? 1 : j >= first + block.rows ? -1 : 0;
}

// The floats in shared memory that the forward pass needs for a tile.
template <class Form, int kKeys>
constexpr int kStaged =
    Form::kStarts ? Form::template kStartNumbers<kKeys> : Form::template kNumbers<kKeys>;

// What a warp needs of its 16 queries to compute the bias of a tile: specialized by forms with
//
//     may_differ<n>(j)    whether the bias of keys j, ..., j + n - 1 may differ from 0
//     add<n>(...)         adds it, not in base 2, to the scaled products
//     add_gradient<n>(...), store_gradient(...)    likewise with the gradient of their vectors
template <class Form, class Element>
struct WarpQueries {
    static constexpr bool kExists = false;

    __device__ WarpQueries(const Block&, Place) {}
};

// The same for 16 keys and a tile of queries.
template <class Form, class Element>
struct WarpKeys {
    static constexpr bool kExists = false;

    __device__ WarpKeys(const Block&, Place) {}
};

// The gradients of a query's operands: of its gain, and of its prefix sum.
struct QueryGradient {
    float gain = 0, sum = 0;
};

}  // namespace bfa::cuda
