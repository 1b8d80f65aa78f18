// The kinds of arithmetic a kernel is instantiated for, and the operand layouts they multiply.
//
// A matrix product reads operands: one real number each, or (Paired) two bfloat16 numbers that a
// dot product consumes together. `pair` numbers along the depth of a product share an operand, so
// the same data is laid out by `pack_rows` where it is deep along its channels, by `pack_row_pairs`
// where it is deep along its rows. With pair == 1 both layouts are the same.
#pragma once

#include <algorithm>

#include "element.h"
#include "simd.h"

namespace bfa::BFA_ISA {

constexpr int kTile = limits::TILE_KEYS;  // keys of one tile
constexpr int kRegisterRows = 6;          // rows of a product whose sums fit the registers
constexpr int kStripRows = 48;  // queries whose softmax is computed together: latencies overlap

constexpr int64_t round_up(int64_t x, int64_t multiple) {
    return (x + multiple - 1) / multiple * multiple;
}

// The largest absolute value of many. As integers, the bits of floats without a sign are in the
// floats' order, and those of NaN come last.
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

template <class Real_>
struct Plain {
    using Real = Real_;
    using Operand = Real_;
    static constexpr int pair = 1;
    static constexpr bool coarse_exp2 = false;

    static BFA_INLINE Vector<Real> dot(Operand a, Vector<Operand> b, Vector<Real> sum) {
        return broadcast(a) * b + sum;
    }
    static BFA_INLINE Vector<Real> dot(Vector<Operand> a, Vector<Operand> b, Vector<Real> sum) {
        return a * b + sum;
    }

    static Real number(Operand x, int) { return x; }

    // Whether rows of elements are rows of operands.
    static bool reads_in_place(Element element) {
        return element_bytes(element) == int64_t(sizeof(Operand));
    }

    // The largest absolute value, or NaN if there is one; `count` is a multiple of the vector
    // length.
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
            std::memset(row + columns, 0, (target_stride - columns) * sizeof(Real));
        }
    }
};

#if defined(__AVX512BF16__)
struct Paired {
    using Real = float;
    using Operand = uint32_t;  // the first number in the low half
    static constexpr int pair = 2;
    static constexpr bool coarse_exp2 = true;

    static BFA_INLINE Vector<float> dot(Operand a, Vector<Operand> b, Vector<float> sum) {
        return dot((Vector<Operand>)_mm512_set1_epi32(a), b, sum);
    }
    static BFA_INLINE Vector<float> dot(Vector<Operand> a, Vector<Operand> b, Vector<float> sum) {
        return (Vector<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    }

    static bool reads_in_place(Element) { return true; }

    static float number(Operand x, int half) {
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

    // 32 numbers to 16 operands, pairs along the row
    static BFA_INLINE Vector<Operand> pairs_along_row(Vector<float> first, Vector<float> second) {
        return (Vector<Operand>)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    }

    // 16 numbers of each of two rows to 16 operands, pairs along the column
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
            row[target_stride - 1] = 0;
            if (columns % 2) row[columns / 2] = 0;
            std::memcpy(row, source + r * stride, columns * sizeof(uint16_t));
            const int64_t filled = (columns + 1) / 2;
            std::memset(row + filled, 0, (target_stride - filled) * sizeof(Operand));
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
            std::memset(row + columns, 0, (target_stride - columns) * sizeof(Operand));
        }
    }
};
#endif

// (rows, columns) to (columns, kTile); rows is a multiple of the vector length.
template <class Operand>
__attribute__((noinline)) void transpose(const Operand* source, int rows, int64_t columns,
                                         int64_t source_stride, Operand* target) {
    constexpr int kBlock = kLanes<Operand>;
    for (int row = 0; row < rows; row += kBlock)
        for (int64_t c = 0; c < columns; ++c)
            for (int r = row; r < row + kBlock; ++r)
                target[c * kTile + r] = source[r * source_stride + c];
}

}  // namespace bfa::BFA_ISA
