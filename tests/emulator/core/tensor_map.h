// Tensor maps: 128 bytes that describe a tensor in global memory and a box of it. The encoding of
// hardware is not documented; this one is the emulator's own.
#pragma once

#include <array>
#include <string>

#include "machine.h"

namespace ptx {

constexpr int kMaxRank = 5;

// Dimensions are in the order of PTX: the contiguous one is first. Enumerated fields have the
// numbers of tensormap.replace.
struct TensorMap {
    uint64_t address = 0;
    std::array<uint64_t, kMaxRank - 1> strides{};  // in bytes, of all dimensions except the first
    std::array<uint32_t, kMaxRank> dims{}, box{}, element_strides{};
    uint8_t rank_less_one = 0;
    uint8_t element = 0;
    uint8_t interleave = 0;
    uint8_t swizzle = 0;  // 0: none, 1: 32 bytes, 2: 64 bytes, 3: 128 bytes
    uint8_t atomicity = 0;
    uint8_t fill = 0;  // the value outside the tensor, 0: zero, 1: NaN
    std::array<uint8_t, 22> reserved{};

    int rank() const { return rank_less_one + 1; }
    uint32_t element_bytes() const;
    bool is_tf32() const { return element == 11 || element == 12; }
    // The swizzled address of the byte of a box at this shared address.
    uint32_t swizzled(uint32_t shared_address) const;
    // The reason why the map is invalid, or "".
    std::string refusal() const;
};
static_assert(sizeof(TensorMap) == 128);

// The part of a tensor that a copy moves.
class Box {
public:
    Box(const TensorMap& map, const std::array<int32_t, kMaxRank>& first);

    uint32_t bytes() const { return bytes_; }
    // Faults if the access to the box does, and counts the traffic.
    void check(const Warp& w, int lane, const GlobalAccess& access) const;
    // All elements, the contiguous dimension first, with the fill value outside the tensor.
    std::vector<uint8_t> read() const;
    // Calls f(address in global memory, offset in the box, bytes) for each contiguous run within
    // the tensor.
    template <class F>
    void for_each_run(F f) const;

private:
    TensorMap map_;
    std::array<int32_t, kMaxRank> first_;
    std::array<uint32_t, kMaxRank> count_;  // elements in each dimension
    uint32_t bytes_;
};

template <class F>
void Box::for_each_run(F f) const {
    const uint32_t size = map_.element_bytes(), rows = bytes_ / (count_[0] * size);
    for (uint32_t row = 0; row < rows; ++row) {
        uint64_t address = map_.address;
        bool inside = true;
        uint32_t rest = row;
        for (int d = 1; d < map_.rank(); ++d) {
            const auto i =
                static_cast<int64_t>(rest % count_[d]) * map_.element_strides[d] + first_[d];
            rest /= count_[d];
            inside &= i >= 0 && i < map_.dims[d];
            address += static_cast<uint64_t>(i) * map_.strides[d - 1];
        }
        if (!inside) continue;
        const int64_t step = map_.element_strides[0], end = map_.dims[0];
        for (int64_t e = 0; e < count_[0];) {
            const int64_t i = first_[0] + e * step;
            if (i >= end) break;
            if (i < 0) {
                ++e;
                continue;
            }
            const int64_t n = step == 1 ? std::min<int64_t>(count_[0] - e, end - i) : 1;
            f(address + static_cast<uint64_t>(i) * size,
              (row * count_[0] + static_cast<uint32_t>(e)) * size, static_cast<uint32_t>(n) * size);
            e += n;
        }
    }
}

// The map of a copy of this warp. Faults if it is invalid, or was modified without a fence since.
TensorMap load_tensor_map(const Warp& w, int lane, uint64_t address);

// fence.proxy.tensormap with acquire semantics.
Next fence_for_tensor_maps(Warp& w, const Instruction& i);

}  // namespace ptx
