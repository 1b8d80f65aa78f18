#include "tensor_memory.h"

#include <algorithm>

namespace ptx {
namespace {

constexpr uint32_t kGroups = 8, kCellBytes = 4;
constexpr uint32_t kNaN = 0x7FFFFFFF;  // the initial content of columns

uint32_t cell_address(uint32_t column, uint32_t group) {
    return (column * kGroups + group) * kCellBytes;
}

}  // namespace

std::optional<uint32_t> TensorMemory::allocate(uint32_t columns, uint32_t agents,
                                               std::mt19937_64& random) {
    if (!record_) {
        data_.resize(kRows * kColumns);
        record_ = std::make_unique<SharedMemory>(cell_address(kColumns, 0), agents, 2,
                                                 "tensor memory record");
    }
    std::vector<uint32_t> free;
    for (uint32_t first = 0; first + columns <= kColumns; first += columns) {
        bool is_free = true;
        for (auto [start, size] : allocated_) {
            is_free &= start + size <= first || first + columns <= start;
        }
        if (is_free) free.push_back(first);
    }
    if (free.empty()) return {};
    const uint32_t first = free[random() % free.size()];
    allocated_[first] = columns;
    for (uint32_t row = 0; row < kRows; ++row) std::fill_n(&at(row, first), columns, kNaN);
    return first;
}

bool TensorMemory::release(uint32_t column, uint32_t columns) {
    const auto found = allocated_.find(column);
    if (found == allocated_.end() || found->second != columns) return false;
    allocated_.erase(found);
    record_->forget(cell_address(column, 0), cell_address(columns, 0));
    return true;
}

bool TensorMemory::is_allocated(uint32_t column, uint32_t columns) const {
    const auto after = allocated_.upper_bound(column);
    if (after == allocated_.begin()) return false;
    const auto [start, size] = *std::prev(after);
    return column + columns <= start + size;
}

template <class F>
std::optional<Violation> TensorMemory::for_each_cell(const Region& region, F f) {
    for (uint32_t column = region.column; column < region.column + region.columns; ++column) {
        for (uint32_t group = 0; group < kGroups; ++group) {
            if (!(region.groups >> group & 1)) continue;
            if (auto found = f(cell_address(column, group))) {
                found->message += ", column " + std::to_string(column) + " of lanes " +
                                  std::to_string(16 * group) + " to " +
                                  std::to_string(16 * group + 15);
                return found;
            }
        }
    }
    return {};
}

std::optional<Violation> TensorMemory::read(const Region& region, const Access& access) {
    return for_each_cell(
        region, [&](uint32_t address) { return record_->read(address, kCellBytes, access); });
}

std::optional<Violation> TensorMemory::write(const Region& region, const Access& access) {
    return for_each_cell(region, [&](uint32_t address) {
        return record_->write(address, kCellBytes, access, nullptr);
    });
}

}  // namespace ptx
