// Global memory, which consists of the tensors of a launch.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "clocks.h"

namespace ptx {

// An access by a warp, or by a copy that it issued.
struct GlobalAccess {
    uint32_t cluster, block;  // numbers in the launch
    Epoch epoch;              // of an agent of the cluster
    const Knowledge* known;   // to the warp
    bool is_copy, writes, is_strong;
};

// What was released at an address, and which agent wrote there last.
struct Released {
    ClusterClocks clocks;
    uint32_t cluster = 0, agent = 0;
};

class GlobalMemory {
public:
    // Merges overlapping ranges, such as those of tensors that share a storage.
    void add(uint64_t base, uint64_t size, bool writable);
    // granule_shift: log2 of the bytes of the smallest write.
    void finish(int granule_shift);

    // Null if all bytes are in one range that permits the access; otherwise the reason.
    const char* refusal(uint64_t address, uint64_t size, bool writes) const;

    // Records an access. Returns a description of the race if another block, or an unfinished copy,
    // accessed the bytes in this launch, one of the accesses is a write, they are not both strong,
    // and they are not ordered.
    const char* conflict(uint64_t address, uint64_t size, const GlobalAccess& access);

    // What strong accesses to an address released; nullptr for nothing.
    const Released* released(uint64_t address) const;
    // The same for a write by an agent, which keeps what others released only if it is atomic.
    Released& released_by(uint64_t address, uint32_t cluster, uint32_t agent, bool is_atomic);

private:
    // Numbers of accesses, or of sets of them; 0 for none.
    struct Granule {
        uint32_t writers = 0, readers = 0;
    };
    // Pages are created when they are accessed, because a tensor's rows may be gigabytes apart.
    using Page = std::array<Granule, 4096>;
    using Pages = std::vector<std::unique_ptr<Page>>;
    struct Range {
        uint64_t base, end;
        bool writable;
        Pages weak, strong;  // few kernels have strong accesses
    };
    // The agent of an access.
    struct Accessor {
        uint32_t cluster, block;
        Epoch epoch;
        bool is_copy;
    };
    static constexpr uint32_t kSet = 0x80000000;      // marks numbers of sets
    static constexpr uint32_t kSeveral = 0xFFFFFFFF;  // accesses that are not recorded individually
    static constexpr size_t kMostInSet = 256;

    const Range* find(uint64_t address) const;
    Granule& granule(const Range& range, Pages& pages, uint64_t index) const;
    uint32_t number_of(const GlobalAccess& access);
    static bool precedes(const Accessor& earlier, const GlobalAccess& access);
    // Whether accesses precede this one, as those of warps of its block are taken to.
    bool is_ordered(uint32_t number, const GlobalAccess& access) const;
    const char* objection(uint32_t number, const GlobalAccess& access, bool wrote) const;
    // The number of a set with one more access, without those that precede it.
    uint32_t with(uint32_t number, uint32_t self, const GlobalAccess& access);
    std::vector<uint32_t> members(uint32_t number) const;

    std::vector<Range> ranges_;
    std::vector<Accessor> accessors_;  // by number minus one
    std::vector<std::vector<uint32_t>> sets_;
    std::unordered_map<uint64_t, uint32_t> latest_;    // numbers, by agent
    std::unordered_map<uint64_t, uint32_t> extended_;  // numbers, by those of a set and an access
    std::unordered_map<uint64_t, Released> released_;  // by address
    int shift_ = 0;
};

}  // namespace ptx
