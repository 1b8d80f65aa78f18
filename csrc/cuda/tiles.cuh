// The warp groups of a block, and its tiles in shared memory.
#pragma once

#include "elements.cuh"
#include "forms/form.cuh"
#include "pipeline.cuh"
#include "wgmma.cuh"

namespace bfa::cuda {

constexpr int kGroupRows = 64;  // rows of a matrix product
// Of a block of the backward kernels.
constexpr int kBlockRows = 2 * kGroupRows;
constexpr int kConsumerWarps = 8;
static_assert(kBlockRows == kPlanQueries, "a block has one range of keys");

// The registers of each thread of the group that copies, and of some groups that compute.
template <int kGroups>
constexpr int kProducerRegisters = kGroups == 2 ? 40 : 32;
template <int kGroups>
constexpr int kConsumerRegisters = kGroups == 2 ? 232 : 160;

// A tile of keys and values, for some groups of queries. HeadDim and ValueDim are padded to whole
// panels. kNumbers: the floats of a stage that the form needs, and in the backward kernels lse and
// D.
template <class Element_, int kGroups_, int kHeadDim_, int kValueDim_, int kKeys_, int kStages_,
          int kNumbers_>
struct Tile {
    using Element = Element_;
    static constexpr int kGroups = kGroups_, kRows = kGroups * kGroupRows;
    static constexpr int kHeadDim = kHeadDim_, kValueDim = kValueDim_;
    static constexpr int kKeys = kKeys_, kStages = kStages_, kNumbers = kNumbers_;
};

// A member of a structure that only exists on a condition.
template <bool kCondition, class T>
struct Optional : T {};
template <class T>
struct Optional<false, T> {};

// Rows of kChannels channels in panels, as wgmma.cuh expects them.
template <class Element, int kChannels, int kRows>
using Panels = Element[kChannels / kPanel][kRows][kPanel];

// Copies rows `row`, row + 1, ... of a head. kBoxRows: rows of the map's boxes.
template <int kBoxRows, class Element, int kPanels, int kRows>
__device__ void copy_rows(Element (&panels)[kPanels][kRows][kPanel], const TensorMap& map,
                          Barrier& barrier, int row, int head, int entry) {
    for (int c = 0; c < kPanels; ++c) {
        for (int n = 0; n < kRows; n += kBoxRows)
            copy_box(panels[c][n], map, barrier, c * kPanel, row + n, head, entry);
    }
}

// The tiles of keys that the queries of a block attend to.
template <int kKeys>
struct KeyTiles {
    int begin, count;

    __device__ explicit KeyTiles(const Block& block) {
        // From one lane, so that the compiler knows that they are the same in all lanes.
        begin = __shfl_sync(~0u, visible_to(block, block.first).begin, 0);
        const int end = visible_to(block, block.last()).end;
        count = __shfl_sync(~0u, maximum(0, (end - begin + kKeys - 1) / kKeys), 0);
    }
    __device__ int first_key(int n) const { return begin + n * kKeys; }

private:
    static __device__ Range visible_to(const Block& block, int i) {
        return block.visible_to(block.head.position(i), i);
    }
};

// Zeros the rows from `first` on; a whole warp calls it.
template <class Element, int kPanels, int kRows>
__device__ void clear_rows(Element (&panels)[kPanels][kRows][kPanel], int first, int lane) {
    for (int panel = 0; panel < kPanels; ++panel) {
        auto* words = reinterpret_cast<uint64_t*>(panels[panel]);
        for (int n = first * (kRowBytes / 8) + lane; n < kRows * (kRowBytes / 8); n += 32)
            words[n] = 0;
    }
}

}  // namespace bfa::cuda
