// The kinds of arithmetic that kernels are instantiated for, and the layouts of their operands.
//
// An operand of a matrix product is one real number (Plain) or two bfloat16 numbers that a dot
// product instruction consumes together (Paired). The `pair` numbers of an operand are adjacent
// along the contracted dimension (the depth) of the product: `pack_rows` packs a matrix whose
// channels are contracted, `pack_row_pairs` one whose rows are. With pair == 1 both layouts are the
// same.
#pragma once

#include <algorithm>
#include <limits>

#include "element.h"
#include "simd.h"

namespace bfa::BFA_KERNELS {

constexpr int kTile = constants::TILE_KEYS;  // keys per tile
constexpr int kRegisterRows = 6;  // rows of a product whose accumulators fit in registers
constexpr int kStripRows = 48;    // queries per softmax pass, enough to hide instruction latencies

constexpr int64_t round_up(int64_t x, int64_t multiple) {
    return (x + multiple - 1) / multiple * multiple;
}

// Writes zeros. Most rows need none, and calling memset for each of them would take longer than
// copying them.
template <class T>
BFA_INLINE void clear(T* begin, T* end) {
    if (begin < end) std::memset(begin, 0, (end - begin) * sizeof(T));
}

// A running maximum of absolute values. It compares the bits of nonnegative floats as integers,
// which preserves their order and places NaN above infinity.
template <class Real>
struct Magnitudes {
    Vector<Bits<Real>> largest;

    BFA_INLINE void add(Vector<Real> x) {
        const auto bits = (Vector<Bits<Real>>)abs<Real>(x);
        largest = bits > largest ? bits : largest;
    }
    BFA_INLINE Real reduce() const {
        Bits<Real> bits = 0;
        for (int lane = 0; lane < kLanes<Real>; ++lane) bits = std::max(bits, largest[lane]);
        Real result;
        std::memcpy(&result, &bits, sizeof result);
        return result;
    }
};

// Returns the largest absolute value of those that are finite.
template <class Real>
Real largest_finite(const Real* x, int64_t n) {
    Magnitudes<Real> magnitudes{};
    const auto add = [&](Vector<Real> y) {
        magnitudes.add(abs<Real>(y) <= std::numeric_limits<Real>::max() ? y : Vector<Real>{});
    };
    int64_t i = 0;
    for (; i + kLanes<Real> <= n; i += kLanes<Real>) add(load(x + i));
    for (; i < n; ++i) add(broadcast(x[i]));
    return magnitudes.reduce();
}

template <class Real_>
struct Plain {
    using Real = Real_;
    using Operand = Real_;
    static constexpr int pair = 1;
    static constexpr bool approximate_exp2 = false;

    static BFA_INLINE Vector<Real> dot(Operand a, Vector<Operand> b, Vector<Real> sum) {
        return broadcast(a) * b + sum;
    }
    static BFA_INLINE Vector<Real> dot(Vector<Operand> a, Vector<Operand> b, Vector<Real> sum) {
        return a * b + sum;
    }

    static Real element(Operand x, int) { return x; }

    // Whether rows of elements in memory are rows of operands without conversion.
    static bool reads_in_place(Element element) {
        return element_bytes(element) == int64_t(sizeof(Operand));
    }

    // Returns the largest absolute value, or NaN if there is a NaN. `count` is a multiple of the
    // vector length.
    static Real largest_magnitude(const Operand* x, int64_t count) {
        Magnitudes<Real> largest{};
        for (int64_t n = 0; n < count; n += kLanes<Real>) largest.add(load(x + n));
        return largest.reduce();
    }

    static void pack_row_pairs(Element element, const char* source, int64_t stride, int rows,
                               int64_t columns, Operand* target, int64_t target_stride) {
        pack_rows(element, source, stride, rows, columns, target, target_stride);
    }

    static void pack_rows(Element element, const char* source, int64_t stride, int rows,
                          int64_t columns, Operand* target, int64_t target_stride) {
        for (int r = 0; r < rows; ++r) {
            Real* row = target + r * target_stride;
            read_row(element, source + r * stride, columns, row);
            clear(row + columns, row + target_stride);
        }
    }
};

#if defined(__AVX512BF16__)
struct Paired {
    using Real = float;
    using Operand = uint32_t;  // the first number in the low half
    static constexpr int pair = 2;
    static constexpr bool approximate_exp2 = true;

