// The number formats of PTX, and rounding to them.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace ptx {

constexpr int kLanes = 32;
constexpr uint32_t kAllLanes = 0xFFFFFFFF;
using Mask = uint32_t;  // one bit per lane

template <class T>
using Lanes = std::array<T, kLanes>;

using Half = _Float16;

// Rounds to odd, so that a second rounding to fewer bits gives the result of a single one.
inline float round_to_odd(double x) {
    float f = static_cast<float>(x);
    if (std::isnan(x) || static_cast<double>(f) == x) return f;
    if (std::fabs(static_cast<double>(f)) > std::fabs(x)) {
        f = std::bit_cast<float>(std::bit_cast<uint32_t>(f) - 1);
    }
    return std::bit_cast<float>(std::bit_cast<uint32_t>(f) | 1);
}

struct Bfloat {
    uint16_t bits;

    Bfloat() = default;
    explicit Bfloat(double x) : Bfloat(round_to_odd(x)) {}
    explicit Bfloat(float x) {
        const uint32_t b = std::bit_cast<uint32_t>(x);
        bits = std::isnan(x) ? 0x7FFF : static_cast<uint16_t>((b + 0x7FFF + ((b >> 16) & 1)) >> 16);
    }
    operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
};

// A float whose last 13 bits are ignored.
struct Tf32 {
    uint32_t bits;

    operator float() const { return std::bit_cast<float>(bits & 0xFFFFE000u); }
};

// 8-bit formats: E exponent bits, M mantissa bits; e5m2 has infinities, e4m3 only one NaN.
template <int E, int M>
struct Float8 {
    static constexpr int kBias = (1 << (E - 1)) - 1;
    static constexpr bool kInfinite = E == 5;
    static constexpr uint8_t kLargest = kInfinite ? 0x7B : 0x7E;
    uint8_t bits;

    Float8() = default;
    // Rounds to nearest even; saturates to the largest finite value (satfinite).
    explicit Float8(float x) {
        const uint8_t sign = std::signbit(x) ? 0x80 : 0;
        if (std::isnan(x)) {
            bits = 0x7F;
            return;
        }
        const float magnitude = std::fabs(x);
        if (std::isinf(x)) {
            bits = sign | kLargest;
            return;
        }
        int exponent = magnitude == 0 ? 1 - kBias : std::ilogb(magnitude);
        exponent = exponent < 1 - kBias ? 1 - kBias : exponent;
        // nearbyint rounds to even.
        const double steps =
            std::nearbyint(std::ldexp(static_cast<double>(magnitude), M - exponent));
        const double code = steps + std::ldexp(static_cast<double>(exponent + kBias - 1), M);
        bits = sign | static_cast<uint8_t>(code > kLargest ? kLargest : code);
    }
    operator float() const {
        const int exponent = (bits >> M) & ((1 << E) - 1), mantissa = bits & ((1 << M) - 1);
        const float sign = bits & 0x80 ? -1.0f : 1.0f;
        if (kInfinite && exponent == 31) {
            return mantissa ? std::numeric_limits<float>::quiet_NaN()
                            : sign * std::numeric_limits<float>::infinity();
        }
        if (!kInfinite && (bits & 0x7F) == 0x7F) return std::numeric_limits<float>::quiet_NaN();
        if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), 1 - kBias - M);
        return sign * std::ldexp(static_cast<float>(mantissa + (1 << M)), exponent - kBias - M);
    }
};

using Float8E4M3 = Float8<4, 3>;
using Float8E5M2 = Float8<5, 2>;

template <class T>
constexpr bool kIsFloat =
    std::is_floating_point_v<T> || std::is_same_v<T, Half> || std::is_same_v<T, Bfloat>;

// The type in which a format's arithmetic is exact enough to be rounded once.
template <class T>
using Wider = std::conditional_t<std::is_same_v<T, double>, double,
                                 std::conditional_t<std::is_same_v<T, float>, float, double>>;

template <size_t Bytes>
struct BitsOf;
template <>
struct BitsOf<1> {
    using type = uint8_t;
};
template <>
struct BitsOf<2> {
    using type = uint16_t;
};
template <>
struct BitsOf<4> {
    using type = uint32_t;
};
template <>
struct BitsOf<8> {
    using type = uint64_t;
};
template <class T, int E = 1>
using Bits = typename BitsOf<sizeof(T) * E>::type;

// Flushes subnormal numbers of the formats affected by .ftz to signed zeros.
inline float flush_subnormal(float x) {
    return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
}
inline Half flush_subnormal(Half x) {
    const auto wide = static_cast<float>(x);
    return std::fabs(wide) < 0x1p-14f ? static_cast<Half>(std::copysign(0.0f, wide)) : x;
}
template <class T>
T flushed(T x, bool flush) {
    if constexpr (std::is_same_v<T, float> || std::is_same_v<T, Half>) {
        return flush ? flush_subnormal(x) : x;
    }
    return x;
}

// NaN results have one bit pattern.
template <class T>
T canonical(T x) {
    if constexpr (std::is_same_v<T, float>) {
        return std::isnan(x) ? std::bit_cast<float>(0x7FFFFFFFu) : x;
    } else if constexpr (std::is_same_v<T, Half>) {
        return std::isnan(static_cast<float>(x)) ? std::bit_cast<Half>(uint16_t{0x7FFF}) : x;
    } else {
        return x;
    }
}

enum class Rounding { kNearest, kZero, kDown, kUp, kAway };

// Precision and range of a format.
struct Format {
    int digits, least_exponent;  // of normal numbers
    double largest;
};
template <class T>
constexpr Format kFormat{std::numeric_limits<T>::digits, std::numeric_limits<T>::min_exponent - 1,
                         std::numeric_limits<T>::max()};
template <>
inline constexpr Format kFormat<Half>{11, -14, 65504};
template <>
inline constexpr Format kFormat<Bfloat>{8, -126, 0x1.FEp127};

// Rounds to an integer. The significand has 64 bits, so that any number of PTX is exact.
inline long double to_integral(long double x, Rounding rounding) {
    switch (rounding) {
        case Rounding::kZero: return std::trunc(x);
        case Rounding::kDown: return std::floor(x);
        case Rounding::kUp: return std::ceil(x);
        case Rounding::kAway: return std::round(x);
        default: return std::nearbyint(x);
    }
}

// Rounds to a number of the format. Overflow results in infinity, or in the largest finite number,
// depending on the rounding direction.
inline double rounded_to(const Format& format, long double x, Rounding rounding) {
    if (x == 0 || !std::isfinite(x)) return static_cast<double>(x);
    const int exponent = std::max(std::ilogb(x), format.least_exponent) - format.digits + 1;
    const auto out = static_cast<double>(
        std::scalbn(to_integral(std::scalbn(x, -exponent), rounding), exponent));
    if (std::fabs(out) <= format.largest) return out;
    const bool inwards = rounding == Rounding::kZero || (rounding == Rounding::kDown && x > 0) ||
                         (rounding == Rounding::kUp && x < 0);
    const double limit = inwards ? format.largest : std::numeric_limits<double>::infinity();
    return std::copysign(limit, out);
}

}  // namespace ptx
