#include "global_memory.h"

#include <algorithm>

namespace ptx {

void GlobalMemory::add(uint64_t base, uint64_t size, bool writable) {
    if (size) ranges_.push_back({base, base + size, writable, {}, {}, {}, {}});
}

void GlobalMemory::finish() {
    std::sort(ranges_.begin(), ranges_.end(),
              [](const Range& a, const Range& b) { return a.base < b.base; });
    std::vector<Range> merged;
    for (const Range& range : ranges_) {
        if (!merged.empty() && range.base < merged.back().end) {
            merged.back().end = std::max(merged.back().end, range.end);
            merged.back().writable |= range.writable;
        } else {
            merged.push_back(range);
        }
    }
    ranges_ = std::move(merged);
}

const GlobalMemory::Range* GlobalMemory::find(uint64_t address) const {
    auto after = std::upper_bound(ranges_.begin(), ranges_.end(), address,
                                  [](uint64_t a, const Range& range) { return a < range.base; });
    return after == ranges_.begin() ? nullptr : &*(after - 1);
}

std::string GlobalMemory::refusal(uint64_t address, uint64_t size, bool writes) const {
    const Range* range = find(address);
    if (!range || address + size > range->end) return "lies in no tensor of the launch";
    if (writes && !range->writable) return "is memory that kernels may only read";
    return "";
}

std::string GlobalMemory::conflict(uint64_t address, uint64_t size, bool writes, uint32_t block) {
    Range& range = const_cast<Range&>(*find(address));
    if (!range.writable) return "";
    if (range.writer.empty()) {
        if (!writes) return "";  // Reads before the first write are noted from then on only.
        const size_t granules = ((range.end - range.base) >> kGranuleShift) + 1;
        range.writer.resize(granules);
        range.reader.resize(granules);
        range.written.resize(granules);
        range.read.resize(granules);
    }
    const uint64_t first = (address - range.base) >> kGranuleShift;
    const uint64_t last = (address + size - 1 - range.base) >> kGranuleShift;
    const uint32_t self = block + 1;
    const uint32_t now = time_[self] + 1;
    for (uint64_t i = first; i <= last; ++i) {
        uint32_t &writer = range.writer[i], &reader = range.reader[i];
        if (writer && !is_ordered(writer, range.written[i], self)) {
            return std::string(writes ? "was written" : "was written in this launch") +
                   " by block " + std::to_string(writer - 1) +
                   " without an atomic operation or a lock";
        }
        const bool is_alone = !reader || is_ordered(reader, range.read[i], self);
        if (!writes) {
            reader = is_alone ? self : kSeveral;
            range.read[i] = now;
        } else if (is_alone) {
            writer = self;
            range.written[i] = now;
            reader = 0;
        } else {
            return "was read by another block in this launch";
        }
    }
    return "";
}

bool GlobalMemory::is_ordered(uint32_t other, uint32_t time, uint32_t self) {
    return other == self || (other != kSeveral && known_[self].covers({other, time}));
}

void GlobalMemory::acquire(uint64_t address, uint32_t block) {
    known_[block + 1].join(released_[address]);
}

void GlobalMemory::release(uint64_t address, uint32_t block) {
    const uint32_t self = block + 1;
    known_[self].set(self, time_[self] + 1);
    released_[address].join(known_[self]);
    time_[self] += 1;
}

}  // namespace ptx
