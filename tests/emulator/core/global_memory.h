// Global memory: the tensors that a launch was given, and nothing else.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "clocks.h"

namespace ptx {

class GlobalMemory {
public:
    // Overlapping ranges, as of tensors that share a storage, become one.
    void add(uint64_t base, uint64_t size, bool writable);
    void finish();

    // "" where all bytes lie in one range that may be accessed so; otherwise what is wrong.
    std::string refusal(uint64_t address, uint64_t size, bool writes) const;

    // Notes that a block accessed bytes without an atomic operation. Returns what is wrong where
    // another block has accessed them in this launch, one of both accesses is a write, and no
    // lock orders them.
    std::string conflict(uint64_t address, uint64_t size, bool writes, uint32_t block);

    // An atomic operation of a block on an address: it learns of what others did before they
    // released the address, and tells what it did itself.
    void acquire(uint64_t address, uint32_t block);
    void release(uint64_t address, uint32_t block);

private:
    struct Range {
        uint64_t base, end;
        bool writable;
        // The block, plus one, that wrote or read each granule; kSeveral readers cannot be told.
        std::vector<uint32_t> writer, reader;
        std::vector<uint32_t> written, read;  // at which time of that block
    };
    static constexpr uint32_t kSeveral = 0xFFFFFFFF;
    static constexpr int kGranuleShift = 1;

    const Range* find(uint64_t address) const;

    bool is_ordered(uint32_t other, uint32_t time, uint32_t self);

    std::vector<Range> ranges_;
    // By block plus one: its time, which each release ends, and what it was told of.
    std::map<uint32_t, uint32_t> time_;
    std::map<uint32_t, Clock> known_;
    std::map<uint64_t, Clock> released_;  // by address
};

}  // namespace ptx
