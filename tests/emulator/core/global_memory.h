// Global memory: the tensors that a launch was given, and nothing else.
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

// As Clock, with blocks as agents: there are many of them, and each knows of few others.
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

// What a block has been told of others by atomic operations.
struct BlockKnowledge {
    BlockClock seen;
    BlockClock at_fence;  // what a relaxed operation after a fence tells others
    BlockClock heard;     // what relaxed operations were told, and a fence makes known
};

class GlobalMemory {
public:
    // Overlapping ranges, as of tensors that share a storage, become one.
    void add(uint64_t base, uint64_t size, bool writable);
    // granule_shift: log2 of the bytes of the smallest store.
    void finish(int granule_shift);

    // Null where all bytes lie in one range that may be accessed so; otherwise what is wrong.
    const char* refusal(uint64_t address, uint64_t size, bool writes) const;

    // Notes that a block accessed bytes without an atomic operation. Returns what is wrong where
    // another block accessed them in this launch, one of both accesses is a write, and nothing
    // orders them.
    const char* conflict(uint64_t address, uint64_t size, bool writes, uint32_t block,
                         const BlockKnowledge& known);

    // A block's strong access to an address, by which it is told what others released there, and
    // tells others what it knows and did.
    void synchronize(uint64_t address, uint32_t block, BlockKnowledge& known, bool acquires,
                     bool releases);
    // A fence for the whole GPU.
    void fence(uint32_t block, BlockKnowledge& known);

private:
    // Numbers of the table of epochs; 0 stands for none.
    struct Granule {
        uint32_t writer = 0, reader = 0;
    };
    // Pages exist where they were accessed, as a tensor's rows may lie gigabytes apart.
    using Page = std::array<Granule, 4096>;
    struct Range {
        uint64_t base, end;
        bool writable;
        std::vector<std::unique_ptr<Page>> pages;
    };
    static constexpr uint32_t kSeveral = 0xFFFFFFFF;  // blocks, which cannot be told apart

    const Range* find(uint64_t address) const;
    Granule& granule(Range& range, uint64_t index) const;
    uint32_t current(uint32_t block);
    // Ends the epoch of a block, which others may be told of from now on.
    Epoch end_epoch(uint32_t block);
    bool is_ordered(uint32_t number, uint32_t block, const BlockKnowledge& known) const;

    std::vector<Range> ranges_;
    std::vector<Epoch> epochs_;  // by number, less one
    std::unordered_map<uint32_t, uint32_t> current_;
    std::unordered_map<uint64_t, BlockClock> told_;  // by address
    int shift_ = 0;
};

}  // namespace ptx
