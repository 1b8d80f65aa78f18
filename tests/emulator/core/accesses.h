// Reads and writes of one lane, each checked.
#pragma once

#include "machine.h"

namespace ptx {

enum class Space { kGeneric, kGlobal, kShared, kLocal, kParameter, kConstant };

// As the record of shared memory sees what a lane of the warp does now.
Access access_of(const Warp& w, int lane, bool is_strong = false);

void read_shared(const Warp& w, int lane, uint64_t address, uint32_t size, uint8_t* out,
                 const Access& access);
void write_shared(const Warp& w, int lane, uint64_t address, uint32_t size, const uint8_t* data,
                  const Access& access);
void read_global(const Warp& w, int lane, uint64_t address, uint32_t size, uint8_t* out,
                 bool is_strong = false);
void write_global(const Warp& w, int lane, uint64_t address, uint32_t size, const uint8_t* data,
                  bool is_strong = false);

void read_parameter(const Warp& w, int lane, uint64_t address, uint32_t size, uint8_t* out);

// Faults where the launch was not given the memory, or where blocks race for it.
void check_global(const Warp& w, int lane, uint64_t address, uint32_t size, bool writes,
                  bool is_strong);

// What a strong access orders, which is setting[5] of its instruction: what comes after it after
// what others released, and what was before it before what others acquire.
constexpr int64_t kAcquires = 1, kReleases = 2;
int64_t take_order(const Modifiers& m);
// At a strong access to global memory.
void synchronize_blocks(const Warp& w, uint64_t address, const Instruction& i);

// The offset in the shared memory of a block that holds all the bytes.
uint32_t shared_offset(const Warp& w, int lane, uint64_t address, uint32_t size);

// The mbarrier at an address, once its initialization is known to have come before.
MBarrier& mbarrier_at(Warp& w, int lane, uint64_t address);

// The space that a generic address lies in, and its address there.
std::pair<Space, uint64_t> resolved(uint64_t generic);

void require_aligned(const Warp& w, int lane, uint64_t address, uint32_t size);

// Adds what is moved to the counts of the current instruction. Passes over the banks of shared
// memory are those of accesses that are served together.
void count_shared(const Warp& w, const std::vector<uint64_t>& addresses, uint32_t size);
void count_global(const Warp& w, const std::vector<uint64_t>& addresses, uint32_t size);
std::vector<uint64_t> of_active_lanes(const Warp& w, const Lanes<uint64_t>& addresses);

// "global", "shared", "shared::cta", ... taken from the modifiers; generic where there is none.
Space take_space(Modifiers& m);

}  // namespace ptx
