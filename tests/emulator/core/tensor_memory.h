// Blackwell's tensor memory of a block: 128 lanes of up to 512 columns of 32 bits.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

namespace ptx {

struct TensorMemory {
    static constexpr int kLanesOfTensorMemory = 128, kColumns = 512;

    std::vector<uint32_t> data;
    std::map<uint32_t, uint32_t> allocated;  // first column to number of columns
    bool may_allocate = true;

    uint32_t& at(uint32_t lane, uint32_t column) {
        if (data.empty()) data.resize(kLanesOfTensorMemory * kColumns, 0xA5A5A5A5);
        return data[lane * kColumns + column];
    }
};

}  // namespace ptx
