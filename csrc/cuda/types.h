// The types of NVRTC programs, which have no standard headers, and the constants of all kernels.
#pragma once

namespace bfa::cuda {

using int32_t = int;
using int64_t = long long;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;

// Of shared_constants.py: compiler options.
constexpr int kPlanQueries = BFA_PLAN_QUERIES;
constexpr float kLargestSum = BFA_LARGEST_SUM;

}  // namespace bfa::cuda
