#include "scratch.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <atomic>
#include <cstdlib>
#include <new>
#include <thread>

namespace bfa {
namespace {

constexpr int64_t kHugePage = 2 << 20;

// Longer sequences need more memory, but there the time to clear it is negligible. Under the
// address sanitizer nothing is cached, so that accesses beyond the memory of a call are detected.
#if defined(__SANITIZE_ADDRESS__)
constexpr int64_t kKeptBytesPerCore = 0;
#else
constexpr int64_t kKeptBytesPerCore = 16 << 20;
#endif

struct Kept {
    std::atomic_flag taken = ATOMIC_FLAG_INIT;
    char* data = nullptr;
    int64_t bytes = 0;
};
Kept kept;

void free_kept() {
    std::free(kept.data);
    kept.data = nullptr, kept.bytes = 0;
}

char* allocate(int64_t bytes) {
    const int64_t alignment = bytes < kHugePage ? 64 : kHugePage;
    const int64_t rounded = (bytes + alignment - 1) / alignment * alignment;
    auto* data = static_cast<char*>(std::aligned_alloc(alignment, rounded));
    if (!data) throw std::bad_alloc();
#if defined(__linux__)
    // With small pages, cache conflicts within a tile depend on the physical addresses.
    if (bytes >= kHugePage) madvise(data, rounded, MADV_HUGEPAGE);
#endif
    return data;
}

}  // namespace

// Of concurrent calls, one uses the cached memory and the others allocate.
Scratch::Scratch(int64_t bytes) {
    static const int64_t most = kKeptBytesPerCore * std::thread::hardware_concurrency();
    if (bytes > most) release_scratch();
    kept_ = bytes <= most && !kept.taken.test_and_set();
    if (!kept_) {
        data_ = allocate(bytes);
        return;
    }
    if (kept.bytes < bytes) {
        free_kept();
        try {
            kept.data = allocate(bytes);
        } catch (...) {
            kept.taken.clear();
            throw;
        }
        kept.bytes = bytes;
    }
    data_ = kept.data;
}

Scratch::~Scratch() { kept_ ? kept.taken.clear() : std::free(data_); }

void release_scratch() {
    if (kept.taken.test_and_set()) return;
    free_kept();
    kept.taken.clear();
}

}  // namespace bfa
