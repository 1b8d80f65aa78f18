// Online softmax in base 2 of the rows of a thread: rows r and r + 8 of the sums of wgmma.cuh.
#pragma once

#include "elements.cuh"
#include "ptx.cuh"

namespace bfa::cuda {

constexpr float kInfinity = __builtin_bit_cast(float, 0x7F800000);
constexpr float kLowest = -3.4028234663852886e38f;
constexpr float kLog2E = 1.4426950408889634f;
constexpr double kLn2 = 0.6931471805599453;

// Reduces over the four threads that share a row.
template <class Operation>
__device__ float over_row(float x, Operation operation) {
    x = operation(x, __shfl_xor_sync(~0u, x, 1));
    return operation(x, __shfl_xor_sync(~0u, x, 2));
}

// Invariant: over the keys so far, lse = ln(2) (pivot + log2 sum), where this thread has the sum of
// its own columns. Rows that have seen no keys have the lowest pivot and the sum 0.
struct Softmax {
    float pivot[2] = {kLowest, kLowest};
    float sum[2] = {0, 0};

    // Replaces logits x * multiplier by weights relative to the new pivots. Returns what earlier
    // weights of each row are to be multiplied by.
    template <int kCount>
    __device__ void add(float (&x)[kCount], float multiplier, float (&rescale)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float highest = -kInfinity;
#pragma unroll
            for (int n = 2 * r; n < kCount; n += 4) highest = fmaxf(highest, fmaxf(x[n], x[n + 1]));
            highest = over_row(highest, [](float a, float b) { return fmaxf(a, b); });
            const float next = fmaxf(pivot[r], highest * multiplier);
            rescale[r] = exp2_approximate(pivot[r] - next);
            pivot[r] = next;
            float added = 0;
#pragma unroll
            for (int n = 2 * r; n < kCount; n += 4) {
                x[n] = exp2_approximate(x[n] * multiplier - next);
                x[n + 1] = exp2_approximate(x[n + 1] * multiplier - next);
                added += x[n] + x[n + 1];
            }
            sum[r] = sum[r] * rescale[r] + added;
        }
    }

    // Sums over all columns, after the last keys.
    __device__ void finish() {
#pragma unroll
        for (int r = 0; r < 2; ++r)
            sum[r] = over_row(sum[r], [](float a, float b) { return a + b; });
    }
    // The factor of the outputs, 0 for rows without keys.
    __device__ float inverse(int r) const { return sum[r] == 0 ? 0 : 1 / sum[r]; }
    __device__ float log_sum(int r) const { return log2f(sum[r]); }
    __device__ float lse(int r) const { return float((double(pivot[r]) + log_sum(r)) * kLn2); }
};

template <int kCount>
__device__ void multiply(float (&x)[kCount], const float (&factor)[2]) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) x[n] *= factor[n / 2 % 2];
}

// Rounds to the fragments of the left operand of a product.
template <class Element, int kCount>
__device__ void round_to(uint32_t (&fragments)[kCount / 2], const float (&x)[kCount]) {
#pragma unroll
    for (int n = 0; n < kCount; n += 2) fragments[n / 2] = Element::pair(x[n], x[n + 1]);
}

}  // namespace bfa::cuda
