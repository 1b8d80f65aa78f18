// Checked reads and writes of single lanes.
#pragma once

#include "machine.h"

namespace ptx {

enum class Space { kGeneric, kGlobal, kShared, kLocal, kParameter, kConstant };

// The current access of a lane of the warp, for the access record of shared memory.
Access access_of(const Warp& w, int lane, bool is_strong = false);

void read_shared(const Warp& w, int lane, uint64_t address, uint32_t size, uint8_t* out,
                 const Access& access);
void write_shared(const Warp& w, int lane, uint64_t address, uint32_t size, const uint8_t* data,
                  const Access& access);
void read_global(const Warp& w, int lane, uint64_t address, uint32_t size, uint8_t* out,
                 bool is_strong = false);
void write_global(const Warp& w, int lane, uint64_t address, uint32_t size, const uint8_t* data,
                  bool is_strong = false);

// The semantics of a strong access, setting[5] of its instruction: later accesses come after those
// that others released, and earlier ones before those of others that acquire; or it is strong for
// threads of its block only.
constexpr int64_t kAcquires = 1, kReleases = 2, kOfBlock = 4;
int64_t take_order(const Modifiers& m);
// Called for strong accesses to global memory, after a read and before a write; for both if the
// access is atomic.
void acquire_global(Warp& w, uint64_t address, const Instruction& i);
void release_global(Warp& w, uint64_t address, const Instruction& i, bool is_atomic);

void read_parameter(const Warp& w, int lane, uint64_t address, uint32_t size, uint8_t* out);

// The current access of the warp to global memory; that of a copy is recorded with the epoch at
// which the copy is complete.
GlobalAccess global_access_of(const Warp& w, bool writes, bool is_strong = false);
GlobalAccess global_access_of(const Warp& w, bool writes, bool is_strong, Epoch copy);
// Faults if the memory is not part of the launch, or if blocks race for it.
void check_global(const Warp& w, int lane, uint64_t address, uint32_t size,
                  const GlobalAccess& access);

// The offset in the shared memory of the block that contains all the bytes.
uint32_t shared_offset(const Warp& w, int lane, uint64_t address, uint32_t size);

// The space of a generic address, and its address within that space.
std::pair<Space, uint64_t> resolved(uint64_t generic);

void require_aligned(const Warp& w, int lane, uint64_t address, uint32_t size);

// Adds the bytes moved to the counts of the current instruction. Accesses that are served together
// need as many passes over the banks of shared memory as their bank conflicts require.
void count_shared(const Warp& w, const std::vector<uint64_t>& addresses, uint32_t size);
void count_global(const Warp& w, const std::vector<uint64_t>& addresses, uint32_t size);
std::vector<uint64_t> of_active_lanes(const Warp& w, const Lanes<uint64_t>& addresses);

// Takes "global", "shared", "shared::cta", ... from the modifiers; generic if there is none.
Space take_space(Modifiers& m);

}  // namespace ptx
