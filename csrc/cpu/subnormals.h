// Arithmetic on subnormal numbers is slow, and a decaying bias produces many subnormal weights.
#pragma once

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace bfa::BFA_KERNELS {

// During its lifetime, subnormal results in this thread are flushed to 0.
class FlushSubnormals {
#if defined(__SSE2__)
public:
    FlushSubnormals() { _mm_setcsr(saved_ | _MM_FLUSH_ZERO_ON); }
    ~FlushSubnormals() { _mm_setcsr(saved_); }
    FlushSubnormals(const FlushSubnormals&) = delete;
    FlushSubnormals& operator=(const FlushSubnormals&) = delete;

private:
    const unsigned saved_ = _mm_getcsr();
#endif
};

}  // namespace bfa::BFA_KERNELS
