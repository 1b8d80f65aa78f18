// The parameters of the kernels. Python mirrors these structures, field by field.
//
// Strides count elements; 0 broadcasts. Every structure has natural alignment, except that tensor
// maps are aligned to 64 bytes, so the size of a kernel's parameters is a multiple of 64.
#pragma once

#include "types.h"

namespace bfa::cuda {

// A tensor map that the driver encoded (CUtensorMap). Those of q, k, v and dO have the dimensions
// (channel, row, head, batch entry), boxes of 64 channels and as many rows as a tile has, a swizzle
// of 128 bytes, and zeros outside the tensor.
struct alignas(64) TensorMap {
    uint64_t words[16];
};

// A (batch, heads, rows, channels) tensor with contiguous channels, or one without the last, or the
// last two, of these dimensions. data is null if a call has no such tensor; T is void for tensors
// of the type of q.
template <class T>
struct Rows {
    T* data;
    int64_t batch, head, row;

    template <class Element = T>
    __device__ Element* at(int b, int h, int64_t n = 0) const {
        return static_cast<Element*>(data) + b * batch + h * head + n * row;
    }
};

// The rows of q and k that belong to one sequence. Its query i has position
// i + n_key - n_query + shift, counted from its first key.
struct Sequence {
    int64_t first_query, n_query, first_key, n_key, shift;
};

// The range of keys [first_key, end_key) that each tile of kPlanQueries queries attends to, and for
// kernels whose blocks have keys, the range of queries [first_query, end_query) that attend to some
// keys of each block. The last dimension of all tensors is contiguous, and both bounds of a range
// have the strides of the first one.
struct Plan {
    Rows<const int32_t> first_key;  // null without a plan
    const int32_t* end_key;
    Rows<const int32_t> first_query;
    const int32_t* end_query;
};

// What a kernel must know about a call besides its tensors.
struct Problem {
    int32_t heads;              // query heads
    int32_t group;              // query heads per key head
    int32_t n_query;            // with sequences, the largest number of queries of any sequence
    int32_t n_key;              // likewise
    int32_t shift;              // position of the last query minus that of the last key; likewise
    int32_t window;             // visible keys per query, its own included; 2^30 without a window
    int32_t causal;             // 1: keys after the query are invisible
    int32_t packed;             // 1: all sequences are in batch entry 0
    int32_t blocks;             // blocks of rows per head, a program each
    float scale;                // factor of q k^T, not in base 2
    const Sequence* sequences;  // one per batch index, or null if batch entries are sequences
    Plan plan;
    // Program numbers, (b * heads + h) * blocks + block, by decreasing work; null for the order of
    // decreasing block numbers.
    const int32_t* order;
};

// The operands of a bias. A form reads those that forms/ says it needs.
struct Bias {
    Rows<const float> slopes;  // (B or 1, H or 1)
    Rows<const float> table;   // (B or 1, H or 1, distances): from distance 0 if causal, else from
                               // 1 - Problem::n_query on
    // (B or 1, H or 1, places): float32 numbers whose sum is the prefix sum of the steps.
    Rows<const float> high, low;
    Rows<const float> gain;  // (B or 1, H or 1, queries), or null
    // Vectors of q's type, whose numbers of channels are those of the form: (B or 1, H or 1,
    // queries) and (1, H or 1, columns). Column 0 is that of distance 0 if causal, else column
    // columns / 2 is. At other distances the vector is 0 or, if `extends`, that of the nearest one.
    Rows<const void> query_vectors, distance_vectors;
    int32_t columns, extends;
};

struct ForwardParams {
    TensorMap q, k, v;
    Problem problem;
    Bias bias;
    Rows<void> o;                // (B, H, Nq, Dv), q's type
    Rows<float> lse;             // (B, H, Nq), natural logarithm
    Rows<float> pivot, log_sum;  // (B, H, Nq): lse in base 2 is their sum
    int32_t value_dim;           // channels of o, a multiple of 8
    int32_t programs;            // blocks of rows of all heads, which may exceed the grid
    int32_t* tickets;  // how many of the programs beyond the grid have started; null if none
};

// Of the kernel that prepares the backward pass.
struct DeltaParams {
    Rows<const void> o, grad_o;  // (B, H, Nq, Dv)
    Rows<const float> pivot, log_sum, grad_lse;
    Rows<float> lse_in_base_2;  // (B, H, Nq); infinite for queries without keys
    Rows<float> delta;          // (B, H, Nq): dO . o - dlse
    int32_t batch, heads, rows, value_dim;
};

// Of the kernel for all gradients, of the one that stores dq afterwards, and of those for dq and
// for dk and dv. Boxes have as many rows as a tile.
struct BackwardParams {
    TensorMap q, k, v, grad_o;
    Problem problem;  // blocks and order are those of each kernel: of queries, or of keys
    Bias bias;
    Rows<const float> lse_in_base_2, delta;
    Rows<void> grad_q, grad_k, grad_v;
    // Gradients of the operands of a trained bias, (B, H, Nq), (B, H, Nq) and (B, H, Nk): of the
    // gains, or minus the slope; of the prefix sums, at the queries; and likewise at the keys. The
    // kernel for all gradients has that of minus the slope at the keys.
    Rows<float> grad_gain, grad_query_sums, grad_key_sums;
    // Of a trained table, (B or 1, H, slots, distances): partial sums, to which one
    // kernel adds. Blocks that add to one slot belong to different launches.
    Rows<float> grad_table;
    Rows<float> grad_query_vectors;  // (B, H, Nq, padded channels)
    int32_t slots, head_dim, value_dim;
    // Of the kernel for all gradients, in each entry and head: see query_sums.cuh.
    int32_t tiles;
    void* query_sums;
    int32_t* turns;    // 0 for tiles without keys
    int32_t* tickets;  // how many blocks have started
};

}  // namespace bfa::cuda
