// The order in which tasks of different cost start, and the number of parts they are divided into.
#pragma once

#include <cstdint>

namespace bfa {

struct Task {
    double cost;
    int64_t id;
};

// Sorts tasks by decreasing cost, so that the last ones to run, which bound the imbalance of
// dynamic scheduling, are short. The sort is stable.
void longest_first(Task* tasks, int64_t count);

// Returns the smallest number of equal parts per task, at most `max_parts`, for which threads are
// busy 90 % of the time, or else the best number. The tasks are sorted by longest_first.
int fewest_parts(const Task* tasks, int64_t count, int max_parts, int threads);

}  // namespace bfa
