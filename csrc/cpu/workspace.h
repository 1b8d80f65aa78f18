// Scratch memory of a kernel. Its size is measured by a dry run, and it is allocated before the
// threads start, so that running out of memory raises an exception outside the parallel region.
#pragma once

#include <cstdint>
#include <new>
#include <type_traits>

#include "scratch.h"

namespace bfa::BFA_KERNELS {

// Allocates consecutive aligned pieces of one block of memory. With base 0 it only counts bytes.
class Arena {
public:
    explicit Arena(char* base) : base_(reinterpret_cast<uintptr_t>(base)) {}

    template <class T>
    T* take(int64_t count) {
        T* piece = reinterpret_cast<T*>(base_ + used_);
        used_ += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
        return piece;
    }

    // Constructs a T, whose constructor may take pieces too and whose destructor does nothing.
    // Returns null if this only counts bytes.
    template <class T, class... Arguments>
    T* make(Arguments&&... arguments) {
        static_assert(std::is_trivially_destructible_v<T>);
        T* piece = take<T>(1);
        if (base_) return new (piece) T(*this, arguments...);
        const T counted(*this, arguments...);
        return nullptr;
    }

    int64_t used() const { return used_; }

private:
    uintptr_t base_;
    int64_t used_ = 0;
};

// One Workspace per thread. Its constructor, called with (Arena&, const Problem&), only allocates.
template <class Workspace, class Problem>
class ThreadWorkspaces {
public:
    ThreadWorkspaces(const Problem& problem, int threads)
        : problem_(problem), bytes_(bytes_of(problem)), memory_(bytes_ * threads) {}

    Workspace make(int thread) const {
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
    const Scratch memory_;
};

}  // namespace bfa::BFA_KERNELS
