// Global memory: the tensors that a launch was given, and nothing else.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ptx {

class GlobalMemory {
public:
    // Overlapping ranges, as of tensors that share a storage, become one.
    void add(uint64_t base, uint64_t size, bool writable);
    void finish();

    // "" where all bytes lie in one range that may be accessed so; otherwise what is wrong.
    std::string refusal(uint64_t address, uint64_t size, bool writes) const;

    // Notes that a block accessed bytes without an atomic operation. Returns what is wrong where
    // another block has accessed them in this launch, and one of both accesses is a write.
    std::string conflict(uint64_t address, uint64_t size, bool writes, uint32_t block);

private:
    struct Range {
        uint64_t base, end;
        bool writable;
        // The block, plus one, that wrote or read each granule; kSeveral readers cannot be told.
        std::vector<uint32_t> writer, reader;
    };
    static constexpr uint32_t kSeveral = 0xFFFFFFFF;
    static constexpr int kGranuleShift = 1;

    const Range* find(uint64_t address) const;

    std::vector<Range> ranges_;
};

}  // namespace ptx
