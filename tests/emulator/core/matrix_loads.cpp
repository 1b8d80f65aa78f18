// ldmatrix and stmatrix: 8 x 8 matrices of 16-bit elements between shared memory and fragments.
#include "accesses.h"

namespace ptx {
namespace {

// setting[0]: the number of matrices; [1]: whether they are transposed.
template <bool Store>
Next move_matrices(Warp& w, const Instruction& i) {
    const auto count = static_cast<size_t>(i.setting[0]);
    const bool transposed = i.setting[1];
    const auto addresses = w.addresses(i[Store ? 0 : 1]);
    const auto& registers = i[Store ? 1 : 0].elements;
    if (registers.size() != count)
        w.fault(kind::kUnsupported, "the numbers of registers and matrices differ");
    for (size_t n = 0; n < count; ++n) {
        // Row r of the matrix is at the address of lane 8 n + r; a lane has two elements of a row.
        uint16_t elements[8][8];
        std::vector<uint64_t> rows;
        auto fragment = Store ? w.bits<uint32_t>(registers[n]) : filled(0u);
        const auto element_of_lane = [&](int lane, int e) -> uint16_t& {
            const int row = lane / 4, column = 2 * (lane % 4) + e;
            return transposed ? elements[column][row] : elements[row][column];
        };
        if (Store) {
            for (int l = 0; l < kLanes; ++l) {
                for (int e = 0; e < 2; ++e)
                    element_of_lane(l, e) = static_cast<uint16_t>(fragment[l] >> (16 * e));
            }
        }
        for (int r = 0; r < 8; ++r) {
            const int lane = static_cast<int>(8 * n) + r;
            require_aligned(w, lane, addresses[lane], 16);
            rows.push_back(addresses[lane]);
            auto* bytes = reinterpret_cast<uint8_t*>(elements[r]);
            const Access access = access_of(w, Access::kWholeWarp);
            if (Store) {
                write_shared(w, lane, addresses[lane], 16, bytes, access);
            } else {
                read_shared(w, lane, addresses[lane], 16, bytes, access);
            }
        }
        count_shared(w, rows, 16);
        if (!Store) {
            for (int l = 0; l < kLanes; ++l) {
                fragment[l] = element_of_lane(l, 0) | static_cast<uint32_t>(element_of_lane(l, 1))
                                                          << 16;
            }
            w.set(registers[n], fragment);
        }
    }
    return Next::kFollowing;
}

template <bool Store>
Execute decode(Modifiers& m, Instruction& i) {
    i.is_visible = true;
    if (!m.take("sync")) return nullptr;
    i.is_aligned = m.take("aligned");
    const std::string count = m.take_any({"x1", "x2", "x4"});
    i.setting[1] = m.take("trans");
    take_space(m);
    if (count.empty() || !m.take("m8n8") || !m.take("b16")) return nullptr;
    i.setting[0] = count[1] - '0';
    return move_matrices<Store>;
}

}  // namespace

void add_matrix_loads(Decoders& all) {
    all["ldmatrix"] = decode<false>;
    all["stmatrix"] = decode<true>;
}

}  // namespace ptx
