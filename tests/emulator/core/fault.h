// Invalid operations of kernels.
#pragma once

#include <cstdint>
#include <exception>
#include <string>

namespace ptx {

struct Fault : std::exception {
    std::string kind, message;
    int instruction = -1;
    std::string block;
    int warp = -1, lane = -1;
    uint64_t address = 0;

    const char* what() const noexcept override { return message.c_str(); }
};

// Kinds of faults.
namespace kind {
constexpr const char* kRace = "race";
constexpr const char* kDeadlock = "deadlock";
constexpr const char* kUninitialized = "uninitialized";
constexpr const char* kOutOfBounds = "out of bounds";
constexpr const char* kMisaligned = "misaligned";
constexpr const char* kInFlight = "in flight";
constexpr const char* kDivergence = "divergence";
constexpr const char* kTrap = "trap";
constexpr const char* kUnsupported = "unsupported";
constexpr const char* kInvalid = "invalid";
}  // namespace kind

}  // namespace ptx
