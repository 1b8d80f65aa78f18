// Shared by all bulk copies: their completion signals, and their deferred execution.
#pragma once

#include <functional>

#include "accesses.h"

namespace ptx {

// An mbarrier that counts arriving bytes.
struct Signal {
    Block* block;
    MBarrier* barrier;
    uint32_t time;  // of the phase that the copy belongs to, as the mbarrier's agent counts
};

// The mbarrier at an address. Faults if its initialization is not ordered before.
MBarrier& mbarrier_at(Warp& w, int lane, uint64_t address);

// The mbarrier of a copy that is being issued.
Signal signal_at(Warp& w, int lane, uint64_t address);
// An access through the asynchronous proxy by a copy that this signal completes.
Access access_of(const Warp& w, const Signal& signal);
// Runs `move` now or later, and then counts the bytes on the mbarrier.
void land(Warp& w, const Signal& signal, uint32_t bytes, std::function<void()> move);

// Checks and records a write to shared memory by a copy, and returns its destination. The data is
// written when the copy lands.
uint8_t* begin_shared_write(Warp& w, int lane, uint64_t address, uint32_t size,
                            const Access& access);

// A copy from shared memory to global memory, completed by bulk groups: `gather` reads shared
// memory and `scatter` writes global memory, now or later, in this order.
void land_in_groups(Warp& w, int lane, uint64_t address, uint32_t size,
                    std::function<std::vector<uint8_t>(const uint8_t*)> gather,
                    std::function<void(const std::vector<uint8_t>&)> scatter);

// An operation of cp.reduce.async.bulk on arrays of elements: target = target op source.
using Reduce = void (*)(uint8_t* target, const uint8_t* source, uint32_t bytes);
// nullptr if there is none.
Reduce reduction_of(const std::string& operation, const std::string& type);
Reduce reduction_of(const std::string& operation, uint8_t tensor_map_element);

// Address of a shared operand, which may be generic.
uint64_t shared_address(uint64_t address);
// The same address in another block of the cluster.
inline uint64_t in_block(uint64_t shared, uint32_t rank) {
    return (shared & kRankMask) | static_cast<uint64_t>(rank) << kRankShift;
}
// Ranks of the blocks that a copy is sent to.
std::vector<uint32_t> targets(const Warp& w, int lane, uint64_t address, bool is_multicast,
                              uint32_t mask);

// The write to global memory of the bulk copy that the warp issues next.
GlobalAccess next_bulk_write(Warp& w, bool is_reduction);

void require_multiple_of_16(const Warp& w, int lane, uint32_t bytes);

Execute decode_tensor_copy(Modifiers& m, Instruction& i);

}  // namespace ptx
