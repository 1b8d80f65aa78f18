// Prepares the backward pass: D_i = dO_i . o_i - dlse_i, and lse in base 2. A warp computes a row;
// sequences do not matter.
#include "elements.cuh"
#include "softmax.cuh"

namespace bfa::cuda {

template <class Element>
__global__ void __launch_bounds__(256)
    attn_bwd_delta_kernel(const __grid_constant__ DeltaParams params) {
    const int64_t number = blockIdx.x * 8ll + threadIdx.x / 32;
    const int lane = int(threadIdx.x) % 32, i = int(number % params.rows);
    const int head = int(number / params.rows), b = head / params.heads, h = head % params.heads;
    if (b >= params.batch) return;
    const auto* o = params.o.template at<const Element>(b, h, i);
    const auto* grad_o = params.grad_o.template at<const Element>(b, h, i);
    float sum = 0;
    for (int c = lane; c < params.value_dim; c += 32) sum += o[c].value() * grad_o[c].value();
    for (int n = 16; n > 0; n /= 2) sum += __shfl_xor_sync(~0u, sum, n);
    if (lane > 0) return;
    const float pivot = *params.pivot.at(b, h, i), log_sum = *params.log_sum.at(b, h, i);
    const bool is_empty = log_sum == -kInfinity;
    *params.delta.at(b, h, i) = is_empty ? 0 : sum - *params.grad_lse.at(b, h, i);
    // Beyond 2^24 lse is rounded by 1 or more, so that weights would be wrong by the factor 2.
    const float lse = pivot + log_sum;
    *params.lse_in_base_2.at(b, h, i) = fabsf(lse) > 0x1p24f ? kInfinity : lse;
}

}  // namespace bfa::cuda
