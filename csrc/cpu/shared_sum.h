// What several threads' shares of one head's gradient add up to, always in the same order.
#pragma once

#include <sched.h>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace bfa::BFA_ISA {

// No standard containers here: their functions would be compiled for this instruction set under
// names that other files share, and the linker might keep these copies for processors that lack it.
template <class T>
class Buffer {
public:
    explicit Buffer(int64_t count) {
        if (count == 0) return;
        data_ = static_cast<T*>(std::malloc(count * sizeof(T)));
        if (!data_) throw std::bad_alloc();
    }
    ~Buffer() { std::free(data_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    T* data() const { return data_; }

    // Lets the system take back the memory under [begin, end), whose contents are then undefined.
    void forget(int64_t begin, int64_t end) const {
#if defined(__linux__)
        const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
        const uintptr_t first = (uintptr_t(data_ + begin) + page - 1) / page * page;
        const uintptr_t last = uintptr_t(data_ + end) / page * page;
        if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
#endif
    }

private:
    T* data_ = nullptr;
};

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
