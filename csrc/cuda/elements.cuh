// The element types of q, k and v.
#pragma once

#include "types.h"

namespace bfa::cuda {

// Both convert two numbers at once; the first one has the lower address.
struct Bfloat16 {
    uint16_t bits;

    __device__ float value() const { return __uint_as_float(uint32_t(bits) << 16); }
    static __device__ uint32_t pair(float first, float second) {
        uint32_t both;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
        return both;
    }
};

struct Float16 {
    uint16_t bits;

    __device__ float value() const {
        float x;
        asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
        return x;
    }
    static __device__ uint32_t pair(float first, float second) {
        uint32_t both;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
        return both;
    }
};

template <class T, class U>
constexpr bool kIsSame = false;
template <class T>
constexpr bool kIsSame<T, T> = true;

}  // namespace bfa::cuda
