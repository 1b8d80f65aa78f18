// Global memory, which consists of the tensors of a launch.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "clocks.h"

namespace ptx {

// A sparse Clock whose agents are blocks: there are many, and each knows of few others.
class BlockClock {
public:
    void set(Epoch e) { times_[e.agent] = std::max(times_[e.agent], e.time); }
    void join(const BlockClock& other) {
        for (auto [block, time] : other.times_) set({block, time});
    }
    bool covers(Epoch e) const {
        const auto found = times_.find(e.agent);
        return found != times_.end() && found->second >= e.time;
    }

private:
    std::map<uint32_t, uint32_t> times_;
};

// The accesses of other blocks that atomic operations order before those of a block.
struct BlockKnowledge {
    BlockClock seen;
    BlockClock at_fence;  // released by relaxed operations after a fence
    BlockClock observed;  // read by relaxed operations, acquired by a fence
};

class GlobalMemory {
public:
    // Merges overlapping ranges, such as those of tensors that share a storage.
    void add(uint64_t base, uint64_t size, bool writable);
    // granule_shift: log2 of the bytes of the smallest store.
    void finish(int granule_shift);

    // Null if all bytes are in one range that permits the access; otherwise the reason.
    const char* refusal(uint64_t address, uint64_t size, bool writes) const;

    // Records a non-atomic access of a block. Returns a description of the race if another block
    // accessed the bytes in this launch, one of the accesses is a write, and they are not ordered.
    const char* conflict(uint64_t address, uint64_t size, bool writes, uint32_t block,
                         const BlockKnowledge& known);

    // A block's strong access to an address, by which it acquires what others released there, and
    // releases its own accesses and those that it knows of.
    void synchronize(uint64_t address, uint32_t block, BlockKnowledge& known, bool acquires,
                     bool releases);
    // A fence for the whole GPU.
    void fence(uint32_t block, BlockKnowledge& known);

private:
    // Indices into the table of epochs plus one; 0 for none.
    struct Granule {
        uint32_t writer = 0, reader = 0;
    };
    // Pages are created when they are accessed, because a tensor's rows may be gigabytes apart.
    using Page = std::array<Granule, 4096>;
    struct Range {
        uint64_t base, end;
        bool writable;
        std::vector<std::unique_ptr<Page>> pages;
    };
    static constexpr uint32_t kSeveral = 0xFFFFFFFF;  // blocks, not recorded individually

    const Range* find(uint64_t address) const;
    Granule& granule(Range& range, uint64_t index) const;
    uint32_t current(uint32_t block);
    // Ends the epoch of a block, so that it can be released to others.
    Epoch end_epoch(uint32_t block);
    bool is_ordered(uint32_t number, uint32_t block, const BlockKnowledge& known) const;

    std::vector<Range> ranges_;
    std::vector<Epoch> epochs_;  // by number minus one
    std::unordered_map<uint32_t, uint32_t> current_;
    std::unordered_map<uint64_t, BlockClock> released_;  // by address
    int shift_ = 0;
};

}  // namespace ptx
