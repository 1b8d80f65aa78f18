// The bias of a form in the pages of a cache. Decoding is compiled once for all forms, and calls
// these functions once for each query and tile.
#pragma once

#include <limits>

#include "../pages.h"

namespace bfa::BFA_KERNELS {

template <class Real>
class PageBias {
public:
    explicit PageBias(const Decode& problem) : p_(problem) {}

    virtual void begin_block(const RowBlock& block) { block_ = &block; }

    // Sets out[c] to the bias in base 2, for the visible columns c of the tile `keys`. `slot` is
    // that of its first key.
    virtual void fill(int row, Range keys, const PageSlot& slot, Range visible,
                      Real* out) const = 0;

    // Returns an upper bound on the bias of the keys of the tile, in natural logarithms. The tiles
    // of forms without one are never skipped.
    virtual double highest(int, Range, const PageSlot&) const {
        return std::numeric_limits<double>::infinity();
    }

protected:
    ~PageBias() = default;

    struct Distances {
        int64_t nearest, farthest;
    };

    // The distances of the visible keys of a tile.
    Distances distances(int row, Range keys) const {
        const int64_t position = block_->position(row);
        return {std::min(position - keys.end + 1, p_.window - 1),
                std::min(position - keys.begin, p_.window - 1)};
    }

    // Returns the address of the value of a tensor per query.
    template <class T>
    const T* query_values(const FormTensor& tensor, int row) const {
        return tensor.at<T>(block_->b, block_->head(row)) + block_->query(row);
    }

    // Returns the maximum of sign * extremes[x] over the blocks of a table that hold the distances.
    static double largest_in_blocks(const Real* extremes, Distances distances, Real sign) {
        int64_t x = distances.nearest / constants::PEAK_DISTANCES;
        Real largest = sign * extremes[x];
        while (++x <= distances.farthest / constants::PEAK_DISTANCES)
            largest = std::max(largest, sign * extremes[x]);
        return double(largest);
    }

    const Decode& p_;
    const RowBlock* block_ = nullptr;
};

}  // namespace bfa::BFA_KERNELS
