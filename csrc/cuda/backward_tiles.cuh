// What the backward kernels do alike. A block has rows of its own, and streams tiles of the
// others: queries stream keys, and keys stream queries. "Channels" stands for q or k, with head_dim
// channels, and "values" for dO or v, so that for all kernels
//
//     s = own channels x streamed channels^T,   dP = own values x streamed values^T
//
// Tile::kKeys is the number of rows of a streamed tile, and of the boxes of tensor maps.
#pragma once

#include "tiles.cuh"

namespace bfa::cuda {

template <class Tile>
struct BackwardShared {
    using Element = typename Tile::Element;
    using Place = Stage<Tile::kStages>;

    alignas(1024) Panels<Element, Tile::kHeadDim, kBlockRows> own_channels;
    alignas(1024) Panels<Element, Tile::kValueDim, kBlockRows> own_values;
    alignas(1024) Panels<Element, Tile::kHeadDim, Tile::kKeys> channels[Tile::kStages];
    alignas(1024) Panels<Element, Tile::kValueDim, Tile::kKeys> values[Tile::kStages];
    alignas(128) float numbers[Tile::kStages][Tile::kNumbers];
    Barrier own_full;
    Barrier uncleared;  // a tile before rows of other sequences are cleared
    Ring<Tile::kStages> ring;

    // consumers: warps that read tiles, or their numbers.
    __device__ void init(bool has_numbers, int consumers = kConsumerWarps) {
        own_full.init(1);
        uncleared.init(1);
        ring.init(has_numbers ? 2 : 1, consumers);
        fence_barrier_init();
    }
};

// The warp that copies rows. All of its lanes call these functions.
template <class Tile>
class Copier {
public:
    __device__ Copier(BackwardShared<Tile>& shared, int lane) : shared_(shared), lane_(lane) {}

    // own, sequences: as for tiles.
    __device__ void copy_own(const TensorMap& channels, const TensorMap& values, int row, int head,
                             int entry, int own, bool sequences) {
        copy(shared_.own_channels, shared_.own_values, shared_.own_full, channels, values, row,
             head, entry, own, sequences);
    }
    // Copies the next tile, of whose rows the first `own` belong to the sequence. Others may
    // contain NaN, which a weight of 0 does not remove. sequences: whether there are others.
    __device__ void copy_tile(const TensorMap& channels, const TensorMap& values, int row, int head,
                              int entry, int own, bool sequences) {
        if (lane_ == 0) shared_.ring.wait_until_empty(stage_);
        copy(shared_.channels[stage_.index], shared_.values[stage_.index],
             shared_.ring.full(stage_), channels, values, row, head, entry, own, sequences);
        stage_.advance();
    }

private:
    template <class Channels, class Values>
    __device__ void copy(Channels& to_channels, Values& to_values, Barrier& full,
                         const TensorMap& channels, const TensorMap& values, int row, int head,
                         int entry, int own, bool sequences) {
        const bool clears = sequences && own < int(sizeof(to_channels[0]) / kRowBytes);
        if (lane_ == 0) {
            Barrier& arrived = clears ? shared_.uncleared : full;
            arrived.arrive_expecting(sizeof(to_channels) + sizeof(to_values));
            copy_rows<Tile::kKeys>(to_channels, channels, arrived, row, head, entry);
            copy_rows<Tile::kKeys>(to_values, values, arrived, row, head, entry);
        }
        __syncwarp();
        if (!clears) return;
        shared_.uncleared.wait(parity_);
        parity_ ^= 1;
        clear_rows(to_channels, own, lane_);
        clear_rows(to_values, own, lane_);
        fence_async_proxy();
        __syncwarp();
        if (lane_ == 0) full.arrive();
    }

    BackwardShared<Tile>& shared_;
    int lane_;
    typename BackwardShared<Tile>::Place stage_;
    uint32_t parity_ = 0;  // of `uncleared`
};

// Issue the products s and dP of the tile in a stage.
template <class Tile>
__device__ void multiply_channels(BackwardShared<Tile>& shared, int stage, Place place,
                                  float (&s)[Tile::kKeys / 2]) {
    fence_products(s);
    multiply_rows<typename Tile::Element, Tile::kKeys, Tile::kHeadDim, kBlockRows, Tile::kKeys>(
        s, describe(shared.own_channels[0][place.group * kGroupRows]),
        describe(shared.channels[stage]));
    commit_products();
}

template <class Tile>
__device__ void multiply_values(BackwardShared<Tile>& shared, int stage, Place place,
                                float (&grad_p)[Tile::kKeys / 2]) {
    fence_products(grad_p);
    multiply_rows<typename Tile::Element, Tile::kKeys, Tile::kValueDim, kBlockRows, Tile::kKeys>(
        grad_p, describe(shared.own_values[0][place.group * kGroupRows]),
        describe(shared.values[stage]));
    commit_products();
}

}  // namespace bfa::cuda
