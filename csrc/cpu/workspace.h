// Scratch memory of a kernel: measured by a dry run and allocated before the threads start, so that
// running out of memory is an exception and never a crash inside a parallel region.
//
// No standard containers here: their functions would be compiled for this instruction set under
// names that other files share, and the linker might keep these copies for processors that lack it.
#pragma once

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace bfa::BFA_ISA {

template <class T>
class Buffer {
public:
    explicit Buffer(int64_t count) {
        if (count == 0) return;
        const int64_t bytes = count * int64_t(sizeof(T));
        const int64_t alignment = bytes < kHugePage ? 64 : kHugePage;
        const int64_t rounded = (bytes + alignment - 1) / alignment * alignment;
        data_ = static_cast<T*>(std::aligned_alloc(alignment, rounded));
        if (!data_) throw std::bad_alloc();
#if defined(__linux__)
        // Small pages lie anywhere, and in some processes so that a tile's evict one another.
        if (bytes >= kHugePage) madvise(data_, rounded, MADV_HUGEPAGE);
#endif
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
    static constexpr int64_t kHugePage = 2 << 20;

    T* data_ = nullptr;
};

// Hands out consecutive aligned pieces of one buffer; with base 0 it only counts.
class Arena {
public:
    explicit Arena(char* base) : base_(reinterpret_cast<uintptr_t>(base)) {}

    template <class T>
    T* take(int64_t count) {
        T* piece = reinterpret_cast<T*>(base_ + used_);
        used_ += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
        return piece;
    }

    int64_t used() const { return used_; }

private:
    uintptr_t base_;
    int64_t used_ = 0;
};

// One Workspace per thread: a class constructible from (Arena&, const Problem&) that there only
// takes memory.
template <class Workspace, class Problem>
class ThreadWorkspaces {
public:
    ThreadWorkspaces(const Problem& problem, int threads)
        : problem_(problem), bytes_(bytes_of(problem)), memory_(bytes_ * threads) {}

    Workspace of_thread(int thread) const {
        Arena arena(memory_.data() + bytes_ * thread);
        return Workspace(arena, problem_);
    }

private:
    static int64_t bytes_of(const Problem& problem) {
        Arena counting(nullptr);
        const Workspace counted(counting, problem);
        return counting.used();
    }

    const Problem& problem_;
    const int64_t bytes_;
    const Buffer<char> memory_;
};

}  // namespace bfa::BFA_ISA
