// Vectors of the widest registers of the instruction set this file is compiled for.
//
// Arithmetic uses the compilers' vector extensions (a * b + c contracts to a fused multiply-add);
// intrinsics are used only for operations that these extensions do not have. Everything is in a
// namespace named after the instruction set, so that the linker never mixes code of two builds.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX2__)
#pragma GCC diagnostic push  // GCC 12 warns about the undefined vectors in its own header
#pragma GCC diagnostic ignored "-Wuninitialized"
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#define BFA_INLINE inline __attribute__((always_inline))

namespace bfa::BFA_KERNELS {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <class T>
struct Simd {
    typedef T Vector __attribute__((vector_size(kVectorBytes)));
    typedef T Unaligned __attribute__((vector_size(kVectorBytes), aligned(alignof(T)), may_alias));
    static constexpr int lanes = kVectorBytes / sizeof(T);
};

template <class T>
using Vector = typename Simd<T>::Vector;

template <class T>
constexpr int kLanes = Simd<T>::lanes;

template <class T>
BFA_INLINE Vector<T> load(const T* p) {
    return *reinterpret_cast<const typename Simd<T>::Unaligned*>(p);
}

template <class T>
BFA_INLINE void store(T* p, Vector<T> x) {
    *reinterpret_cast<typename Simd<T>::Unaligned*>(p) = x;
}

template <class T>
BFA_INLINE Vector<T> broadcast(T x) {
    return x - Vector<T>{};
}

// 0, 1, 2, ...
template <class T>
BFA_INLINE Vector<T> iota() {
    Vector<T> x;
    for (int lane = 0; lane < kLanes<T>; ++lane) x[lane] = T(lane);
    return x;
}

// Returns a where a > b, else b: a NaN in b propagates, a NaN in a does not.
template <class T>
BFA_INLINE Vector<T> max(Vector<T> a, Vector<T> b) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4) return (Vector<T>)_mm512_max_ps((__m512)a, (__m512)b);
    return (Vector<T>)_mm512_max_pd((__m512d)a, (__m512d)b);
#elif defined(__AVX2__)
    if constexpr (sizeof(T) == 4) return (Vector<T>)_mm256_max_ps((__m256)a, (__m256)b);
    return (Vector<T>)_mm256_max_pd((__m256d)a, (__m256d)b);
#else
    return a > b ? a : b;
#endif
}

// The integer type of the same width as T.
template <class T>
using Bits = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;

template <class T>
BFA_INLINE Vector<T> abs(Vector<T> x) {
    return (Vector<T>)((Vector<Bits<T>>)x & ~(Vector<Bits<T>>)(-Vector<T>{}));
}

template <class T>
BFA_INLINE T reduce_max(Vector<T> x) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4) return _mm512_reduce_max_ps((__m512)x);
#endif
    T result = x[0];
    for (int lane = 1; lane < kLanes<T>; ++lane) result = x[lane] > result ? x[lane] : result;
    return result;
}

// Whether some lane is not in [lower, upper).
template <class T>
BFA_INLINE bool any_outside(Vector<T> x, Vector<T> lower, Vector<T> upper) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4)
        return _mm512_cmp_ps_mask((__m512)x, (__m512)lower, _CMP_LT_OQ) |
               _mm512_cmp_ps_mask((__m512)x, (__m512)upper, _CMP_GE_OQ);
#elif defined(__AVX2__)
    if constexpr (sizeof(T) == 4)
        return _mm256_movemask_ps(
            _mm256_or_ps(_mm256_cmp_ps((__m256)x, (__m256)lower, _CMP_LT_OQ),
                         _mm256_cmp_ps((__m256)x, (__m256)upper, _CMP_GE_OQ)));
#endif
    const Vector<Bits<T>> outside = (x < lower) | (x >= upper);
    Bits<T> any = 0;
    for (int lane = 0; lane < kLanes<T>; ++lane) any |= outside[lane];
    return any;
}

template <class T>
BFA_INLINE T reduce_sum(Vector<T> x) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4) return _mm512_reduce_add_ps((__m512)x);
#endif
    T result = x[0];
    for (int lane = 1; lane < kLanes<T>; ++lane) result += x[lane];
    return result;
}

// One step of a butterfly reduction. Lane n of the result is a[n] + a[n + kHalf] where bit kHalf of
// n is 0, and b[n] + b[n - kHalf] where it is 1.
template <int kHalf, class T, int... lane>
BFA_INLINE Vector<T> folded(Vector<T> a, Vector<T> b, std::integer_sequence<int, lane...>) {
    const Vector<T> own = {(lane & kHalf ? b : a)[lane]...};
    const Vector<T> swapped = {(lane & kHalf ? b : a)[lane ^ kHalf]...};
    return own + swapped;
}

// Reduces kLanes<T> consecutive vectors: lane n of the result is the sum of the lanes of vector n.
template <class T, int kHalf = kLanes<T> / 2>
BFA_INLINE Vector<T> sums_of_lanes(const T* vectors) {
    if constexpr (kHalf == 0) {
        return load(vectors);
    } else {
        return folded<kHalf, T>(sums_of_lanes<T, kHalf / 2>(vectors),
                                sums_of_lanes<T, kHalf / 2>(vectors + kHalf * kLanes<T>),
                                std::make_integer_sequence<int, kLanes<T>>());
    }
}

// One step of a transposition: exchanges the lanes of a where bit kHalf is 1 and those of b where
// it is 0.
template <int kHalf, class T, int... lane>
BFA_INLINE void exchange_lanes(Vector<T>& a, Vector<T>& b, std::integer_sequence<int, lane...>) {
    constexpr int kOther = kLanes<T> / kHalf;  // lane n of the second operand has index kLanes + n
    const Vector<T> first = a;
#if defined(__clang__)
    a = __builtin_shufflevector(first, b, ((lane & ~kHalf) + (lane & kHalf) * kOther)...);
    b = __builtin_shufflevector(first, b, ((lane | kHalf) + (lane & kHalf) * kOther)...);
#else
    a = __builtin_shuffle(first, b,
                          Vector<Bits<T>>{((lane & ~kHalf) + (lane & kHalf) * kOther)...});
    b = __builtin_shuffle(first, b, Vector<Bits<T>>{((lane | kHalf) + (lane & kHalf) * kOther)...});
#endif
}

template <class T, int kHalf = kLanes<T> / 2>
BFA_INLINE void transpose_square(Vector<T> (&rows)[kLanes<T>]) {
    if constexpr (kHalf > 0) {
#pragma GCC unroll 16
        for (int r = 0; r < kLanes<T>; ++r)
            if (!(r & kHalf))
                exchange_lanes<kHalf, T>(rows[r], rows[r + kHalf],
                                         std::make_integer_sequence<int, kLanes<T>>());
        transpose_square<T, kHalf / 2>(rows);
    }
}

}  // namespace bfa::BFA_KERNELS