    static BFA_INLINE Vector<float> dot(Operand a, Vector<Operand> b, Vector<float> sum) {
        return dot((Vector<Operand>)_mm512_set1_epi32(a), b, sum);
    }
    static BFA_INLINE Vector<float> dot(Vector<Operand> a, Vector<Operand> b, Vector<float> sum) {
        return (Vector<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    }

    static bool reads_in_place(Element) { return true; }

    static float element(Operand x, int half) {
        return bits_to_float(half ? x & 0xffff0000 : x << 16);
    }

    static float largest_magnitude(const Operand* x, int64_t count) {
        Magnitudes<float> largest{};
        for (int64_t n = 0; n < count; n += kLanes<float>) {
            const Vector<Operand> pairs = load(x + n);
            largest.add((Vector<float>)(pairs << 16));
            largest.add((Vector<float>)(pairs & 0xffff0000));
        }
        return largest.reduce();
    }

    // Packs 32 numbers of a row into 16 operands of adjacent columns.
    static BFA_INLINE Vector<Operand> pairs_along_row(Vector<float> first, Vector<float> second) {
        return (Vector<Operand>)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    }

    // Packs 16 numbers of each of two rows into 16 operands, one per column.
    static BFA_INLINE Vector<Operand> pairs_along_column(Vector<float> upper, Vector<float> lower) {
        const __m512i packed = (__m512i)_mm512_cvtne2ps_pbh((__m512)lower, (__m512)upper);
        const __m512i interleave =
            _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                             22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        return (Vector<Operand>)_mm512_permutexvar_epi16(interleave, packed);
    }

    static void pack_rows(Element, const char* source, int64_t stride, int rows, int64_t columns,
                          Operand* target, int64_t target_stride) {
        for (int r = 0; r < rows; ++r) {
            Operand* row = target + r * target_stride;
            const auto* numbers = reinterpret_cast<const uint16_t*>(source + r * stride);
            int64_t c = 0;
            for (; c + kLanes<uint16_t> <= columns; c += kLanes<uint16_t>)
                store(row + c / 2, (Vector<Operand>)load(numbers + c));
            clear(row + c / 2, row + target_stride);
            if (c < columns)
                std::memcpy(row + c / 2, numbers + c, (columns - c) * sizeof(uint16_t));
        }
    }

    static void pack_row_pairs(Element, const char* source, int64_t stride, int rows,
                               int64_t columns, Operand* target, int64_t target_stride) {
        for (int r = 0; r < rows; r += 2) {
            const auto* upper = reinterpret_cast<const uint16_t*>(source + r * stride);
            const auto* lower = reinterpret_cast<const uint16_t*>(source + (r + 1) * stride);
            Operand* row = target + r / 2 * target_stride;
            if (r + 1 < rows) {
                for (int64_t c = 0; c < columns; ++c) row[c] = upper[c] | uint32_t(lower[c]) << 16;
            } else {
                for (int64_t c = 0; c < columns; ++c) row[c] = upper[c];
            }
            clear(row + columns, row + target_stride);
        }
    }
};
#endif

// Transposes (rows, columns) to (columns, target_stride). rows is a multiple of the vector length.
template <class Operand>
__attribute__((noinline)) void transpose(const Operand* source, int64_t rows, int64_t columns,
                                         int64_t source_stride, Operand* target,
                                         int64_t target_stride = kTile) {
    constexpr int kSide = kLanes<Operand>;
    const int64_t whole = columns / kSide * kSide;
    for (int64_t row = 0; row < rows; row += kSide) {
        for (int64_t c = 0; c < whole; c += kSide) {
            Vector<Operand> square[kSide];
#pragma GCC unroll 16
            for (int x = 0; x < kSide; ++x)
                square[x] = load(source + (row + x) * source_stride + c);
            transpose_square<Operand>(square);
#pragma GCC unroll 16
            for (int x = 0; x < kSide; ++x)
                store(target + (c + x) * target_stride + row, square[x]);
        }
        for (int64_t c = whole; c < columns; ++c)
            for (int64_t r = row; r < row + kSide; ++r)
                target[c * target_stride + r] = source[r * source_stride + c];
    }
}

}  // namespace bfa::BFA_KERNELS
