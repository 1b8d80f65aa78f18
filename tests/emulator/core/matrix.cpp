#include "matrix.h"

#include <algorithm>
#include <cstring>

#include "accesses.h"

namespace ptx {

Element element_of(const std::string& type) {
    static const std::map<std::string, Element> all = {
        {"f16", Element::kHalf},    {"bf16", Element::kBfloat}, {"tf32", Element::kTf32},
        {"e4m3", Element::kE4M3},   {"e5m2", Element::kE5M2},   {"s8", Element::kSigned8},
        {"u8", Element::kUnsigned8}};
    const auto found = all.find(type);
    return found == all.end() ? Element::kUnknown : found->second;
}

int bytes_of(Element e) {
    switch (e) {
        case Element::kTf32: return 4;
        case Element::kHalf:
        case Element::kBfloat: return 2;
        default: return 1;
    }
}

float value_of(Element e, uint32_t bits) {
    switch (e) {
        case Element::kHalf:
            return static_cast<float>(std::bit_cast<Half>(static_cast<uint16_t>(bits)));
        case Element::kBfloat: return std::bit_cast<float>(bits << 16);
        case Element::kTf32: return Tf32{bits};
        case Element::kE4M3: return std::bit_cast<Float8E4M3>(static_cast<uint8_t>(bits));
        case Element::kE5M2: return std::bit_cast<Float8E5M2>(static_cast<uint8_t>(bits));
        case Element::kSigned8: return static_cast<int8_t>(bits);
        default: return static_cast<uint8_t>(bits);
    }
}

std::vector<double> product(const Matrix& a, const Matrix& b) {
    const auto columns = static_cast<size_t>(b.rows);
    std::vector<double> transposed(columns * static_cast<size_t>(b.depth));
    for (int j = 0; j < b.rows; ++j) {
        for (int k = 0; k < b.depth; ++k) {
            transposed[static_cast<size_t>(k) * columns + static_cast<size_t>(j)] = b.at(j, k);
        }
    }
    std::vector<double> out(static_cast<size_t>(a.rows) * columns);
    for (int i = 0; i < a.rows; ++i) {
        double* row = &out[static_cast<size_t>(i) * columns];
        for (int k = 0; k < a.depth; ++k) {
            const double factor = a.at(i, k),
                         *others = &transposed[static_cast<size_t>(k) * columns];
            for (size_t j = 0; j < columns; ++j) row[j] += factor * others[j];
        }
    }
    return out;
}

Place place_in_a(int lane, int r, int e, int per_register) {
    return {lane / 4 + 8 * (r % 2), per_register * (lane % 4) + e + r / 2 * 4 * per_register};
}

Place place_in_b(int lane, int r, int e, int per_register) {
    return {lane / 4, per_register * (lane % 4) + e + r * 4 * per_register};
}

namespace {

// kPlace: place_in_a or place_in_b.
template <Place (*kPlace)(int, int, int, int)>
void load_fragment(const Warp& w, const std::vector<Operand>& registers, Element type, Matrix& out,
                   int first_row) {
    const int bytes = bytes_of(type), per_register = 4 / bytes;
    const uint32_t ones = bytes == 4 ? ~0u : (1u << (8 * bytes)) - 1;
    for (size_t r = 0; r < registers.size(); ++r) {
        const auto bits = w.bits<uint32_t>(registers[r]);
        for (int e = 0; e < per_register; ++e) {
            for (int l = 0; l < kLanes; ++l) {
                const auto [row, column] = kPlace(l, static_cast<int>(r), e, per_register);
                const uint32_t element = bits[static_cast<size_t>(l)] >> (8 * bytes * e) & ones;
                out.at(first_row + row, column) = value_of(type, element);
            }
        }
    }
}

}  // namespace

void load_fragment_a(const Warp& w, const std::vector<Operand>& registers, Element e, Matrix& out,
                     int first_row) {
    load_fragment<place_in_a>(w, registers, e, out, first_row);
}

void load_fragment_b(const Warp& w, const std::vector<Operand>& registers, Element e, Matrix& out) {
    load_fragment<place_in_b>(w, registers, e, out, 0);
}

Sum sum_of(const std::string& type) {
    if (type == "f32") return Sum::kFloat;
    if (type == "f16") return Sum::kHalf;
    return type == "s32" ? Sum::kInteger : Sum::kUnknown;
}

void accumulate(Warp& w, const std::vector<Operand>& d, const std::vector<Operand>* c, Sum sum,
                const std::vector<double>& tile, int first_row, int columns) {
    const int per_register = sum == Sum::kHalf ? 2 : 1, rows_apart = 2 / per_register;
    for (size_t r = 0; r < d.size(); ++r) {
        const auto before = c ? w.bits<uint32_t>((*c)[r]) : filled(0u);
        Lanes<uint32_t> out{};
        // A lane has two of 8 columns in each of two rows, 8 apart.
        const int in_group = static_cast<int>(r) % (2 * rows_apart),
                  group = static_cast<int>(r) / (2 * rows_apart);
        for (int l = 0; l < kLanes; ++l) {
            for (int e = 0; e < per_register; ++e) {
                const int row = first_row + l / 4 + 8 * (in_group / rows_apart);
                const int column = 8 * group + 2 * (l % 4) + (sum == Sum::kHalf ? e : in_group % 2);
                const double added = tile[static_cast<size_t>(row * columns + column)];
                if (sum == Sum::kFloat) {
                    const float x = c ? std::bit_cast<float>(before[l]) : 0.0f;
                    out[l] = std::bit_cast<uint32_t>(canonical(static_cast<float>(x + added)));
                } else if (sum == Sum::kInteger) {
                    out[l] = before[l] + static_cast<uint32_t>(static_cast<int64_t>(added));
                } else {
                    const auto x =
                        std::bit_cast<Half>(static_cast<uint16_t>(before[l] >> (16 * e)));
                    const Half total =
                        canonical(static_cast<Half>((c ? static_cast<double>(x) : 0.0) + added));
                    out[l] |= static_cast<uint32_t>(std::bit_cast<uint16_t>(total)) << (16 * e);
                }
            }
        }
        w.set(d[r], out);
    }
}

namespace {

// The address of element (row, k) of a described matrix.
uint32_t described_address(const Descriptor& d, int row, int k, int bytes, bool transposed) {
    uint32_t at;
    const auto r = static_cast<uint32_t>(row), along = static_cast<uint32_t>(k * bytes);
    const auto kk = static_cast<uint32_t>(k), width = static_cast<uint32_t>(d.swizzle);
    if (!transposed && d.swizzle) {
        at = r % 8 * width + r / 8 * d.stride + along;
    } else if (!transposed) {
        at = r % 8 * 16 + r / 8 * d.stride + along / 16 * d.leading + along % 16;
    } else if (d.swizzle) {
        const uint32_t in_row = width / static_cast<uint32_t>(bytes);
        at = r % in_row * static_cast<uint32_t>(bytes) + r / in_row * d.leading + kk % 8 * width +
             kk / 8 * d.stride;
    } else {
        const uint32_t in_row = 16 / static_cast<uint32_t>(bytes);
        at = r % in_row * static_cast<uint32_t>(bytes) + r / in_row * d.stride + kk % 8 * 16 +
             kk / 8 * d.leading;
    }
    at += d.start;
    // 16-byte chunks are permuted by the number of their 128-byte row.
    const uint32_t chunks = d.swizzle ? width / 16 - 1 : 0;
    return at ^ ((((at >> 7) - static_cast<uint32_t>(d.base_offset)) & chunks) << 4);
}

// Calls f(row, k, address) for the first element of each 16 bytes.
template <class F>
void for_each_chunk(const Warp& w, const Descriptor& d, int rows, int depth, int bytes,
                    bool transposed, F f) {
    const int step = 16 / bytes, row_step = transposed ? step : 1, k_step = transposed ? 1 : step;
    for (int row = 0; row < rows; row += row_step) {
        for (int k = 0; k < depth; k += k_step) {
            const uint32_t at = described_address(d, row, k, bytes, transposed);
            if (at + 16 > w.block.shared.size()) {
                w.fault(kind::kOutOfBounds, "a matrix descriptor reaches beyond shared memory", -1,
                        at);
            }
            f(row, k, at);
        }
    }
}

}  // namespace

Matrix load_described(const Warp& w, const Descriptor& d, int rows, int depth, Element e,
                      bool transposed) {
    const int bytes = bytes_of(e);
    const uint8_t* shared = w.block.shared.data();
    Matrix out(rows, depth);
    for_each_chunk(w, d, rows, depth, bytes, transposed, [&](int row, int k, uint32_t at) {
        for (int n = 0; n < 16 / bytes; ++n) {
            uint32_t bits = 0;
            std::memcpy(&bits, shared + at + n * bytes, static_cast<size_t>(bytes));
            out.at(transposed ? row + n : row, transposed ? k : k + n) = value_of(e, bits);
        }
    });
    return out;
}

void record_described(const Warp& w, const Descriptor& d, int rows, int depth, Element e,
                      bool transposed, const Access& access) {
    for_each_chunk(w, d, rows, depth, bytes_of(e), transposed, [&](int, int, uint32_t at) {
        w.require(w.block.shared.read(at, 16, access), -1, at);
    });
}

}  // namespace ptx
