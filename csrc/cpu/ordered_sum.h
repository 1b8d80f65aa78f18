// Sums the partial gradients of a head's partitions in a fixed order, for deterministic results.
#pragma once

#include <sched.h>

#include <cstdint>
#include <cstring>

#include "buffer.h"

namespace bfa::BFA_KERNELS {

template <class Real>
class OrderedSum {
public:
    // elements: the total number of elements of all heads.
    OrderedSum(int64_t heads, int64_t elements, int partitions)
        : partitions_(partitions),
          sums_(partitions > 1 ? elements : 0),
          turns_(partitions > 1 ? heads : 0) {
        if (partitions > 1) std::memset(turns_.data(), 0, heads * sizeof(int));
    }

    // Waits until the earlier partitions of the head have been added, adds `local`, and calls
    // in_order(). The total is in `local` of the last partition. The head has elements [begin,
    // end). Partitions must start in order, or a thread waits forever for an earlier one.
    void add(int64_t head, int64_t begin, int64_t end, int partition, Real* local) {
        add(head, begin, end, partition, local, [] {});
    }
    template <class Function>
    void add(int64_t head, int64_t begin, int64_t end, int partition, Real* local,
             Function in_order) {
        if (partitions_ == 1) return in_order();
        int* turn = turns_.data() + head;
        while (__atomic_load_n(turn, __ATOMIC_ACQUIRE) != partition) sched_yield();
        Real* sum = sums_.data() + begin;
        if (partition > 0)
            for (int64_t x = 0; x < end - begin; ++x) local[x] += sum[x];
        // Few heads are in progress at a time, and only their sums should occupy memory.
        if (partition == partitions_ - 1)
            sums_.discard(begin, end);
        else if (begin < end)  // memcpy takes no null pointers, even for no elements
            std::memcpy(sum, local, (end - begin) * sizeof(Real));
        in_order();
        __atomic_store_n(turn, partition + 1, __ATOMIC_RELEASE);
    }

private:
    const int partitions_;
    const Buffer<Real> sums_;
    const Buffer<int> turns_;
};

}  // namespace bfa::BFA_KERNELS
