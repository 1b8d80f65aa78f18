// Blackwell's tensor memory of a block: 128 lanes of up to 512 columns of 32 bits.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "shared_memory.h"

namespace ptx {

class TensorMemory {
public:
    static constexpr uint32_t kRows = 128, kColumns = 512;

    // Adjacent columns in some groups of 16 lanes, one bit per group.
    struct Region {
        uint32_t column, columns;
        uint8_t groups;
    };

    uint32_t& at(uint32_t lane, uint32_t column) { return data_[lane * kColumns + column]; }

    // Allocates adjacent columns at a random place, and returns the first, or none if there are not
    // enough. The agents that read have numbers below `agents`.
    std::optional<uint32_t> allocate(uint32_t columns, uint32_t agents, std::mt19937_64& random);
    // Frees an allocation, and returns whether these columns were one.
    bool release(uint32_t column, uint32_t columns);
    bool is_allocated(uint32_t column, uint32_t columns) const;
    bool is_empty() const { return allocated_.empty(); }

    // Records an access, and returns its violation if there is one.
    std::optional<Violation> read(const Region& region, const Access& access);
    std::optional<Violation> write(const Region& region, const Access& access);

    bool may_allocate = true;

private:
    template <class F>
    std::optional<Violation> for_each_cell(const Region& region, F f);

    std::vector<uint32_t> data_;
    std::map<uint32_t, uint32_t> allocated_;  // first column to number of columns
    std::unique_ptr<SharedMemory> record_;    // each 4 bytes represent 16 lanes of a column
};

}  // namespace ptx
