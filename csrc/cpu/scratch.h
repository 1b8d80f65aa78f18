// Memory for one call of a kernel.
#pragma once

#include <cstdint>

namespace bfa {

// Undefined contents at 64 bytes' alignment or more. What one call gave back is kept for the next:
// the system clears the pages it hands out, which for a backward pass over a few thousand tokens
// takes up to a tenth of its time.
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

}  // namespace bfa
