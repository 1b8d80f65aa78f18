// The end of the backward pass: dq and the gradients of the queries' operands, from the sums that
// blocks of keys have added.
//
// A block computes a tile of queries of a head.
#include "output.cuh"
#include "query_sums.cuh"

namespace bfa::cuda {

template <class Element, int kHeadDim, bool kHasSums>
__global__ void __launch_bounds__(2 * kGroupThreads)
    attn_bwd_store_kernel(const __grid_constant__ BackwardParams params) {
    __shared__ alignas(16) Element rows[2][1][kGroupRows][kPanel];
    const Problem& problem = params.problem;
    const Program program(problem, problem.heads, blockIdx.x, gridDim.x);
    const Head head(problem, program.b, program.h);
    const int i = program.block * kTileQueries;
    if (i >= head.n_query) return;  // a sequence that is shorter than others

    const int64_t number = tile_number(params, head, i);
    const auto& sums = static_cast<const QuerySums<kHeadDim, kHasSums>*>(params.query_sums)[number];
    const bool is_written = params.turns[number] > 0;
    const int group = int(threadIdx.x) / kGroupThreads, thread = int(threadIdx.x) % kGroupThreads;
    float dq[kHeadDim / 4];
#pragma unroll
    for (int n = 0; n < kHeadDim / 16; ++n) {
        const auto of_thread = reinterpret_cast<const float4*>(sums.dq[group][n][thread]);
        const float4 four = is_written ? *of_thread : float4{0, 0, 0, 0};
        dq[4 * n] = four.x, dq[4 * n + 1] = four.y, dq[4 * n + 2] = four.z, dq[4 * n + 3] = four.w;
    }
    const float scale[2] = {problem.scale, problem.scale};
    multiply(dq, scale);

    const int64_t first = head.first_query + i;
    const int count = head.n_query - i;
    if constexpr (kHasSums) {
        const int n = int(threadIdx.x);
        if (n < minimum(kTileQueries, count)) {
            *params.grad_query_sums.at(head.b, head.h, first + n) =
                is_written ? sums.prefix_sums[n] : 0;
            *params.grad_gain.at(head.b, head.h, first + n) = is_written ? sums.gains[n] : 0;
        }
    }
    const int channel = group * kHeadDim / 2;
    Rows<void> to = params.grad_q;
    to.data = to.at<Element>(0, 0) + channel;
    store_rows(rows[group], dq, {to, head.b, head.h, first, count, params.head_dim - channel},
               {0, thread});
}

}  // namespace bfa::cuda
