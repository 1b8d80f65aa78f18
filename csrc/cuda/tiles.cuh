// The warp groups of a block, and its tiles in shared memory.
#pragma once

#include "elements.cuh"
#include "forms/form.cuh"
#include "pipeline.cuh"
#include "wgmma.cuh"

namespace bfa::cuda {

constexpr int kGroupRows = 64;              // rows of a matrix product
constexpr int kBlockRows = 2 * kGroupRows;  // queries of a block, or keys
constexpr int kConsumerWarps = 8;
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;
static_assert(kBlockRows == kPlanQueries, "a block has one range of keys");

// A tile of keys and values. HeadDim and ValueDim are padded to whole panels. kNumbers: the floats
// of a stage that the form needs, and in the backward kernels lse and D.
template <class Element_, int kHeadDim_, int kValueDim_, int kKeys_, int kStages_, int kNumbers_>
struct Tile {
    using Element = Element_;
    static constexpr int kHeadDim = kHeadDim_, kValueDim = kValueDim_;
    static constexpr int kKeys = kKeys_, kStages = kStages_, kNumbers = kNumbers_;
};

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
        const Head& head = block.head;
        const int last = minimum(block.first + kBlockRows, head.n_query) - 1;
        begin = __shfl_sync(~0u, block.visible_to(head.position(block.first)).begin, 0);
        const int end = block.visible_to(head.position(last)).end;
        count = __shfl_sync(~0u, maximum(0, (end - begin + kKeys - 1) / kKeys), 0);
    }
    __device__ int first_key(int n) const { return begin + n * kKeys; }
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
