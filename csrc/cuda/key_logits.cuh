// The logits of a tile whose rows are keys and whose columns are queries; see logits.cuh.
#pragma once

#include "forms/form.cuh"
#include "tiles.cuh"

namespace bfa::cuda {

// The tiles of queries that attend to keys of a block.
template <int kQueries>
struct QueryTiles {
    int begin, count;

    // block.first: the first key.
    __device__ explicit QueryTiles(const Block& block) {
        const Problem& problem = block.problem;
        const Head& head = block.head;
        const int end_key = minimum(block.first + kBlockRows, head.n_key);
        const int shift = head.position(0);
        begin = problem.causal ? maximum(0, block.first - shift) : 0;
        int end = minimum(head.n_query, end_key - 1 + problem.window - shift);
        if (problem.plan.first_key.data) {
            // The bounds of the plan do not decrease from tile to tile.
            while (begin < end && planned_keys(problem, head, begin).end <= block.first)
                begin = (begin / kPlanQueries + 1) * kPlanQueries;
            while (begin < end && planned_keys(problem, head, end - 1).begin >= end_key)
                end = (end - 1) / kPlanQueries * kPlanQueries;
        }
        begin = begin / kQueries * kQueries;
        count = maximum(0, (end - begin + kQueries - 1) / kQueries);
    }
    __device__ int first_query(int n) const { return begin + n * kQueries; }
};

// For the two keys of a thread, and the queries of one head.
template <class Element, int kQueries, class Form>
class KeyLogits {
    using Keys = WarpKeys<Form, Element>;

public:
    // The logits are the results of `complete` times this number.
    float multiplier = 1;

    __device__ KeyLogits(const Block& block, Place place)
        : block_(block), column_(place.column()), group_(place.group), keys_(block, place) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            key_[r] = block.first + place.row(r);
            state_[r] = Form::key(block, key_[r]);
        }
    }

    // For queries i, i + 1, ... of one tile of the plan.
    __device__ void complete(float (&s)[kQueries / 2], const float* numbers, int i) {
        if constexpr (Keys::kExists) {
            const bool has_bias = keys_.template may_differ<kQueries>(i);
            multiplier = has_bias ? kLog2E : 1;
            if (has_bias) {
                keys_.template add<kQueries>(s, block_.problem.scale, numbers);
            } else {
                add_bias(s, numbers, i);
            }
        } else {
            add_bias(s, numbers, i);
        }
        mask(s, i);
    }
    // Adds the dS of these queries to the gradients of the bias. position: that of the first one, a
    // number that the compiler does not know: it would keep distances, which take 32 registers.
    __device__ void add_gradients(float (&gradients)[2], const float (&grad_s)[kQueries / 2],
                                  const float* numbers, int position) const {
        if constexpr (Form::kTrainsSums) {
            with_distances(position, [&](auto distance) {
                for_each_sum<kQueries>([&](int n, int r, int column) {
                    gradients[r] += Form::gradient_of_key(state_[r], numbers, column_ + column,
                                                          distance(r, column), grad_s[n]);
                });
            });
        }
    }

private:
    // Calls f with a function that returns the distance of the query in a column to key r.
    template <class Function>
    __device__ void with_distances(int position, Function f) const {
        if constexpr (Form::kHasSides) {
            if (block_.problem.causal) return f([](int, int) { return Past{}; });
        }
        const int first = position + column_;
        const float distance[2] = {float(first - key_[0]), float(first - key_[1])};
        f([&](int r, int column) { return distance[r] + float(column); });
    }
    __device__ void add_bias(float (&s)[kQueries / 2], const float* numbers, int i) const {
        const float scale = block_.problem.scale * kLog2E;
        with_distances(block_.head.position(i), [&](auto distance) {
            for_each_sum<kQueries>([&](int n, int r, int column) {
                s[n] = s[n] * scale +
                       Form::bias_of_key(state_[r], numbers, column_ + column, distance(r, column));
            });
        });
    }
    // The positions of the queries that attend to a key, if the plan leaves it to them.
    __device__ Range visible_to(int key, Range planned) const {
        const Problem& problem = block_.problem;
        if (!planned.contains(key)) return {kFarthest, -kFarthest};
        return {problem.causal ? key : -kFarthest, key + problem.window};
    }
    __device__ void mask(float (&s)[kQueries / 2], int i) const {
        const Range planned = planned_keys(block_.problem, block_.head, i);
        const int first_key = block_.first + group_ * kGroupRows;
        const Range of_first = visible_to(first_key, planned);
        const Range of_last = visible_to(first_key + kGroupRows - 1, planned);
        const int p = block_.head.position(i);
        if (of_last.begin <= p && p + kQueries <= of_first.end) return;
        const Range visible[2] = {visible_to(key_[0], planned), visible_to(key_[1], planned)};
        for_each_sum<kQueries>([&](int n, int r, int column) {
            if (!visible[r].contains(p + column_ + column)) s[n] = -kInfinity;
        });
    }

    static constexpr int kFarthest = 1 << 30;
    const Block& block_;
    int column_, group_;
    int key_[2];
    typename Form::Key state_[2];
    Keys keys_;
};

}  // namespace bfa::cuda
