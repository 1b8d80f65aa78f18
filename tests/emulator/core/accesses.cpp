#include "accesses.h"

#include <algorithm>

namespace ptx {

namespace {

// A strong write of equal bytes, as of an atomic operation that fails, may be repeated by a warp
// that waits.
void write(const Warp& w, uint8_t* target, uint32_t size, const uint8_t* data, bool is_strong) {
    if (!is_strong || !std::equal(data, data + size, target))
        w.block.cluster.launch.note_progress();
    std::copy_n(data, size, target);
}

}  // namespace

Access access_of(const Warp& w, int lane, bool is_strong) {
    Access access{&w.known, w.epoch()};
    access.lane = static_cast<uint8_t>(lane);
    access.is_strong = is_strong;
    access.line = w.block.cluster.launch.program.code[static_cast<size_t>(w.pc())].line;
    access.serial = w.block.cluster.launch.ticks;
    access.lanes_ordered = {access.epoch.agent, w.lanes_ordered};
    access.copies_ordered = {w.block.agent_of_copies(w.index), w.copies_ordered};
    return access;
}

uint32_t shared_offset(const Warp& w, int lane, uint64_t address, uint32_t size) {
    const Block& owner = w.block.cluster.block_of(w, address, lane);
    const auto offset = static_cast<uint32_t>(address & kRankMask);
    if (offset + size > owner.shared.size()) {
        w.fault(kind::kOutOfBounds,
                std::to_string(size) + " bytes beyond the " + std::to_string(owner.shared.size()) +
                    " bytes of shared memory",
                lane, address);
    }
    return offset;
}

void read_shared(const Warp& w, int lane, uint64_t address, uint32_t size, uint8_t* out,
                 const Access& access) {
    const uint32_t offset = shared_offset(w, lane, address, size);
    SharedMemory& shared = w.block.cluster.block_of(w, address, lane).shared;
    w.require(shared.read(offset, size, access), lane, address);
    std::copy_n(shared.data() + offset, size, out);
}

void write_shared(const Warp& w, int lane, uint64_t address, uint32_t size, const uint8_t* data,
                  const Access& access) {
    const uint32_t offset = shared_offset(w, lane, address, size);
    SharedMemory& shared = w.block.cluster.block_of(w, address, lane).shared;
    w.require(shared.write(offset, size, access, data), lane, address);
    write(w, shared.data() + offset, size, data, access.is_strong);
}

GlobalAccess global_access_of(const Warp& w, bool writes, bool is_strong) {
    return {w.block.cluster.number,
            w.block.linear_index(),
            w.epoch(),
            &w.known,
            false,
            writes,
            is_strong};
}

GlobalAccess global_access_of(const Warp& w, bool writes, bool is_strong, Epoch copy) {
    GlobalAccess access = global_access_of(w, writes, is_strong);
    access.epoch = copy;
    access.is_copy = true;
    return access;
}

void check_global(const Warp& w, int lane, uint64_t address, uint32_t size,
                  const GlobalAccess& access) {
    GlobalMemory& memory = w.block.cluster.launch.memory;
    const auto what = [&] { return std::string(access.writes ? "write of " : "read of "); };
    if (const char* refusal = memory.refusal(address, size, access.writes)) {
        w.fault(kind::kOutOfBounds,
                what() + std::to_string(size) + " bytes: the address " + refusal, lane, address);
    }
    if (const char* conflict = memory.conflict(address, size, access)) {
        w.fault(kind::kRace,
                what() + "global memory that " + conflict + ", and the accesses are not ordered",
                lane, address);
    }
}

void read_global(const Warp& w, int lane, uint64_t address, uint32_t size, uint8_t* out,
                 bool is_strong) {
    check_global(w, lane, address, size, global_access_of(w, false, is_strong));
    std::copy_n(reinterpret_cast<const uint8_t*>(address), size, out);
}

void write_global(const Warp& w, int lane, uint64_t address, uint32_t size, const uint8_t* data,
                  bool is_strong) {
    check_global(w, lane, address, size, global_access_of(w, true, is_strong));
    write(w, reinterpret_cast<uint8_t*>(address), size, data, is_strong);
}

void acquire_global(Warp& w, uint64_t address, const Instruction& i) {
    const Released* there = w.block.cluster.launch.memory.released(address);
    if (!there) return;
    if (i.setting[5] & kAcquires) {
        w.acquire(there->clocks);
    } else {
        w.observed.join(there->clocks);
    }
}

void release_global(Warp& w, uint64_t address, const Instruction& i, bool is_atomic) {
    const bool releases = i.setting[5] & kReleases;
    GlobalMemory& memory = w.block.cluster.launch.memory;
    if (!releases && w.released_to_gpu.is_empty() && !memory.released(address)) return;
    // A store replaces what others released there; atomic operations pass it on.
    Released& there =
        memory.released_by(address, w.block.cluster.number, w.epoch().agent, is_atomic);
    there.clocks.join(releases ? w.known_of_all() : w.released_to_gpu);
    if (releases) w.advance();
}

int64_t take_order(const Modifiers& m) {
    const bool both = m.has("acq_rel") || m.has("sc");
    return (both || m.has("acquire") ? kAcquires : 0) | (both || m.has("release") ? kReleases : 0) |
           (m.has("cta") ? kOfBlock : 0);
}

void read_parameter(const Warp& w, int lane, uint64_t address, uint32_t size, uint8_t* out) {
    const auto& parameters = w.block.cluster.launch.parameters;
    if (address + size > parameters.size()) {
        w.fault(kind::kOutOfBounds, "beyond the parameters", lane, address);
    }
    std::copy_n(parameters.data() + address, size, out);
}

std::pair<Space, uint64_t> resolved(uint64_t generic) {
    if (generic >= kSharedWindow && generic - kSharedWindow < kWindowSize) {
        return {Space::kShared, generic - kSharedWindow};
    }
    if (generic >= kLocalWindow && generic - kLocalWindow < kWindowSize) {
        return {Space::kLocal, generic - kLocalWindow};
    }
    if (generic >= kParameterWindow && generic - kParameterWindow < kWindowSize) {
        return {Space::kParameter, generic - kParameterWindow};
    }
    return {Space::kGlobal, generic};
}

void require_aligned(const Warp& w, int lane, uint64_t address, uint32_t size) {
    if (address % size) {
        w.fault(kind::kMisaligned, "address is not a multiple of " + std::to_string(size), lane,
                address);
    }
}

std::vector<uint64_t> of_active_lanes(const Warp& w, const Lanes<uint64_t>& addresses) {
    std::vector<uint64_t> active;
    for (int l = 0; l < kLanes; ++l) {
        if (w.active >> l & 1) active.push_back(addresses[l]);
    }
    return active;
}

namespace {

// The largest number of different words in one bank, of accesses that are served together.
class Banks {
public:
    void add(uint64_t word) {
        int& first = first_[word % kBanks];
        int length = 1;
        for (int i = first; i >= 0; i = next_[static_cast<size_t>(i)], ++length) {
            if (words_[static_cast<size_t>(i)] == word) return;
        }
        words_[count_] = word;
        next_[count_] = first;
        first = static_cast<int>(count_++);
        most_ = std::max(most_, length);
    }
    int most() const { return most_; }

private:
    static constexpr int kBanks = 32;
    static constexpr size_t kWords = 64;  // each of 32 lanes may touch two

