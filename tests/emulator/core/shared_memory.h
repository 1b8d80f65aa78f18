// A block's shared memory, with a record of accesses for the detection of races.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "clocks.h"

namespace ptx {

// One access, for the record.
struct Access {
    static constexpr uint8_t kWholeWarp = 32;
    static constexpr uint32_t kNobody = 0xFFFFFFFF;

    const Knowledge* known;  // the knowledge of the accessing agent
    Epoch epoch;             // the agent, and its time at which the access ends
    uint8_t lane = kWholeWarp;
    bool is_strong = false;  // atomic, volatile or relaxed: no race with another such access
    bool is_async = false;   // through the asynchronous proxy
    int line = 0;            // of the instruction in the PTX text
    uint64_t serial = 0;     // of one execution of an instruction by a warp
    // The agent whose own accesses are ordered before this one: those of the same lane, and those
    // of other lanes that ended before the time.
    Epoch lanes_ordered{kNobody, 0};
    // The agent of that warp's cp.async. A lane that waits for its copies knows of them; the other
    // lanes know of those up to the time.
    Epoch copies_ordered{kNobody, 0};
};

struct Violation {
    const char* kind;
    std::string message;
};

class SharedMemory {
public:
    // Agents below `readers` may read; `place` is the name of addresses in faults.
    SharedMemory(uint32_t bytes, uint32_t readers, int granule_shift,
                 std::string place = "shared address");

    uint32_t size() const { return static_cast<uint32_t>(data_.size()); }
    uint8_t* data() { return data_.data(); }

    std::optional<Violation> read(uint32_t address, uint32_t size, const Access& access);
    // `data` are the bytes to be written, or null if they are not known yet: writes of equal bytes
    // need no order.
    std::optional<Violation> write(uint32_t address, uint32_t size, const Access& access,
                                   const uint8_t* data);
    // Marks the bytes as uninitialized.
    void forget(uint32_t address, uint32_t size);

private:
    // The agents that read a cell since its last write: none, one (its number), or several.
    static constexpr int32_t kNone = -1, kSeveral = -2;

    struct Cell {
        Epoch last_write;
        int32_t line = -1;  // of the last write; negative for none
        int32_t reader = kNone;
        uint64_t serial = 0;
        uint8_t lane = 0;
        bool is_strong = false, is_async = false, is_copy = false;
    };

    // Why an access is not ordered after the last write, or after a read; null if it is.
    const char* objection_to_write(const Cell& cell, const Access& access) const;
    const char* objection_to_reads(uint32_t index, const Access& access) const;
    const char* objection_to_read(uint32_t agent, uint32_t entry, const Access& access) const;
    std::string at(uint32_t address) const;
    void note_read(uint32_t index, const Access& access);
    void forget_reads(uint32_t index);
    Violation race(const char* what, uint32_t index, const char* objection) const;

    std::vector<uint8_t> data_;
    std::vector<Cell> cells_;
    std::vector<uint32_t> reads_;  // for each cell and reader: time, strength and lane
    uint32_t readers_;
    int shift_;
    std::string place_;
};

}  // namespace ptx
