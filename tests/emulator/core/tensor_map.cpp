#include "tensor_map.h"

#include "accesses.h"

namespace ptx {
namespace {

constexpr uint32_t kElementBytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 4, 4};
constexpr uint64_t kMapAlignment = 64;

bool is_float(const TensorMap& map) { return map.element >= 6; }

// Fills with a NaN whose bits are all ones except the sign.
void fill_with_nan(std::vector<uint8_t>& bytes, uint32_t element) {
    std::fill(bytes.begin(), bytes.end(), 0xFF);
    for (size_t i = element - 1; i < bytes.size(); i += element) bytes[i] = 0x7F;
}

// tf32 elements are rounded when they are loaded.
void round_to_tf32(std::vector<uint8_t>& bytes) {
    for (size_t i = 0; i < bytes.size(); i += 4) {
        uint32_t value;
        std::memcpy(&value, bytes.data() + i, 4);
        if (!std::isnan(std::bit_cast<float>(value))) value = (value + 0x1000) & 0xFFFFE000;
        std::memcpy(bytes.data() + i, &value, 4);
    }
}

}  // namespace

uint32_t TensorMap::element_bytes() const { return kElementBytes[element]; }

uint32_t TensorMap::swizzled(uint32_t shared_address) const {
    const uint32_t chunks = (1u << swizzle) - 1;  // of 16 bytes
    return shared_address ^ ((shared_address >> 7 & chunks) << 4);
}

std::string TensorMap::refusal() const {
    if (rank_less_one >= kMaxRank) return "it has more than 5 dimensions";
    if (element >= std::size(kElementBytes)) return "its element type is not supported";
    if (interleave || swizzle > 3 || atomicity || fill > 1) return "its layout is not supported";
    if (fill && !is_float(*this)) return "only floating-point elements can be filled with NaN";
    if (address % 16) return "the tensor is not aligned to 16 bytes";
    for (int d = 0; d < rank(); ++d) {
        if (dims[d] == 0) return "a dimension is 0";
        if (box[d] == 0 || box[d] > 256) return "a box has 1 to 256 elements in a dimension";
        if (element_strides[d] == 0 || element_strides[d] > 8) return "an element stride is 1 to 8";
        if (d > 0 && (strides[d - 1] % 16 || strides[d - 1] >> 40)) {
            return "a stride must be a multiple of 16 bytes below 2^40";
        }
    }
    const uint32_t row = box[0] * element_bytes();
    if (row % 16) return "a row of the box is not a multiple of 16 bytes";
    if (swizzle && row > 16u << swizzle) return "a row of the box is wider than the swizzle";
    if (swizzle && row < 16u << swizzle) return "a row narrower than the swizzle is not supported";
    return "";
}

Box::Box(const TensorMap& map, const std::array<int32_t, kMaxRank>& first)
    : map_(map), first_(first), bytes_(map.element_bytes()) {
    for (int d = 0; d < map.rank(); ++d) {
        count_[d] = (map.box[d] + map.element_strides[d] - 1) / map.element_strides[d];
        bytes_ *= count_[d];
    }
}

void Box::check(const Warp& w, int lane, const GlobalAccess& access) const {
    for_each_run([&](uint64_t address, uint32_t, uint32_t size) {
        check_global(w, lane, address, size, access);
        count_global(w, {address}, size);
    });
}

std::vector<uint8_t> Box::read() const {
    std::vector<uint8_t> out(bytes_);
    if (map_.fill) fill_with_nan(out, map_.element_bytes());
    for_each_run([&](uint64_t address, uint32_t offset, uint32_t size) {
        std::memcpy(out.data() + offset, reinterpret_cast<const void*>(address), size);
    });
    if (map_.is_tf32()) round_to_tf32(out);
    return out;
}

TensorMap load_tensor_map(const Warp& w, int lane, uint64_t address) {
    if (address % kMapAlignment) {
        w.fault(kind::kMisaligned, "a tensor map must be aligned to 64 bytes", lane, address);
    }
    TensorMap map;
    auto* bytes = reinterpret_cast<uint8_t*>(&map);
    if (const auto [space, inside] = resolved(address); space == Space::kParameter) {
        read_parameter(w, lane, inside, sizeof map, bytes);
    } else {
        read_global(w, lane, address, sizeof map, bytes);
    }
    const auto& written = w.block.cluster.launch.tensor_maps;
    if (const auto found = written.find(address); found != written.end()) {
        const TensorMapWrites& writes = found->second;
        if (!w.known.others.covers(kNoCluster, {writes.fenced, writes.time})) {
            w.fault(kind::kRace,
                    "the tensor map was modified without a fence.proxy.tensormap acquire before "
                    "this use",
                    lane, address);
        }
    }
    const std::string refusal = map.refusal();
    if (!refusal.empty())
        w.fault(kind::kInvalid, "the tensor map cannot be used: " + refusal, lane, address);
    return map;
}

}  // namespace ptx
