// Memory for one call, for translation units that are compiled for one instruction set.
#pragma once

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <cstdint>
#include <cstdlib>
#include <new>

namespace bfa::BFA_KERNELS {

// Standard containers are not used here: the linker might keep the copies of their functions that
// are compiled for this instruction set for all files, and other processors cannot run those.
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

    // Returns the pages within [begin, end) to the system. Their contents are undefined afterwards.
    void discard(int64_t begin, int64_t end) const {
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

}  // namespace bfa::BFA_KERNELS
