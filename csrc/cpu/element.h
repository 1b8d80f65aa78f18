// Converts rows of the four element types to and from the real type of a kernel.
#pragma once

#include <cstdint>
#include <cstring>

#include "../problem.h"
#include "simd.h"

namespace bfa::BFA_KERNELS {

struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

BFA_INLINE float bits_to_float(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

BFA_INLINE uint32_t float_to_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

BFA_INLINE float to_real(BFloat16 x) { return bits_to_float(uint32_t(x.bits) << 16); }

BFA_INLINE BFloat16 to_bfloat16(float x) {
    const uint32_t bits = float_to_bits(x);
    const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);  // to nearest, ties to even
    return {uint16_t((x == x ? rounded : bits | 0x400000) >> 16)};
}

BFA_INLINE float to_real(Float16 x) {
    const uint32_t sign = uint32_t(x.bits & 0x8000) << 16;
    const uint32_t magnitude = x.bits & 0x7fff;
    // Multiplying changes the exponent bias from 15 to 127, and normalizes subnormals.
    const float scaled = bits_to_float(magnitude << 13) * 0x1p112f;
    const uint32_t bits =
        magnitude >= 0x7c00 ? 0x7f800000 | (magnitude << 13) : float_to_bits(scaled);
    return bits_to_float(sign | bits);
}

BFA_INLINE Float16 to_float16(float x) {
    const uint32_t bits = float_to_bits(x);
    const uint32_t sign = (bits >> 16) & 0x8000;
    const uint32_t magnitude = bits & 0x7fffffff;
    uint32_t half;
    if (magnitude > 0x7f800000) {
        half = 0x7e00;
    } else if (magnitude >= 0x477ff000) {  // rounds past the largest finite half
        half = 0x7c00;
    } else if (magnitude < 0x38800000) {  // subnormal: adding 1/2 aligns the remaining bits
        half = float_to_bits(bits_to_float(magnitude) + 0.5f) - float_to_bits(0.5f);
    } else {
        half = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    }
    return {uint16_t(sign | half)};
}

BFA_INLINE float to_real(float x) { return x; }
BFA_INLINE double to_real(double x) { return x; }

BFA_INLINE void from_real(float x, BFloat16& y) { y = to_bfloat16(x); }
BFA_INLINE void from_real(float x, Float16& y) { y = to_float16(x); }
BFA_INLINE void from_real(float x, float& y) { y = x; }
BFA_INLINE void from_real(double x, double& y) { y = x; }

// Calls function(T()), where T is the C++ type of a runtime element type whose real type is Real.
template <class Real, class Function>
BFA_INLINE void with_element(Element element, Function function) {
    if constexpr (sizeof(Real) == 8) {
        function(double());
    } else {
        switch (element) {
            case Element::bfloat16: return function(BFloat16());
            case Element::float16: return function(Float16());
            default: return function(float());
        }
    }
}

template <class Real>
void read_row(Element element, const char* source, int64_t n, Real* target) {
    with_element<Real>(element, [&](auto type) {
        const auto* x = reinterpret_cast<const decltype(type)*>(source);
        for (int64_t c = 0; c < n; ++c) target[c] = to_real(x[c]);
    });
}

template <class Real>
void write_row(Element element, const Real* source, Real factor, int64_t n, char* target) {
    with_element<Real>(element, [&](auto type) {
        auto* y = reinterpret_cast<decltype(type)*>(target);
        for (int64_t c = 0; c < n; ++c) from_real(source[c] * factor, y[c]);
    });
}

// target += source.
template <class Real>
void add_row(Element element, const Real* source, int64_t n, char* target) {
    with_element<Real>(element, [&](auto type) {
        auto* y = reinterpret_cast<decltype(type)*>(target);
        for (int64_t c = 0; c < n; ++c) from_real(to_real(y[c]) + source[c], y[c]);
    });
}

}  // namespace bfa::BFA_KERNELS
