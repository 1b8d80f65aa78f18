// The logits of a tile whose rows are keys and whose columns are queries; see logits.cuh.
#pragma once

#include "forms/form.cuh"
#include "query_tiles.cuh"

namespace bfa::cuda {

// For the two keys of a thread, and the queries of one head. kSeparates: whether the bias of a tile
// may be separated.
template <class Element, int kQueries, class Form, bool kSeparates = false>
class KeyLogits {
    using Keys = WarpKeys<Form, Element>;
    using Numbers = TileNumbers<kQueries>;

public:
    // The logits are the results of `complete` times this number.
    float multiplier = 1;

    __device__ KeyLogits(const Block& block, Place place)
        : block_(block), column_(place.column()), keys_(block, place) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int key = block.first + place.row(r);
            if constexpr (kSeparates)
                separated_[r] = Form::separated_key(block, key);
            else
                state_[r] = Form::key(block, key);
        }
    }

    // For queries i, i + 1, ... of one tile of the plan.
    __device__ void complete(float (&s)[kQueries / 2], Numbers& numbers, int i) {
        if constexpr (Keys::kExists) {
            const bool has_bias = keys_.template may_differ<kQueries>(i);
            multiplier = has_bias ? kLog2E : 1;
            if (has_bias) {
                keys_.template add<kQueries>(s, block_.problem.scale, numbers.of_form);
            } else {
                add_bias(s, numbers, [](int) { return 0.0f; });
            }
        } else {
            add_bias(s, numbers, [](int) { return 0.0f; });
        }
        mask(s, numbers.limits);
    }
    // Replaces products by p.
    __device__ void exponentiate(float (&s)[kQueries / 2], Numbers& numbers) const {
        const float* lse = numbers.lse + column_;
        if (kSeparates && separated(numbers).side != 0)
            add_separated(s, numbers);
        else
            add_bias(s, numbers, [&](int column) { return lse[column]; });
        mask(s, numbers.limits);
#pragma unroll
        for (float& x : s) x = exp2_approximate(x);
    }
    // Adds the dS of these queries to the gradients of the bias. The position of the first one is
    // loaded: the compiler would keep known distances, which take 32 registers.
    __device__ void add_gradients(float (&gradients)[2], const float (&grad_s)[kQueries / 2],
                                  Numbers& numbers) const {
        if (kSeparates && separated(numbers).side != 0)
            return add_separated_gradients(gradients, grad_s, numbers);
        with_distances(numbers.limits.position, [&](auto distance) {
            for_each_sum<kQueries>([&](int n, int r, int column) {
                gradients[r] += Form::gradient_of_key(state(r), numbers.of_form, column_ + column,
                                                      distance(r, column), grad_s[n]);
            });
        });
    }

private:
    // Registers are scarce: what separated biases do not need is computed again.
    __device__ int key(int r) const {
        const int thread = int(thread_again()) - kGroupThreads;
        return block_.first + Place{thread / kGroupThreads, thread % kGroupThreads}.row(r);
    }
    __device__ typename Form::Key state(int r) const {
        if constexpr (kSeparates)
            return Form::key(block_, key(r));
        else
            return state_[r];
    }
    // Calls f with a function that returns the distance of the query in a column to key r.
    template <class Function>
    __device__ void with_distances(int position, Function f) const {
        if constexpr (Form::kHasSides) {
            if (block_.problem.causal) return f([](int, int) { return Past{}; });
        }
        const int first = position + column_;
        const float distance[2] = {float(first - key(0)), float(first - key(1))};
        f([&](int r, int column) { return distance[r] + float(column); });
    }
    // Subtracts less(column), too.
    template <class Function>
    __device__ void add_bias(float (&s)[kQueries / 2], Numbers& numbers, Function less) const {
        const float scale = block_.problem.scale * kLog2E;
        if constexpr (!Form::kExists) {
            for_each_sum<kQueries>(
                [&](int n, int, int column) { s[n] = s[n] * scale - less(column); });
            return;
        }
        const typename Form::Key states[2] = {state(0), state(1)};
        with_distances(numbers.limits.position, [&](auto distance) {
            for_each_sum<kQueries>([&](int n, int r, int column) {
                const float bias = Form::bias_of_key(states[r], numbers.of_form, column_ + column,
                                                     distance(r, column));
                s[n] = s[n] * scale + (bias - less(column));
            });
        });
    }
    static __device__ auto& separated(Numbers& numbers) {
        return SeparatedNumbers<kQueries>::template of<Form>(numbers);
    }
    __device__ void add_separated(float (&s)[kQueries / 2], Numbers& numbers) const {
        const auto& of_tile = separated(numbers);
        const float scale = block_.problem.scale * kLog2E;
        const float keys[2] = {of_tile.side * separated_[0], of_tile.side * separated_[1]};
        const float *starts = of_tile.starts + column_, *factors = of_tile.factors + column_;
        for_each_sum<kQueries>([&](int n, int r, int column) {
            const float factor = Form::kHasFactors ? factors[column] : 1;
            s[n] = s[n] * scale + (factor * keys[r] + starts[column]);
        });
    }
    // Of a form whose gradient is the distance.
    __device__ void add_separated_gradients(float (&gradients)[2],
                                            const float (&grad_s)[kQueries / 2],
                                            Numbers& numbers) const {
        float plain[2] = {0, 0}, weighted[2] = {0, 0};  // by the distance from the first column
        for_each_sum<kQueries>([&](int n, int r, int column) {
            plain[r] += grad_s[n];
            weighted[r] += grad_s[n] * float(column);
        });
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const auto distance = float(numbers.limits.position + column_ - key(r));
            gradients[r] += separated(numbers).side * (plain[r] * distance + weighted[r]);
        }
    }
    __device__ void mask(float (&s)[kQueries / 2], const TileLimits& limits) const {
        const int group = (int(threadIdx.x) / kGroupThreads - 1);
        if (!(limits.masked >> group & 1)) return;
        const Problem& problem = block_.problem;
        const Range visible[2] = {limits.visible_to(problem, key(0)),
                                  limits.visible_to(problem, key(1))};
        const int first = limits.position + column_;
        for_each_sum<kQueries>([&](int n, int r, int column) {
            if (!visible[r].contains(first + column)) s[n] = -kInfinity;
        });
    }

    const Block& block_;
    int column_;
    typename Form::Key state_[2];  // unless kSeparates
    float separated_[2];           // if kSeparates
    Keys keys_;
};

}  // namespace bfa::cuda
