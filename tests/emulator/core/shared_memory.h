// A block's shared memory, with a record of who accessed which bytes when.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "clocks.h"

namespace ptx {

// One access as the record sees it.
struct Access {
    const Knowledge* known;  // what the accessing agent has been told of
    Epoch epoch;             // the agent, and its time at which the access ends
    uint8_t lane = kWholeWarp;
    bool is_strong = false;  // atomic, volatile or relaxed: no race with another such access
    bool is_async = false;   // through the asynchronous proxy
    bool in_order = true;    // the agent's own accesses are ordered, as a thread's are
    int instruction = 0;
    uint64_t serial = 0;  // of one execution of an instruction by a warp

    static constexpr uint8_t kWholeWarp = 32;
};

struct Violation {
    const char* kind;
    std::string message;
};

class SharedMemory {
public:
    // `place` is what faults call an address.
    SharedMemory(uint32_t bytes, int granule_shift, std::string place = "shared address");

    uint32_t size() const { return static_cast<uint32_t>(data_.size()); }
    uint8_t* data() { return data_.data(); }

    std::optional<Violation> read(uint32_t address, uint32_t size, const Access& access);
    // `data` is what will be written: where others write the same, no order is needed between them.
    // Null where it is not known yet.
    std::optional<Violation> write(uint32_t address, uint32_t size, const Access& access,
                                   const uint8_t* data);
    // From here on nothing has been written.
    void forget(uint32_t address, uint32_t size);

private:
    struct Cell {
        Epoch last_write;
        int32_t instruction = -1;  // of the last write; none where negative
        uint64_t serial = 0;
        uint8_t lane = 0;
        bool is_strong = false, is_async = false;
    };

    // What an agent read last, for each cell: time, strength and lane.
    struct Reader {
        uint32_t agent;
        std::vector<uint32_t> entries;
    };

    Reader& reader(uint32_t agent);
    std::string at(uint32_t cell) const;
    std::optional<Violation> after_write(const Cell& cell, const Access& access, const char* what,
                                         uint32_t index) const;

    std::vector<uint8_t> data_;
    std::vector<Cell> cells_;
    std::vector<Reader> readers_;  // those that have read anything
    int shift_;
    std::string place_;
};

}  // namespace ptx
