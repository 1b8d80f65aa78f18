// Tiles of queries, which kernels that own keys stream.
#pragma once

#include "backward_tiles.cuh"
#include "softmax.cuh"

namespace bfa::cuda {

// Of each thread: warps that copy also load the numbers of many queries at a time.
constexpr int kRegistersOfProducers = 56, kRegistersOfConsumers = 224;

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
        const Plan& plan = problem.plan;
        if (plan.first_query.data) {
            const int32_t* first = plan.first_query.at(head.b, head.h, block.first / kBlockRows);
            begin = maximum(begin, *first);
            end = minimum(end, plan.end_query[first - plan.first_query.data]);
        }
        begin = begin / kQueries * kQueries;
        count = maximum(0, (end - begin + kQueries - 1) / kQueries);
    }
    __device__ int first_query(int n) const { return begin + n * kQueries; }
    __device__ bool contains(int i) const { return begin <= i && i < begin + count * kQueries; }
};

// Calls f for each query head of a key head, with the tiles of its queries.
template <class Tile, class Function>
__device__ void for_each_head(const BackwardParams& params, const Head& key_head, int first_key,
                              Function f) {
    for (int n = 0; n < params.problem.group; ++n) {
        Head head = key_head;
        head.h = key_head.kv_head * params.problem.group + n;
        const Block block{params.problem, params.bias, head, first_key, kBlockRows};
        f(block, QueryTiles<Tile::kKeys>(block));
    }
}

// What limits the pairs of a tile that are visible.
struct TileLimits {
    int position;   // of the first query
    Range planned;  // keys
    int masked;     // bit g: whether some pairs with keys of group g are invisible

    // For the tile of query i, and keys of the block.
    __device__ TileLimits(const Block& block, int i, int count)
        : position(block.head.position(i)), planned(planned_keys(block.problem, block.head, i)) {
        masked = 0;
#pragma unroll
        for (int group = 0; group < kBlockRows / kGroupRows; ++group) {
            const int first = block.first + group * kGroupRows, last = first + kGroupRows - 1;
            const bool are_planned = planned.begin <= first && last < planned.end;
            const bool are_visible = are_planned &&
                                     visible_to(block.problem, last).begin <= position &&
                                     position + count <= visible_to(block.problem, first).end;
            masked |= are_visible ? 0 : 1 << group;
        }
    }
    // The positions of the queries that attend to a key, if the plan leaves it to them.
    __device__ Range visible_to(const Problem& problem, int key) const {
        if (!planned.contains(key)) return {kFarthest, -kFarthest};
        return {problem.causal ? key : -kFarthest, key + problem.window};
    }

private:
    static constexpr int kFarthest = 1 << 30;
};

// The numbers of a tile: lse, D, its limits, and those of the form.
template <int kQueries>
struct TileNumbers {
    float lse[kQueries], delta[kQueries];
    TileLimits limits;
    float of_form[1];  // or more

    static __device__ TileNumbers& of(float* numbers) {
        return *reinterpret_cast<TileNumbers*>(numbers);
    }
};

// Of a tile, before those of the form.
template <int kQueries>
constexpr int kNumbersOfTile = sizeof(TileNumbers<kQueries>) / sizeof(float) - 1;

// Provides the numbers of the tile of query i. The whole warp calls it.
template <class Tile, class Form>
__device__ void stage_numbers(const BackwardParams& params, BackwardShared<Tile>& shared,
                              const Block& block, int i, int stage, int lane) {
    constexpr int kQueries = Tile::kKeys;
    static_assert(kNumbersOfTile<kQueries> + Form::template kNumbersOfQueries<kQueries> <=
                  Tile::kNumbers);
    const Head& head = block.head;
    auto& numbers = TileNumbers<kQueries>::of(shared.numbers[stage]);
    if (lane == 0) numbers.limits = TileLimits(block, i, kQueries);
    // Queries after the last one repeat its loads, so that all loads are under way at a time.
#pragma unroll
    for (int n = lane; n < kQueries; n += 32) {
        const bool exists = i + n < head.n_query;
        const int64_t row = head.first_query + minimum(i + n, head.n_query - 1);
        const float lse = *params.lse_in_base_2.at(head.b, head.h, row);
        const float delta = *params.delta.at(head.b, head.h, row);
        numbers.lse[n] = exists ? lse : kInfinity;
        numbers.delta[n] = exists ? delta : 0;
    }
    if constexpr (Form::template kNumbersOfQueries<kQueries> > 0)
        Form::template stage_queries<kQueries>(block, i, numbers.of_form, lane);
}

// Of a tile, after those of the form, if it separates: side, b_i - lse and f_i.
template <int kQueries>
struct SeparatedNumbers {
    alignas(16) float side;
    alignas(16) float starts[kQueries], factors[kQueries];

    template <class Form>
    static __device__ SeparatedNumbers& of(TileNumbers<kQueries>& numbers) {
        constexpr int kBefore =
            kNumbersOfTile<kQueries> + Form::template kNumbersOfQueries<kQueries>;
        static_assert(kBefore % 4 == 0, "aligned");
        float* end = numbers.of_form + Form::template kNumbersOfQueries<kQueries>;
        return *reinterpret_cast<SeparatedNumbers*>(end);
    }
};

// Provides them, from the numbers of stage_numbers. A whole warp calls these.
template <class Form, int kQueries, bool kExists = Form::kSeparates>
class SeparatedQueries {
public:
    __device__ SeparatedQueries(const Block& block, int lane)
        : separated_(block, lane), lane_(lane) {}

    // For the tile of query i.
    __device__ void stage(TileNumbers<kQueries>& numbers, int i) const {
        auto& to = SeparatedNumbers<kQueries>::template of<Form>(numbers);
        const int side = separated_.side(i, kQueries);
        if (lane_ == 0) to.side = float(side);
#pragma unroll
        for (int n = lane_; n < kQueries; n += 32) {
            const auto query = Form::query_at(numbers.of_form, n);
            to.starts[n] = separated_.of_query(query, i + n, side) - numbers.lse[n];
            if constexpr (Form::kHasFactors) to.factors[n] = kLog2E * query.gain;
        }
    }

private:
    const typename Form::Separated separated_;
    const int lane_;
};

template <class Form, int kQueries>
class SeparatedQueries<Form, kQueries, false> {
public:
    __device__ SeparatedQueries(const Block&, int) {}
    __device__ void stage(TileNumbers<kQueries>&, int) const {}
};

}  // namespace bfa::cuda
