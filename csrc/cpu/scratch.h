// Scratch memory for one kernel call.
#pragma once

#include <cstdint>

namespace bfa {

// Uninitialized memory, aligned to at least 64 bytes. It is cached between calls, since the system
// clears new pages, which takes up to 10 % of a backward pass over a few thousand tokens.
class Scratch {
public:
    explicit Scratch(int64_t bytes);  // throws std::bad_alloc
    ~Scratch();
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;

    char* data() const { return data_; }

private:
    char* data_;
    bool kept_;
};

// Returns the cached memory to the system, unless a call is using it.
void release_scratch();

}  // namespace bfa
