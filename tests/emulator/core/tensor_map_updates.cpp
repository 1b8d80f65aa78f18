// Instructions that modify tensor maps, and fences that make a modified map usable.
#include "accesses.h"
#include "tensor_map.h"

namespace ptx {
namespace {

enum Field {
    kAddress,
    kRank,
    kBox,
    kDim,
    kStride,
    kElementStride,
    kElement,
    kInterleave,
    kSwizzle,
    kAtomicity,
    kFill
};

bool has_index(int64_t field) { return field >= kBox && field <= kElementStride; }

void note_map(Warp& w, Epoch epoch) {
    Clock clock;
    clock.set(epoch.agent, epoch.time);
    w.known.others.join(kNoCluster, clock);
}

// Records a write of the map in global memory by the warp.
void note_write(Warp& w, uint64_t address) {
    auto& maps = w.block.cluster.launch.tensor_maps;
    const auto agents = static_cast<uint32_t>(2 * maps.size());
    const auto found = maps.try_emplace(address, TensorMapWrites{agents, agents + 1, 0}).first;
    note_map(w, {found->second.written, ++found->second.time});
}

void set_field(const Warp& w, TensorMap& map, const Instruction& i, int lane, uint64_t value) {
    const auto field = static_cast<Field>(i.setting[0]);
    const auto at = static_cast<size_t>(has_index(field) ? i[1].value : 0);
    if (at >= (field == kStride ? map.strides.size() : map.dims.size())) {
        w.fault(kind::kInvalid, "a tensor map has no such dimension", lane);
    }
    switch (field) {
        case kAddress: map.address = value; break;
        case kStride: map.strides[at] = value; break;
        case kBox: map.box[at] = static_cast<uint32_t>(value); break;
        case kDim: map.dims[at] = static_cast<uint32_t>(value); break;
        case kElementStride: map.element_strides[at] = static_cast<uint32_t>(value); break;
        default: {
            uint8_t* small[] = {&map.rank_less_one, &map.element,   &map.interleave,
                                &map.swizzle,       &map.atomicity, &map.fill};
            *small[field == kRank ? 0 : field - kElement + 1] = static_cast<uint8_t>(value);
        }
    }
}

// setting[0]: the field; [1]: whether the map is in shared memory.
Next replace(Warp& w, const Instruction& i) {
    const auto addresses = w.addresses(i[0]);
    const auto values = w.bits<uint64_t>(i[i.size() - 1]);
    for (int l = 0; l < kLanes; ++l) {
        if (!(w.active >> l & 1)) continue;
        require_aligned(w, l, addresses[l] & kRankMask, 64);
        TensorMap map;
        auto* bytes = reinterpret_cast<uint8_t*>(&map);
        if (i.setting[1]) {
            read_shared(w, l, addresses[l], sizeof map, bytes, access_of(w, l));
            set_field(w, map, i, l, values[l]);
            write_shared(w, l, addresses[l], sizeof map, bytes, access_of(w, l));
        } else {
            read_global(w, l, addresses[l], sizeof map, bytes);
            set_field(w, map, i, l, values[l]);
            write_global(w, l, addresses[l], sizeof map, bytes);
            note_write(w, addresses[l]);
        }
    }
    return Next::kFollowing;
}

// The whole warp copies a map from shared to global memory.
Next copy_and_fence(Warp& w, const Instruction& i) {
    const int lane = w.first_lane();
    const uint64_t to = w.addresses(i[0])[lane], from = w.addresses(i[1])[lane];
    if (i[2].value != sizeof(TensorMap)) w.fault(kind::kInvalid, "a tensor map has 128 bytes");
    require_aligned(w, lane, to, 128);
    require_aligned(w, lane, from & kRankMask, 128);
    uint8_t bytes[sizeof(TensorMap)];
    read_shared(w, lane, from, sizeof bytes, bytes, access_of(w, Access::kWholeWarp));
    write_global(w, lane, to, sizeof bytes, bytes);
    note_write(w, to);
    w.advance();
    return Next::kFollowing;
}

Execute decode_tensormap(Modifiers& m, Instruction& i) {
    i.is_visible = true;
    if (m.take("cp_fenceproxy")) {
        i.is_aligned = m.take("aligned") && m.take("sync");
        m.skip_hints();
        const bool known =
            m.take("global") && m.take("shared::cta") && m.take("tensormap::generic");
        return known ? copy_and_fence : nullptr;
    }
    static const std::map<std::string, Field> fields = {{"global_address", kAddress},
                                                        {"rank", kRank},
                                                        {"box_dim", kBox},
                                                        {"global_dim", kDim},
                                                        {"global_stride", kStride},
                                                        {"element_stride", kElementStride},
                                                        {"elemtype", kElement},
                                                        {"interleave_layout", kInterleave},
                                                        {"swizzle_mode", kSwizzle},
                                                        {"swizzle_atomicity", kAtomicity},
                                                        {"fill_mode", kFill}};
    if (!m.take("replace") || !m.take("tile")) return nullptr;
    const auto field = fields.find(m.pop_front());
    if (field == fields.end() || !m.take("b1024")) return nullptr;
    i.setting[0] = field->second;
    i.setting[1] = take_space(m) == Space::kShared;
    m.type();
    return replace;
}

}  // namespace

// Makes writes of other threads to a tensor map usable for copies, if they are ordered before.
Next fence_for_tensor_maps(Warp& w, const Instruction& i) {
    const auto addresses = w.addresses(i[0]);
    if (i[1].value != sizeof(TensorMap)) w.fault(kind::kInvalid, "a tensor map has 128 bytes");
    for (int l = 0; l < kLanes; ++l) {
        if (!(w.active >> l & 1)) continue;
        const auto& maps = w.block.cluster.launch.tensor_maps;
        const auto found = maps.find(addresses[l]);
        if (found == maps.end()) continue;
        const TensorMapWrites& writes = found->second;
        if (w.known.others.covers(kNoCluster, {writes.written, writes.time}))
            note_map(w, {writes.fenced, writes.time});
    }
    return Next::kFollowing;
}

void add_tensor_map_updates(Decoders& all) { all["tensormap"] = decode_tensormap; }

}  // namespace ptx
