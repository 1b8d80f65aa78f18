// ld and st.
#include <algorithm>

#include "accesses.h"

namespace ptx {
namespace {

// setting[0]: the space; [1]: bytes of an element; [2]: elements; [3]: whether the access is
// strong; [4]: whether elements are signed; [5]: see take_order.
Space space_of(const Instruction& i) { return static_cast<Space>(i.setting[0]); }

void access_local(Warp& w, int lane, uint64_t address, uint32_t size, uint8_t* out,
                  const uint8_t* data) {
    const uint32_t bytes = w.block.cluster.launch.program.local_bytes;
    if (address + size > bytes) w.fault(kind::kOutOfBounds, "beyond local memory", lane, address);
    w.local.resize(static_cast<size_t>(bytes) * kLanes);
    w.local_written.resize(w.local.size());
    const size_t first = static_cast<size_t>(bytes) * static_cast<size_t>(lane) + address;
    for (size_t n = 0; n < size; ++n) {
        if (data) {
            w.local[first + n] = data[n];
            w.local_written[first + n] = true;
        } else if (!w.local_written[first + n]) {
            w.fault(kind::kUninitialized, "read of local memory that was not written", lane,
                    address);
        } else {
            out[n] = w.local[first + n];
        }
    }
}

void count(const Warp& w, Space space, const Lanes<uint64_t>& addresses, uint32_t size) {
    if (space == Space::kShared) count_shared(w, of_active_lanes(w, addresses), size);
    if (space == Space::kGlobal) count_global(w, of_active_lanes(w, addresses), size);
}

// The elements of an operand: one register, or a vector of them.
std::vector<const Operand*> elements(const Operand& o) {
    if (o.kind != Operand::Kind::kVector) return {&o};
    std::vector<const Operand*> all;
    for (const Operand& one : o.elements) all.push_back(&one);
    return all;
}

// Whether the warp repeats a strong load, which returns what it did before.
void note_poll(Warp& w, const Lanes<uint64_t>& addresses,
               const std::vector<Lanes<uint64_t>>& values) {
    const auto first = static_cast<size_t>(w.first_lane());
    w.polls = addresses[first] == w.polled_address && values[0][first] == w.polled_value;
    w.polled_address = addresses[first];
    w.polled_value = values[0][first];
}

Next load(Warp& w, const Instruction& i) {
    const auto size = static_cast<uint32_t>(i.setting[1]), n = static_cast<uint32_t>(i.setting[2]);
    const bool is_strong = i.setting[3], of_block = i.setting[5] & kOfBlock;
    const auto addresses = w.addresses(i[1]);
    count(w, space_of(i), addresses, size * n);
    std::vector<Lanes<uint64_t>> values(n, filled<uint64_t>(0));
    for (int l = 0; l < kLanes; ++l) {
        if (!(w.active >> l & 1)) continue;
        uint8_t bytes[64];
        auto [space, address] = std::pair{space_of(i), addresses[l]};
        if (space == Space::kGeneric) std::tie(space, address) = resolved(address);
        require_aligned(w, l, address, size * n);
        switch (space) {
            case Space::kShared:
                read_shared(w, l, address, size * n, bytes, access_of(w, l, is_strong));
                break;
            case Space::kLocal: access_local(w, l, address, size * n, bytes, nullptr); break;
            case Space::kParameter: read_parameter(w, l, address, size * n, bytes); break;
            default:
                read_global(w, l, address, size * n, bytes, is_strong && !of_block);
                if (is_strong && !of_block) acquire_global(w, address, i);
        }
        for (uint32_t e = 0; e < n; ++e) {
            uint64_t value = 0;
            std::memcpy(&value, bytes + e * size, size);
            if (i.setting[4] && size < 8) {
                const int shift = static_cast<int>(64 - 8 * size);
                value = static_cast<uint64_t>(static_cast<int64_t>(value << shift) >> shift);
            }
            values[e][l] = value;
        }
    }
    if (is_strong) note_poll(w, addresses, values);
    const auto targets = elements(i[0]);
    if (targets.size() != n)
        w.fault(kind::kUnsupported, "the numbers of registers and elements differ");
    for (uint32_t e = 0; e < n; ++e) w.set(*targets[e], values[e]);
    return Next::kFollowing;
}

Next store(Warp& w, const Instruction& i) {
    const auto size = static_cast<uint32_t>(i.setting[1]), n = static_cast<uint32_t>(i.setting[2]);
    const bool is_strong = i.setting[3], of_block = i.setting[5] & kOfBlock;
    const auto addresses = w.addresses(i[0]);
    count(w, space_of(i), addresses, size * n);
    const auto sources = elements(i[1]);
    if (sources.size() != n)
        w.fault(kind::kUnsupported, "the numbers of registers and elements differ");
    std::vector<Lanes<uint64_t>> values;
    for (const Operand* source : sources) values.push_back(w.bits<uint64_t>(*source));
    // If several lanes write to one address, the order is unspecified.
    const int flip = w.block.cluster.launch.random() & 1 ? kLanes - 1 : 0;
    for (int turn = 0; turn < kLanes; ++turn) {
        const int l = turn ^ flip;
        if (!(w.active >> l & 1)) continue;
        uint8_t bytes[64];
        for (uint32_t e = 0; e < n; ++e) std::memcpy(bytes + e * size, &values[e][l], size);
        auto [space, address] = std::pair{space_of(i), addresses[l]};
        if (space == Space::kGeneric) std::tie(space, address) = resolved(address);
        require_aligned(w, l, address, size * n);
        if (space == Space::kShared) {
            write_shared(w, l, address, size * n, bytes, access_of(w, l, is_strong));
        } else if (space == Space::kLocal) {
            access_local(w, l, address, size * n, nullptr, bytes);
        } else {
            write_global(w, l, address, size * n, bytes, is_strong && !of_block);
            if (is_strong && !of_block) release_global(w, address, i, false);
        }
    }
    return Next::kFollowing;
}

bool take_access(Modifiers& m, Instruction& i) {
    i.is_visible = true;
    i.setting[5] = take_order(m);
    i.setting[3] = m.has("volatile") || m.has("relaxed") || m.has("acquire") || m.has("release");
    i.setting[0] = static_cast<int64_t>(take_space(m));
    m.skip_hints();
    const std::string vector = m.take_any({"v2", "v4", "v8"});
    i.setting[2] = vector.empty() ? 1 : vector[1] - '0';
    const std::string type = m.type();
    i.setting[1] = bytes_of(type);
    i.setting[4] = type[0] == 's';
    return i.setting[1] > 0 && i.setting[1] <= 8;
}

Execute decode_ld(Modifiers& m, Instruction& i) {
    if (!take_access(m, i)) return nullptr;
    if (space_of(i) == Space::kParameter) i.is_visible = false;
    return load;
}

Execute decode_st(Modifiers& m, Instruction& i) {
    if (m.take("async")) return decoders().at("st.async")(m, i);
    return take_access(m, i) ? store : nullptr;
}

}  // namespace

void add_memory(Decoders& all) {
    all["ld"] = decode_ld;
    all["ldu"] = decode_ld;
    all["st"] = decode_st;
}

}  // namespace ptx
