// What a block computes: one head of one sequence, whose rows are counted from its first ones.
#pragma once

#include "params.h"

namespace bfa::cuda {

__host__ __device__ constexpr int minimum(int a, int b) { return a < b ? a : b; }
__host__ __device__ constexpr int maximum(int a, int b) { return a > b ? a : b; }

// Keys, or columns of a tile, from `begin` to `end` - 1.
struct Range {
    int begin, end;

    __device__ bool contains(int n) const { return begin <= n && n < end; }
};

struct Head {
    int b, h, kv_head;
    int entry;  // of q, k and v
    int first_query, n_query, first_key, n_key, shift;

    __device__ Head(const Problem& problem, int b, int h)
        : b(b), h(h), kv_head(h / problem.group), entry(problem.packed ? 0 : b) {
        Sequence rows{0, problem.n_query, 0, problem.n_key, problem.shift};
        if (problem.sequences) rows = problem.sequences[b];
        first_query = int(rows.first_query), n_query = int(rows.n_query);
        first_key = int(rows.first_key), n_key = int(rows.n_key), shift = int(rows.shift);
    }

    // The position of a query, counted from the first key.
    __device__ int position(int i) const { return i + n_key - n_query + shift; }
    // The number of positions that have steps.
    __device__ int places() const { return n_key + shift; }
};

// A block of rows of a head: the program `rank` of some `count`, by decreasing work.
struct Program {
    int b, h, block;

    // heads: of a batch index.
    __device__ Program(const Problem& problem, int heads, int rank, int count,
                       bool last_first = true) {
        int group;
        if (problem.order) {
            const int number = problem.order[rank];
            group = number / problem.blocks, block = number % problem.blocks;
        } else {
            const int groups = count / problem.blocks;
            group = rank % groups, block = rank / groups;
            if (last_first) block = problem.blocks - 1 - block;
        }
        b = group / heads, h = group % heads;
    }
};

// The range of keys that the plan leaves to the tile of query i.
__device__ inline Range planned_keys(const Problem& problem, const Head& head, int i) {
    const auto& first = problem.plan.first_key;
    if (!first.data) return {0, head.n_key};
    const int32_t* begin = first.at(head.b, head.h) + i / kPlanQueries;
    return {*begin, problem.plan.end_key[begin - first.data]};
}

// The keys that the query at position p attends to: a range, whose bounds do not decrease with p.
__device__ inline Range visible_keys(const Problem& problem, Range planned, int p) {
    return {maximum(planned.begin, p - problem.window + 1),
            problem.causal ? minimum(planned.end, p + 1) : planned.end};
}

}  // namespace bfa::cuda
