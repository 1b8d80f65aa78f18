#include "global_memory.h"

#include <algorithm>

namespace ptx {

void GlobalMemory::add(uint64_t base, uint64_t size, bool writable) {
    if (size) ranges_.push_back({base, base + size, writable, {}});
}

void GlobalMemory::finish(int granule_shift) {
    shift_ = granule_shift;
    std::sort(ranges_.begin(), ranges_.end(),
              [](const Range& a, const Range& b) { return a.base < b.base; });
    std::vector<Range> merged;
    for (Range& range : ranges_) {
        if (!merged.empty() && range.base < merged.back().end) {
            merged.back().end = std::max(merged.back().end, range.end);
            merged.back().writable |= range.writable;
        } else {
            merged.push_back(std::move(range));
        }
    }
    ranges_ = std::move(merged);
}

const GlobalMemory::Range* GlobalMemory::find(uint64_t address) const {
    auto after = std::upper_bound(ranges_.begin(), ranges_.end(), address,
                                  [](uint64_t a, const Range& range) { return a < range.base; });
    return after == ranges_.begin() ? nullptr : &*(after - 1);
}

const char* GlobalMemory::refusal(uint64_t address, uint64_t size, bool writes) const {
    const Range* range = find(address);
    if (!range || address + size > range->end) return "lies in no tensor of the launch";
    if (writes && !range->writable) return "is read-only memory";
    return nullptr;
}

GlobalMemory::Granule& GlobalMemory::granule(Range& range, uint64_t index) const {
    const uint64_t in_range = index - (range.base >> shift_);
    if (range.pages.empty()) {
        const uint64_t granules = ((range.end - 1) >> shift_) - (range.base >> shift_) + 1;
        range.pages.resize((granules - 1) / std::tuple_size_v<Page> + 1);
    }
    std::unique_ptr<Page>& page = range.pages[in_range / std::tuple_size_v<Page>];
    if (!page) page = std::make_unique<Page>();
    return (*page)[in_range % std::tuple_size_v<Page>];
}

uint32_t GlobalMemory::current(uint32_t block) {
    uint32_t& number = current_[block];
    if (!number) {
        epochs_.push_back({block, 1});
        number = static_cast<uint32_t>(epochs_.size());
    }
    return number;
}

Epoch GlobalMemory::end_epoch(uint32_t block) {
    const Epoch ended = epochs_[current(block) - 1];
    epochs_.push_back({block, ended.time + 1});
    current_[block] = static_cast<uint32_t>(epochs_.size());
    return ended;
}

bool GlobalMemory::is_ordered(uint32_t number, uint32_t block, const BlockKnowledge& known) const {
    if (!number) return true;
    if (number == kSeveral) return false;
    const Epoch epoch = epochs_[number - 1];
    return epoch.agent == block || known.seen.covers(epoch);
}

const char* GlobalMemory::conflict(uint64_t address, uint64_t size, bool writes, uint32_t block,
                                   const BlockKnowledge& known) {
    Range& range = const_cast<Range&>(*find(address));
    if (!range.writable) return nullptr;
    const uint32_t self = current(block);
    for (uint64_t i = address >> shift_; i <= (address + size - 1) >> shift_; ++i) {
        Granule& accessed = granule(range, i);
        if (!is_ordered(accessed.writer, block, known)) return "another block of this launch wrote";
        if (writes) {
            if (!is_ordered(accessed.reader, block, known))
                return "another block of this launch read";
            accessed = {self, 0};
        } else {
            accessed.reader = is_ordered(accessed.reader, block, known) ? self : kSeveral;
        }
    }
    return nullptr;
}

void GlobalMemory::synchronize(uint64_t address, uint32_t block, BlockKnowledge& known,
                               bool acquires, bool releases) {
    BlockClock& released = released_[address];
    (acquires ? known.seen : known.observed).join(released);
    if (releases) {
        const Epoch ended = end_epoch(block);
        known.seen.set(ended);
        released.join(known.seen);
    } else {
        released.join(known.at_fence);
    }
}

void GlobalMemory::fence(uint32_t block, BlockKnowledge& known) {
    known.seen.join(known.observed);
    const Epoch ended = end_epoch(block);
    known.seen.set(ended);
    known.at_fence = known.seen;
}

}  // namespace ptx
