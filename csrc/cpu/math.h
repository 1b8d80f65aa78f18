// exp2 and log2 on vectors. The float versions use minimax polynomials on the stated intervals; the
// double versions, meant for gradient checks, call the C library for each lane.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "shared_constants.h"
#include "simd.h"

namespace bfa::BFA_KERNELS {

constexpr double kLog2e = 1.4426950408889634;
constexpr double kLn2 = 0.6931471805599453;

// The change of base of a natural logit, x log2(e). It saturates: finite logits stay finite, so
// that only -inf, which masks, has weight 0 in a row where all logits are low.
template <class T>
BFA_INLINE Vector<T> in_base_2(Vector<T> x) {
    constexpr T kMax = std::numeric_limits<T>::max();
    Vector<T> y = max<T>(broadcast(-kMax), x * T(kLog2e));
    y = y > kMax ? broadcast(kMax) : y;
    return abs<T>(x) > kMax ? x : y;
}

// The same in float64, rounded to T.
template <class T>
T in_base_2(double x) {
    constexpr double kMax = std::numeric_limits<T>::max();
    return T(std::isinf(x) ? x : std::clamp(x * kLog2e, -kMax, kMax));
}

// A slope or a gain, saturated.
template <class T>
T limited_gain(T gain) {
    return std::clamp(gain, T(-constants::LARGEST_GAIN), T(constants::LARGEST_GAIN));
}

typedef int32_t IntVector __attribute__((vector_size(kVectorBytes)));

template <int N>
BFA_INLINE Vector<float> polynomial(const float (&coefficients)[N], Vector<float> x) {
    Vector<float> y = broadcast(coefficients[N - 1]);
#pragma GCC unroll 8
    for (int k = N - 2; k >= 0; --k) y = y * x + coefficients[k];
    return y;
}

BFA_INLINE Vector<float> round_to_nearest(Vector<float> x) {
#if defined(__AVX512F__)
    return (Vector<float>)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__AVX2__)
    return (Vector<float>)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    return (x + kShift) - kShift;
#endif
}

// y * 2^n for integers n >= -127; 2^-127 is taken as 0.
BFA_INLINE Vector<float> scale_by_power(Vector<float> y, Vector<float> n) {
    return y * (Vector<float>)((__builtin_convertvector(n, IntVector) + 127) << 23);
}

// 2^x with relative error 9.1e-8, or 1.0e-4 if kApproximate, which is a fortieth of the rounding
// error of a bfloat16. exp2(0) = 1, exp2(-inf) = 0, exp2(NaN) = NaN.
template <bool kApproximate = false>
BFA_INLINE Vector<float> exp2(Vector<float> x) {
    // minimax fits of 2^f on [-1/2, 1/2], exact at 0
    constexpr float kHighDegree[] = {1.0000000000e+00f, 6.9314700365e-01f, 2.4022242427e-01f,
                                     5.5507335812e-02f, 9.6715129912e-03f, 1.3264727313e-03f};
    constexpr float kLowDegree[] = {1.0000000000e+00f, 6.9328290224e-01f, 2.4221096933e-01f,
                                    5.5008932948e-02f};
#if !defined(__AVX512F__)
    x = max<float>(broadcast(-127.0f), x);
    x = x > 128.0f ? broadcast(128.0f) : x;
#endif
    const Vector<float> n = round_to_nearest(x);
    const Vector<float> f = x - n;
    Vector<float> y;
    if constexpr (kApproximate) {
        y = polynomial(kLowDegree, f);
    } else {
        y = polynomial(kHighDegree, f);
    }
#if defined(__AVX512F__)
    // x = -inf leads to (NaN, -inf), which vscalefps maps to 0
    return (Vector<float>)_mm512_scalef_ps((__m512)y, (__m512)n);
#else
    return scale_by_power(y, n);
#endif
}

template <bool kApproximate = false>
BFA_INLINE Vector<double> exp2(Vector<double> x) {
    for (int lane = 0; lane < kLanes<double>; ++lane) x[lane] = std::exp2(x[lane]);
    return x;
}

// log2(1 + x) for x >= 0, absolute error 1e-7 times max(1, result).
BFA_INLINE Vector<float> log2_1p(Vector<float> x) {
    // fit of log2(1 + t) / t on [sqrt(1/2) - 1, sqrt(2) - 1]
    constexpr float kFit[] = {1.4426950216e+0f,  -7.2134733200e-1f, 4.8091062903e-1f,
                              -3.6070367694e-1f, 2.8791624308e-1f,  -2.3894481361e-1f,
                              2.1571564674e-1f,  -2.0726978779e-1f, 1.2583696842e-1f};
    constexpr int32_t kSqrtHalf = 0x3f3504f3;
    const IntVector bits = (IntVector)(x + 1.0f);
    const IntVector exponent =
        (bits - kSqrtHalf) >> 23;  // 1 + x = m * 2^exponent, m in [sqrt(1/2), sqrt(2))
    const Vector<float> t = (Vector<float>)(bits - (exponent << 23)) - 1.0f;
    const Vector<float> y =
        polynomial(kFit, t) * t + __builtin_convertvector(exponent, Vector<float>);
    return x < std::numeric_limits<float>::infinity() ? y : x;  // infinity and NaN pass through
}

BFA_INLINE Vector<double> log2_1p(Vector<double> x) {
    for (int lane = 0; lane < kLanes<double>; ++lane) x[lane] = std::log1p(x[lane]) * kLog2e;
    return x;
}

}  // namespace bfa::BFA_KERNELS
