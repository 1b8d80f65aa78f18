// Writes the results of warp groups.
#pragma once

#include "softmax.cuh"
#include "tiles.cuh"

namespace bfa::cuda {

// The part of a tensor that a block writes: `count` rows of a head from `first` on, with as many
// channels.
struct Target {
    const Rows<void>& tensor;
    int b, h;
    int64_t first;
    int count, channels;
};

// Writes x, the sums of a product. A warp writes its own 16 rows through its part of shared memory,
// which nothing else uses any more. Chunks of 16 bytes are permuted to avoid bank conflicts.
template <class Element, int kPanels, int kPanelRows, int kSums>
__device__ void store_rows(Element (&panels)[kPanels][kPanelRows][kPanel], const float (&x)[kSums],
                           const Target& to, Place place) {
    constexpr int kChunk = 8, kChunks = 2 * kSums / kChunk, kRows = 16;
    const int lane = place.thread % 32;
    const int first_row = place.group * kGroupRows + place.thread / 32 * kRows;
    const auto chunk = [&](int row, int channel) {
        const int in_panel = channel % kPanel / kChunk ^ row % 8;
        return &panels[channel / kPanel][first_row + row][in_panel * kChunk];
    };
#pragma unroll
    for (int n = 0; n < kSums; n += 2) {
        const int row = lane / 4 + n / 2 % 2 * 8;
        auto* pairs = reinterpret_cast<uint32_t*>(chunk(row, n / 4 * 8));
        pairs[lane % 4] = Element::pair(x[n], x[n + 1]);
    }
    __syncwarp();
#pragma unroll
    for (int n = lane; n < kRows * kChunks; n += 32) {
        const int row = n / kChunks, channel = n % kChunks * kChunk;
        if (first_row + row >= to.count || channel >= to.channels) continue;
        const int64_t of_head = to.first + first_row + row;
        auto* out = to.tensor.template at<Element>(to.b, to.h, of_head) + channel;
        *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(chunk(row, channel));
    }
}

// Writes f(r), which the threads of a row agree on, for `count` rows.
template <class Function>
__device__ void store_numbers(float* to, Place place, int count, Function f) {
    if (place.thread % 4 > 0) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (place.row(r) < count) to[place.row(r)] = f(r);
    }
}

// Writes the sums of rows, of which each thread has the sum of its own columns.
__device__ inline void store_sums(float* to, Place place, int count, const float (&own)[2]) {
    float sums[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) sums[r] = over_row(own[r], [](float a, float b) { return a + b; });
    store_numbers(to, place, count, [&](int r) { return sums[r]; });
}

}  // namespace bfa::cuda
