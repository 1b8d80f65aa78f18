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

    // Columns next to one another in some groups of 16 lanes, one bit a group.
    struct Region {
        uint32_t column, columns;
        uint8_t groups;
    };

    uint32_t& at(uint32_t lane, uint32_t column) { return data_[lane * kColumns + column]; }

    // The first of so many free columns, anywhere. None where there are not that many. The agents
    // that read have numbers below `agents`.
    std::optional<uint32_t> allocate(uint32_t columns, uint32_t agents, std::mt19937_64& random);
    // Whether these columns were one allocation, which is over now.
    bool release(uint32_t column, uint32_t columns);
    bool is_allocated(uint32_t column, uint32_t columns) const;
    bool is_empty() const { return allocated_.empty(); }

    // What is wrong with an access, which is recorded.
    std::optional<Violation> read(const Region& region, const Access& access);
    std::optional<Violation> write(const Region& region, const Access& access);

    bool may_allocate = true;

private:
    template <class F>
    std::optional<Violation> for_each_cell(const Region& region, F f);

    std::vector<uint32_t> data_;
    std::map<uint32_t, uint32_t> allocated_;  // first column to number of columns
    std::unique_ptr<SharedMemory> record_;    // of 16 lanes of a column in each 4 bytes
};

}  // namespace ptx
