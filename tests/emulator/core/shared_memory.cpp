#include "shared_memory.h"

#include <algorithm>
#include <cstdio>

namespace ptx {
namespace {

// An entry of the record of reads: time, whether the read was strong, and lane.
constexpr uint32_t kTimeShift = 7, kStrong = 1 << 6, kLane = kStrong - 1;

bool lanes_conflict(uint8_t a, uint8_t b) { return a != b || a == Access::kWholeWarp; }

std::string at(uint32_t address) {
    char text[32];
    std::snprintf(text, sizeof text, "shared address 0x%x", address);
    return text;
}

}  // namespace

SharedMemory::SharedMemory(uint32_t bytes, uint32_t readers, int granule_shift)
    : data_(bytes, 0xA5),
      cells_((bytes >> granule_shift) + 1),
      reads_(cells_.size() * readers),
      readers_(readers),
      shift_(granule_shift) {}

std::optional<Violation> SharedMemory::after_write(const Cell& cell, const Access& access,
                                                   const char* what, uint32_t address) const {
    const Epoch before = cell.last_write;
    const std::string of = " the write at instruction " + std::to_string(cell.instruction);
    if (before.agent == access.epoch.agent && access.in_order) {
        // Lanes that write to one place at once: one of them is last.
        if (cell.serial == access.serial) return {};
        if (before.time < access.epoch.time || !lanes_conflict(cell.lane, access.lane)) return {};
        if (cell.is_strong && access.is_strong) return {};
        return Violation{"race", std::string(what) + at(address) + " by another lane than" + of +
                                     ", with no bar.warp.sync between them"};
    }
    if (cell.is_strong && access.is_strong) return {};
    if (!access.known->seen.covers(before)) {
        return Violation{"race", std::string(what) + at(address) + " is not ordered after" + of};
    }
    if (access.is_async && !cell.is_async && !access.known->fenced.covers(before)) {
        return Violation{"race", std::string(what) + at(address) +
                                     " by the asynchronous proxy: no" +
                                     " fence.proxy.async lies between it and" + of};
    }
    return {};
}

std::optional<Violation> SharedMemory::read(uint32_t address, uint32_t size, const Access& access) {
    const uint32_t entry =
        access.epoch.time << kTimeShift | (access.is_strong ? kStrong : 0) | access.lane;
    for (uint32_t i = address >> shift_; i <= (address + size - 1) >> shift_; ++i) {
        const Cell& cell = cells_[i];
        if (cell.instruction < 0) {
            return Violation{"uninitialized",
                             "read of " + at(i << shift_) + ", which nothing wrote"};
        }
        if (auto found = after_write(cell, access, "read of ", i << shift_)) return found;
        uint32_t& last = reads_[i * readers_ + access.epoch.agent];
        if (last >> kTimeShift != access.epoch.time || last == entry) {
            last = entry;
        } else {  // by several lanes
            last = access.epoch.time << kTimeShift | (last & entry & kStrong) | Access::kWholeWarp;
        }
    }
    return {};
}

std::optional<Violation> SharedMemory::write(uint32_t address, uint32_t size, const Access& access,
                                             const uint8_t* data) {
    const bool is_same = data && std::equal(data, data + size, data_.data() + address);
    for (uint32_t i = address >> shift_; i <= (address + size - 1) >> shift_; ++i) {
        Cell& cell = cells_[i];
        if (cell.instruction >= 0 && !is_same) {
            if (auto found = after_write(cell, access, "write to ", i << shift_)) return found;
        }
        for (uint32_t agent = 0; agent < readers_; ++agent) {
            const uint32_t entry = reads_[i * readers_ + agent];
            if (!entry || (access.is_strong && entry & kStrong)) continue;
            const Epoch before{agent, entry >> kTimeShift};
            const bool own = agent == access.epoch.agent && access.in_order;
            const bool race =
                own ? before.time == access.epoch.time && lanes_conflict(entry & kLane, access.lane)
                    : !access.known->seen.covers(before);
            if (race) {
                const std::string reader = own ? "another lane" : "agent " + std::to_string(agent);
                return Violation{"race", "write to " + at(i << shift_) +
                                             " is not ordered after a read by " + reader};
            }
        }
        cell = {access.epoch, access.instruction, access.serial,
                access.lane,  access.is_strong,   access.is_async};
    }
    return {};
}

}  // namespace ptx
