#include "shared_memory.h"

#include <algorithm>
#include <cstdio>

namespace ptx {
namespace {

// An entry of the record of reads: time, whether the read was strong, and lane.
constexpr uint32_t kTimeShift = 7, kStrong = 1 << 6, kLane = kStrong - 1;

bool lanes_conflict(uint8_t a, uint8_t b) { return a != b || a == Access::kWholeWarp; }

}  // namespace

SharedMemory::SharedMemory(uint32_t bytes, int granule_shift, std::string place)
    : data_(bytes, 0xA5),
      cells_((bytes >> granule_shift) + 1),
      shift_(granule_shift),
      place_(std::move(place)) {}

SharedMemory::Reader& SharedMemory::reader(uint32_t agent) {
    for (Reader& one : readers_) {
        if (one.agent == agent) return one;
    }
    return readers_.emplace_back(Reader{agent, std::vector<uint32_t>(cells_.size())});
}

std::string SharedMemory::at(uint32_t cell) const {
    char text[16];
    std::snprintf(text, sizeof text, " 0x%x", cell << shift_);
    return place_ + text;
}

void SharedMemory::forget(uint32_t address, uint32_t size) {
    for (uint32_t i = address >> shift_; i <= (address + size - 1) >> shift_; ++i) {
        cells_[i].instruction = -1;
        for (Reader& one : readers_) one.entries[i] = 0;
    }
}

std::optional<Violation> SharedMemory::after_write(const Cell& cell, const Access& access,
                                                   const char* what, uint32_t index) const {
    const Epoch before = cell.last_write;
    const std::string of = " the write at instruction " + std::to_string(cell.instruction);
    if (before.agent == access.epoch.agent && access.in_order) {
        // Lanes that write to one place at once: one of them is last.
        if (cell.serial == access.serial) return {};
        if (before.time < access.epoch.time || !lanes_conflict(cell.lane, access.lane)) return {};
        if (cell.is_strong && access.is_strong) return {};
        return Violation{"race", std::string(what) + at(index) + " by another lane than" + of +
                                     ", with no bar.warp.sync between them"};
    }
    if (cell.is_strong && access.is_strong) return {};
    if (!access.known->seen.covers(before)) {
        return Violation{"race", std::string(what) + at(index) + " is not ordered after" + of};
    }
    if (access.is_async && !cell.is_async && !access.known->fenced.covers(before)) {
        return Violation{"race", std::string(what) + at(index) + " by the asynchronous proxy: no" +
                                     " fence.proxy.async lies between it and" + of};
    }
    return {};
}

std::optional<Violation> SharedMemory::read(uint32_t address, uint32_t size, const Access& access) {
    const uint32_t entry =
        access.epoch.time << kTimeShift | (access.is_strong ? kStrong : 0) | access.lane;
    Reader& own = reader(access.epoch.agent);
    for (uint32_t i = address >> shift_; i <= (address + size - 1) >> shift_; ++i) {
        const Cell& cell = cells_[i];
        if (cell.instruction < 0) {
            return Violation{"uninitialized", "read of " + at(i) + ", which nothing wrote"};
        }
        if (auto found = after_write(cell, access, "read of ", i)) return found;
        uint32_t& last = own.entries[i];
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
            if (auto found = after_write(cell, access, "write to ", i)) return found;
        }
        for (const Reader& one : readers_) {
            const uint32_t entry = one.entries[i];
            if (!entry || (access.is_strong && entry & kStrong)) continue;
            const Epoch before{one.agent, entry >> kTimeShift};
            const bool own = one.agent == access.epoch.agent && access.in_order;
            const bool race =
                own ? before.time == access.epoch.time && lanes_conflict(entry & kLane, access.lane)
                    : !access.known->seen.covers(before);
            if (race) {
                const std::string reader =
                    own ? "another lane" : "agent " + std::to_string(one.agent);
                return Violation{"race",
                                 "write to " + at(i) + " is not ordered after a read by " + reader};
            }
        }
        cell = {access.epoch, access.instruction, access.serial,
                access.lane,  access.is_strong,   access.is_async};
    }
    return {};
}

}  // namespace ptx
