#include "global_memory.h"

#include <algorithm>

namespace ptx {

void GlobalMemory::add(uint64_t base, uint64_t size, bool writable) {
    if (size) ranges_.push_back({base, base + size, writable, {}, {}});
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

GlobalMemory::Granule& GlobalMemory::granule(const Range& range, Pages& pages,
                                             uint64_t index) const {
    const uint64_t in_range = index - (range.base >> shift_);
    if (pages.empty()) {
        const uint64_t granules = ((range.end - 1) >> shift_) - (range.base >> shift_) + 1;
        pages.resize((granules - 1) / std::tuple_size_v<Page> + 1);
    }
    std::unique_ptr<Page>& page = pages[in_range / std::tuple_size_v<Page>];
    if (!page) page = std::make_unique<Page>();
    return (*page)[in_range % std::tuple_size_v<Page>];
}

uint32_t GlobalMemory::number_of(const GlobalAccess& access) {
    uint32_t& number = latest_[static_cast<uint64_t>(access.cluster) << 32 | access.epoch.agent];
    if (!number || accessors_[number - 1].epoch.time != access.epoch.time) {
        accessors_.push_back({access.cluster, access.block, access.epoch, access.is_copy});
        number = static_cast<uint32_t>(accessors_.size());
    }
    return number;
}

bool GlobalMemory::precedes(const Accessor& earlier, const GlobalAccess& access) {
    return earlier.cluster == access.cluster
               ? access.known->seen.covers(earlier.epoch)
               : access.known->others.covers(earlier.cluster, earlier.epoch);
}

std::vector<uint32_t> GlobalMemory::members(uint32_t number) const {
    return number & kSet ? sets_[number & ~kSet] : std::vector<uint32_t>{number};
}

bool GlobalMemory::is_ordered(uint32_t number, const GlobalAccess& access) const {
    if (!number) return true;
    if (number == kSeveral) return false;
    if (number & kSet) {
        const auto& set = sets_[number & ~kSet];
        return std::all_of(set.begin(), set.end(),
                           [&](uint32_t one) { return is_ordered(one, access); });
    }
    const Accessor& earlier = accessors_[number - 1];
    return (earlier.block == access.block && !earlier.is_copy) || precedes(earlier, access);
}

const char* GlobalMemory::objection(uint32_t number, const GlobalAccess& access, bool wrote) const {
    if (is_ordered(number, access)) return nullptr;
    if (!(number & kSet) && accessors_[number - 1].block == access.block) {
        return wrote ? "an unfinished copy wrote" : "an unfinished copy reads";
    }
    return wrote ? "another block of this launch wrote" : "another block of this launch read";
}

uint32_t GlobalMemory::with(uint32_t number, uint32_t self, const GlobalAccess& access) {
    if (!number || number == self) return self;
    if (number == kSeveral) return kSeveral;
    uint32_t& extended = extended_[static_cast<uint64_t>(number) << 32 | self];
    if (extended) return extended;
    auto set = members(number);
    const size_t before = set.size();
    const bool contained = std::find(set.begin(), set.end(), self) != set.end();
    std::erase_if(set, [&](uint32_t one) {
        const Accessor& earlier = accessors_[one - 1];
        // Later accesses of an agent stand for earlier ones.
        const bool is_same =
            earlier.cluster == access.cluster && earlier.epoch.agent == access.epoch.agent;
        return is_same || precedes(earlier, access);
    });
    if (contained && set.size() + 1 == before) return extended = number;
    if (set.empty()) return extended = self;
    if (set.size() == kMostInSet) return extended = kSeveral;
    set.push_back(self);
    sets_.push_back(std::move(set));
    return extended = kSet | static_cast<uint32_t>(sets_.size() - 1);
}

const char* GlobalMemory::conflict(uint64_t address, uint64_t size, const GlobalAccess& access) {
    Range& range = const_cast<Range&>(*find(address));
    if (!range.writable) return nullptr;
    const uint32_t self = number_of(access);
    // Neighbours usually have the same readers.
    uint32_t readers = 0, extended = self;
    for (uint64_t i = address >> shift_; i <= (address + size - 1) >> shift_; ++i) {
        Granule& weak = granule(range, range.weak, i);
        const bool any_strong = access.is_strong || !range.strong.empty();
        Granule* strong = any_strong ? &granule(range, range.strong, i) : nullptr;
        if (auto found = objection(weak.writers, access, true)) return found;
        if (strong && !access.is_strong) {
            if (auto found = objection(strong->writers, access, true)) return found;
        }
        if (!access.writes) {
            Granule& own = access.is_strong ? *strong : weak;
            if (own.readers != readers) {
                readers = own.readers;
                extended = with(readers, self, access);
            }
            own.readers = extended;
            continue;
        }
        if (auto found = objection(weak.readers, access, false)) return found;
        if (access.is_strong) {
            strong->writers = with(strong->writers, self, access);
            continue;
        }
        // Accesses that are ordered after this one are also ordered after those before it.
        weak = {self, 0};
        if (!strong) continue;
        if (auto found = objection(strong->readers, access, false)) return found;
        *strong = {};
    }
    return nullptr;
}

const Released* GlobalMemory::released(uint64_t address) const {
    const auto found = released_.find(address);
    return found == released_.end() ? nullptr : &found->second;
}

Released& GlobalMemory::released_by(uint64_t address, uint32_t cluster, uint32_t agent,
                                    bool is_atomic) {
    Released& there = released_[address];
    const bool is_same = there.cluster == cluster && there.agent == agent;
    if (!is_atomic && !is_same) there.clocks = {};
    there.cluster = cluster;
    there.agent = agent;
    return there;
}

}  // namespace ptx
