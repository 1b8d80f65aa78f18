// From products to the logits of a tile in base 2: scale, bias and mask, always in this order.
#pragma once

#include "forms/form.cuh"
#include "tiles.cuh"

namespace bfa::cuda {

static_assert(kPlanQueries % kGroupRows == 0, "a group has one range of keys");

// For the two queries of a thread. kStarts: whether products are added to the bias.
template <class Element, int kKeys, class Form, bool kStarts = false>
class Logits {
    using Queries = WarpQueries<Form, Element>;

public:
    // The logits are the results of `complete` times this number.
    float multiplier;
    Queries queries;

    __device__ Logits(const Block& block, Place place)
        : queries(block, place), block_(block), column_(place.column()) {
        scale_ = block.problem.scale * kLog2E;
        multiplier = Form::kExists && !kStarts ? 1 : scale_;
        position_ = block.head.position(block.first + place.row(0));
#pragma unroll
        for (int r = 0; r < 2; ++r) query_[r] = Form::query(block, block.first + place.row(r));
        const int first_row = block.first + place.group * kGroupRows;
        planned_ = planned_keys(block.problem, block.head, minimum(first_row, block.last()));
        const int first = block.head.position(first_row);
        visible_to_all_ = {visible_to(first + kGroupRows - 1).begin, visible_to(first).end};
    }

    // Sets s to the bias of keys j, j + 1, ... in units of products. numbers: what the form has
    // staged for them.
    __device__ void start(float (&s)[kKeys / 2], const float* numbers, int j) const {
        const float unit = 1 / scale_;
        const int side = Form::template side<kKeys>(block_, j, numbers);
        if (side == 0) {
            with_distances(j, [&](auto distance) {
                for_each_sum<kKeys>([&](int n, int r, int column) {
                    s[n] = unit * bias(r, numbers, column, distance(r, column));
                });
            });
            return;
        }
        typename Form::Start rows[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const auto distance = float(position_ + 8 * r - (j + column_));
            rows[r] = Form::template start<kKeys>(query_[r], numbers, column_, distance,
                                                  float(side), unit);
        }
        for_each_sum<kKeys>([&](int n, int r, int column) { s[n] = rows[r].at(column); });
    }
    // Completes products with keys j, j + 1, ...
    __device__ void complete(float (&s)[kKeys / 2], const float* numbers, int j) {
        if constexpr (Queries::kExists) {
            const bool has_bias = queries.template may_differ<kKeys>(j);
            multiplier = has_bias ? kLog2E : scale_;
            if (has_bias) queries.template add<kKeys>(s, block_.problem.scale, numbers);
        } else if (Form::kExists && !kStarts) {
            with_distances(j, [&](auto distance) {
                for_each_sum<kKeys>([&](int n, int r, int column) {
                    s[n] = s[n] * scale_ + bias(r, numbers, column, distance(r, column));
                });
            });
        }
        if (j < visible_to_all_.begin || j + kKeys > visible_to_all_.end) mask(s, j);
    }

    // Adds the dS of these keys to the gradients of the bias.
    __device__ void add_gradients(QueryGradient (&gradients)[2], const float (&grad_s)[kKeys / 2],
                                  const float* numbers, int j) {
        if constexpr (Queries::kExists) {
            if (queries.template may_differ<kKeys>(j))
                queries.template add_gradient<kKeys>(grad_s, numbers);
        }
        if constexpr (Form::kTrainsGain || Form::kTrainsSums) {
            // Numbers are read again: those of `complete` would take too many registers.
            __syncwarp();
            with_distances(j, [&](auto distance) {
                for_each_sum<kKeys>([&](int n, int r, int column) {
                    Form::add_gradient(gradients[r], query_[r], numbers, column_ + column,
                                       distance(r, column), grad_s[n]);
                });
            });
        }
    }

private:
    __device__ Range visible_to(int p) const { return visible_keys(block_.problem, planned_, p); }
    // Calls f with a function that returns the distance of row r to the key in a column.
    template <class Function>
    __device__ void with_distances(int j, Function f) const {
        if constexpr (Form::kHasSides) {
            if (block_.problem.causal) return f([](int, int) { return Past{}; });
        }
        const int first = j + column_;
        const float distance[2] = {float(position_ - first), float(position_ + 8 - first)};
        f([&](int r, int column) { return distance[r] - float(column); });
    }
    template <class D>
    __device__ float bias(int r, const float* numbers, int column, D distance) const {
        return Form::bias(query_[r], numbers, column_ + column, distance);
    }
    __device__ void mask(float (&s)[kKeys / 2], int j) const {
        const Range visible[2] = {visible_to(position_), visible_to(position_ + 8)};
        const int first = j + column_;
        for_each_sum<kKeys>([&](int n, int r, int column) {
            if (!visible[r].contains(first + column)) s[n] = -kInfinity;
        });
    }

    const Block& block_;
    float scale_;   // in base 2
    int column_;    // the thread's first one
    int position_;  // of the first of its rows, which are 8 apart
    Range planned_, visible_to_all_;
    typename Form::Query query_[2];
};

}  // namespace bfa::cuda
