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
    // `elements` are those of all heads.
    SharedSum(int64_t heads, int64_t elements, int shares)
        : shares_(shares), sums_(shares > 1 ? elements : 0), turns_(shares > 1 ? heads : 0) {
        if (shares > 1) std::memset(turns_.data(), 0, heads * sizeof(int));
    }

    // Waits until the earlier shares have been added, adds `mine`, calls within_turn(), and leaves
    // the total in the last share's `mine`. The head's elements are those from begin to before end.
    // Where shares do not start in order, a thread waits for one that never comes.
    template <class Function>
    void add(int64_t head, int64_t begin, int64_t end, int share, Real* mine,
             Function within_turn) {
        if (shares_ == 1) return within_turn();
        int* turn = turns_.data() + head;
        while (__atomic_load_n(turn, __ATOMIC_ACQUIRE) != share) sched_yield();
        Real* sum = sums_.data() + begin;
        if (share > 0)
            for (int64_t x = 0; x < end - begin; ++x) mine[x] += sum[x];
        // Few heads are under way at a time, and only their sums should take memory.
        if (share < shares_ - 1) {
            std::memcpy(sum, mine, (end - begin) * sizeof(Real));
        } else {
            sums_.forget(begin, end);
        }
        within_turn();
        __atomic_store_n(turn, share + 1, __ATOMIC_RELEASE);
    }

private:
    const int shares_;
    const Buffer<Real> sums_;
    const Buffer<int> turns_;
};

}  // namespace bfa::BFA_ISA
