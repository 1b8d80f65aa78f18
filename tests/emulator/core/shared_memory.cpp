#include "shared_memory.h"

#include <algorithm>
#include <cstdio>

namespace ptx {
namespace {

// An entry of the record of reads: time, whether the read was strong, and lane.
constexpr uint32_t kTimeShift = 7, kStrong = 1 << 6, kLane = kStrong - 1;

bool lanes_differ(uint32_t a, uint32_t b) { return a != b || a == Access::kWholeWarp; }

}  // namespace

SharedMemory::SharedMemory(uint32_t bytes, uint32_t readers, int granule_shift, std::string place)
    : data_(bytes, 0xA5),
      cells_((bytes >> granule_shift) + 1),
      reads_(cells_.size() * readers),
      readers_(readers),
      shift_(granule_shift),
      place_(std::move(place)) {}

std::string SharedMemory::at(uint32_t address) const {
    char text[16];
    std::snprintf(text, sizeof text, " 0x%x", address);
    return place_ + text;
}

void SharedMemory::forget(uint32_t address, uint32_t size) {
    for (uint32_t i = address >> shift_; i <= (address + size - 1) >> shift_; ++i) {
        forget_reads(i);
        cells_[i].line = -1;
    }
}

Violation SharedMemory::race(const char* what, uint32_t index, const char* objection) const {
    const int32_t line = cells_[index].line;
    const std::string written =
        line < 0 ? "" : " (last written in line " + std::to_string(line) + ")";
    return {"race", what + at(index << shift_) + ": " + objection + written};
}

const char* SharedMemory::objection_to_write(const Cell& cell, const Access& access) const {
    const Epoch before = cell.last_write;
    // If lanes write to one address in the same instruction, one of them is last.
    if (access.serial && cell.serial == access.serial) return nullptr;
    if (cell.is_strong && access.is_strong) return nullptr;
    if (before.agent == access.lanes_ordered.agent) {
        if (before.time >= access.lanes_ordered.time && lanes_differ(cell.lane, access.lane)) {
            return "no bar.warp.sync orders it after the write by another lane";
        }
    } else if (!access.known->seen.covers(before)) {
        return "it is not ordered after the last write";
    } else if (before.agent == access.copies_ordered.agent &&
               before.time > access.copies_ordered.time && lanes_differ(cell.lane, access.lane)) {
        return "no barrier orders it after the wait for the copy by another lane";
    }
    if (access.is_async && !cell.is_async && !access.known->fenced.covers(before)) {
        return "no fence.proxy.async orders this asynchronous access after the last write";
    }
    return nullptr;
}

const char* SharedMemory::objection_to_read(uint32_t agent, uint32_t entry,
                                            const Access& access) const {
    if (!entry || (access.is_strong && entry & kStrong)) return nullptr;
    const uint32_t time = entry >> kTimeShift;
    if (agent != access.lanes_ordered.agent) {
        return access.known->seen.covers({agent, time}) ? nullptr
                                                        : "it is not ordered after a read";
    }
    const bool is_open = time >= access.lanes_ordered.time;
    return is_open && lanes_differ(entry & kLane, access.lane)
               ? "no bar.warp.sync orders it after a read by another lane"
               : nullptr;
}

const char* SharedMemory::objection_to_reads(uint32_t index, const Access& access) const {
    const int32_t reader = cells_[index].reader;
    const uint32_t* entries = &reads_[index * readers_];
    if (reader == kNone) return nullptr;
    if (reader >= 0) {
        return objection_to_read(static_cast<uint32_t>(reader), entries[reader], access);
    }
    for (uint32_t agent = 0; agent < readers_; ++agent) {
        if (auto found = objection_to_read(agent, entries[agent], access)) return found;
    }
    return nullptr;
}

void SharedMemory::note_read(uint32_t index, const Access& access) {
    const auto agent = static_cast<int32_t>(access.epoch.agent);
    int32_t& reader = cells_[index].reader;
    reader = reader == kNone || reader == agent ? agent : kSeveral;
    uint32_t& last = reads_[index * readers_ + access.epoch.agent];
    uint32_t entry =
        access.epoch.time << kTimeShift | (access.is_strong ? kStrong : 0) | access.lane;
    if (last && last >> kTimeShift >= access.lanes_ordered.time &&
        ((last ^ entry) & (kStrong | kLane))) {  // reads by several lanes, or not all strong
        entry = access.epoch.time << kTimeShift | (last & entry & kStrong) | Access::kWholeWarp;
    }
    last = entry;
}

void SharedMemory::forget_reads(uint32_t index) {
    int32_t& reader = cells_[index].reader;
    uint32_t* entries = &reads_[index * readers_];
    if (reader >= 0) entries[reader] = 0;
    if (reader == kSeveral) std::fill_n(entries, readers_, 0);
    reader = kNone;
}

std::optional<Violation> SharedMemory::read(uint32_t address, uint32_t size, const Access& access) {
    for (uint32_t i = address >> shift_; i <= (address + size - 1) >> shift_; ++i) {
        if (cells_[i].line < 0) {
            return Violation{"uninitialized",
                             "read of " + at(i << shift_) + ", which was never written"};
        }
        if (auto found = objection_to_write(cells_[i], access)) return race("read of ", i, found);
        note_read(i, access);
    }
    return {};
}

std::optional<Violation> SharedMemory::write(uint32_t address, uint32_t size, const Access& access,
                                             const uint8_t* data) {
    const bool is_same = data && std::equal(data, data + size, data_.data() + address);
    for (uint32_t i = address >> shift_; i <= (address + size - 1) >> shift_; ++i) {
        Cell& cell = cells_[i];
        // Writing equal bytes again needs no order, unless a copy is pending there.
        const bool is_idle = is_same && !cell.is_copy;
        if (cell.line >= 0 && !is_idle) {
            if (auto found = objection_to_write(cell, access)) return race("write to ", i, found);
        }
        if (auto found = objection_to_reads(i, access)) return race("write to ", i, found);
        // Accesses that are ordered after this one are also ordered after those reads.
        if (!access.is_strong && !is_idle) forget_reads(i);
        const bool is_copy = access.epoch.agent != access.lanes_ordered.agent;
        cell = {access.epoch, access.line,      cell.reader,     access.serial,
                access.lane,  access.is_strong, access.is_async, is_copy};
    }
    return {};
}

}  // namespace ptx
