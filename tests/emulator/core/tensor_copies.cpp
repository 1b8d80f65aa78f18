// cp.async.bulk.tensor: copies of a box of a tensor, described by a tensor map.
#include "bulk.h"
#include "tensor_map.h"

namespace ptx {
namespace {

std::array<int32_t, kMaxRank> coordinates(const Warp& w, const Operand& address, int lane) {
    std::array<int32_t, kMaxRank> first{};
    const auto& given = address.elements[1].elements;
    for (size_t d = 0; d < given.size(); ++d) first[d] = w.bits<int32_t>(given[d])[lane];
    return first;
}

// setting[0]: the number of dimensions.
std::pair<TensorMap, Box> box_of(const Warp& w, const Instruction& i, const Operand& address,
                                 int lane) {
    const TensorMap map = load_tensor_map(w, lane, w.addresses(address)[lane]);
    if (map.rank() != i.setting[0]) {
        w.fault(kind::kInvalid, "the tensor map has " + std::to_string(map.rank()) + " dimensions",
                lane);
    }
    return {map, Box(map, coordinates(w, address, lane))};
}

constexpr uint32_t kSharedAlignment = 128;

// Copies chunks of 16 bytes between an unswizzled box and shared memory.
template <class F>
void for_each_chunk(const TensorMap& map, uint32_t shared, uint32_t bytes, F f) {
    for (uint32_t at = 0; at < bytes; at += 16) f(at, map.swizzled(shared + at) - shared);
}

// setting[1]: whether the copy is sent to several blocks.
Next load(Warp& w, const Instruction& i) {
    const auto to = w.addresses(i[0]), signals = w.addresses(i[2]);
    const auto masks = i.setting[1] ? w.bits<uint32_t>(i[3]) : filled(0u);
    for (int l = 0; l < kLanes; ++l) {
        if (!(w.active >> l & 1)) continue;
        const auto [map, box] = box_of(w, i, i[1], l);
        const uint64_t first = shared_address(to[l]);
        require_aligned(w, l, first & kRankMask, kSharedAlignment);
        for (uint32_t rank : targets(w, l, first, i.setting[1], masks[l])) {
            const uint64_t place =
                i.setting[1] ? in_block(signals[l], rank) : shared_address(signals[l]);
            const Signal signal = signal_at(w, l, place);
            const Epoch complete{signal.barrier->agent, signal.time};
            box.check(w, l, global_access_of(w, false, false, complete));
            uint8_t* target =
                begin_shared_write(w, l, in_block(first, rank), box.bytes(), access_of(w, signal));
            const auto shared = static_cast<uint32_t>(first & kRankMask);
            land(w, signal, box.bytes(), [=, map = map, box = box] {
                const auto data = box.read();
                for_each_chunk(map, shared, box.bytes(), [&](uint32_t in_box, uint32_t in_shared) {
                    std::memcpy(target + in_shared, data.data() + in_box, 16);
                });
            });
        }
    }
    return Next::kFollowing;
}

// setting[1]: whether elements are combined with those in global memory; [2]: the index of the
// operation in the opcode.
Next store(Warp& w, const Instruction& i) {
    const auto from = w.addresses(i[1]);
    for (int l = 0; l < kLanes; ++l) {
        if (!(w.active >> l & 1)) continue;
        const auto [map, box] = box_of(w, i, i[0], l);
        const uint64_t first = shared_address(from[l]);
        require_aligned(w, l, first & kRankMask, kSharedAlignment);
        box.check(w, l, next_bulk_write(w, i.setting[1]));
        Reduce reduce = nullptr;
        if (i.setting[1]) {
            reduce = reduction_of(i.opcode[static_cast<size_t>(i.setting[2])], map.element);
            if (!reduce) w.fault(kind::kUnsupported, "reduction of elements of this type", l);
        }
        const auto shared = static_cast<uint32_t>(first & kRankMask);
        land_in_groups(
            w, l, first, box.bytes(),
            [shared, map = map, bytes = box.bytes()](const uint8_t* source) {
                std::vector<uint8_t> data(bytes);
                for_each_chunk(map, shared, bytes, [&](uint32_t in_box, uint32_t in_shared) {
                    std::memcpy(data.data() + in_box, source + in_shared, 16);
                });
                return data;
            },
            [reduce, box = box](const std::vector<uint8_t>& data) {
                box.for_each_run([&](uint64_t address, uint32_t offset, uint32_t size) {
                    const auto target = reinterpret_cast<uint8_t*>(address);
                    if (reduce) return reduce(target, data.data() + offset, size);
                    std::memcpy(target, data.data() + offset, size);
                });
            });
    }
    return Next::kFollowing;
}

Next prefetch(Warp& w, const Instruction& i) {
    for (int l = 0; l < kLanes; ++l) {
        if (w.active >> l & 1) box_of(w, i, i[0], l);
    }
    return Next::kFollowing;
}

}  // namespace

Execute decode_tensor_copy(Modifiers& m, Instruction& i) {
    const bool prefetches = m.take("prefetch"), reduces = m.take("reduce");
    m.take("tensor");
    m.take("tile");
    m.take("cta_group::1");
    const std::string dimensions = m.take_any({"1d", "2d", "3d", "4d", "5d"});
    if (dimensions.empty()) return nullptr;
    i.setting[0] = dimensions[0] - '0';
    if (prefetches) return m.take("global") ? prefetch : nullptr;
    const std::string to = m.pop_front(), from = m.pop_front();
    if (to.starts_with("shared::") && from == "global") {
        i.setting[1] = m.take("multicast::cluster");
        return !reduces && m.take("mbarrier::complete_tx::bytes") ? load : nullptr;
    }
    if (to != "global" || from != "shared::cta" || !m.take("bulk_group")) return nullptr;
    if (reduces) {
        const std::string operation = m.take_any({"add", "min", "max", "and", "or", "xor"});
        if (operation.empty()) return nullptr;
        i.setting[1] = true;
        i.setting[2] = std::find(i.opcode.begin(), i.opcode.end(), operation) - i.opcode.begin();
    }
    return store;
}

}  // namespace ptx
