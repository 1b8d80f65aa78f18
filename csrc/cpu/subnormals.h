// Numbers below the smallest normal one take the processor several times as long as others, and a
// decaying bias makes many of them: the weights just before those that are 0.
#pragma once

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace bfa::BFA_ISA {

// While it lives, results of this thread too small for a normal number are 0.
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

}  // namespace bfa::BFA_ISA