    Lanes<int> first_ = filled(-1);
    std::array<uint64_t, kWords> words_;
    std::array<int, kWords> next_;
    size_t count_ = 0;
    int most_ = 0;
};

}  // namespace

void count_shared(const Warp& w, const std::vector<uint64_t>& addresses, uint32_t size) {
    // 128 bytes are served at once: for wide accesses, those of a half or a quarter of the warp.
    const size_t at_once = size <= 4 ? kLanes : 128 / size;
    for (size_t first = 0; first < addresses.size(); first += at_once) {
        Banks banks;
        for (size_t n = first; n < std::min(first + at_once, addresses.size()); ++n) {
            for (uint64_t word = addresses[n] / 4; word <= (addresses[n] + size - 1) / 4; ++word) {
                banks.add(word);
            }
        }
        w.block.cluster.launch.counts[w.pc()].shared_waves += static_cast<uint64_t>(banks.most());
    }
}

void count_global(const Warp& w, const std::vector<uint64_t>& addresses, uint32_t size) {
    std::vector<uint64_t> sectors;
    sectors.reserve(addresses.size());
    for (uint64_t address : addresses) {
        for (uint64_t s = address / 32; s <= (address + size - 1) / 32; ++s) {
            if (sectors.empty() || sectors.back() != s) sectors.push_back(s);
        }
    }
    std::sort(sectors.begin(), sectors.end());
    const auto end = std::unique(sectors.begin(), sectors.end());
    w.block.cluster.launch.counts[w.pc()].sectors += static_cast<uint64_t>(end - sectors.begin());
}

Space take_space(Modifiers& m) {
    if (m.take("global")) return Space::kGlobal;
    if (m.take("local")) return Space::kLocal;
    if (m.take("const")) return Space::kConstant;
    if (m.take("param") || m.take("param::entry")) return Space::kParameter;
    if (m.take("shared") || m.take("shared::cta") || m.take("shared::cluster"))
        return Space::kShared;
    return Space::kGeneric;
}

}  // namespace ptx
