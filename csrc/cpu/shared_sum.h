// What several threads' shares of one head's gradient add up to, always in the same order.
#pragma once

#include <sched.h>

#include <cstdint>
#include <cstring>

#include "buffer.h"

namespace bfa::BFA_ISA {

template <class Real>
class SharedSum {
public:
    SharedSum(int64_t heads, int64_t elements, int shares)
        : shares_(shares),
          elements_(elements),
          sums_(shares > 1 ? heads * elements : 0),
          turns_(shares > 1 ? heads : 0) {
        if (shares > 1) std::memset(turns_.data(), 0, heads * sizeof(int));
    }

    // Waits until the earlier shares have been added, adds `mine`, calls within_turn(), and leaves
    // the total in the last share's `mine`. Where shares do not start in order, a thread waits for
    // one that never comes.
    template <class Function>
    void add(int64_t head, int share, Real* mine, Function within_turn) {
        if (shares_ == 1) return within_turn();
        int* turn = turns_.data() + head;
        while (__atomic_load_n(turn, __ATOMIC_ACQUIRE) != share) sched_yield();
        Real* sum = sums_.data() + head * elements_;
        if (share > 0)
            for (int64_t x = 0; x < elements_; ++x) mine[x] += sum[x];
        // Few heads are under way at a time, and only their sums should take memory.
        if (share < shares_ - 1) {
            std::memcpy(sum, mine, elements_ * sizeof(Real));
        } else {
            sums_.forget(head * elements_, (head + 1) * elements_);
        }
        within_turn();
        __atomic_store_n(turn, share + 1, __ATOMIC_RELEASE);
    }

private:
    const int shares_;
    const int64_t elements_;
    const Buffer<Real> sums_;
    const Buffer<int> turns_;
};

}  // namespace bfa::BFA_ISA
