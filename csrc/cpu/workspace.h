// Scratch memory of a kernel: measured by a dry run and allocated before the threads start, so that
// running out of memory is an exception and never a crash inside a parallel region.
#pragma once

#include <cstdint>

#include "scratch.h"

namespace bfa::BFA_ISA {

// Hands out consecutive aligned pieces of one stretch of memory; with base 0 it only counts.
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
    const Scratch memory_;
};

}  // namespace bfa::BFA_ISA
