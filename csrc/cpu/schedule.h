// In which order tasks of different cost are begun, and into how many parts they are cut.
#pragma once

#include <cstdint>

namespace bfa {

struct Task {
    double cost;
    int64_t id;
};

// Where the next free thread takes the next task, the last ones to be done should be short. Tasks
// of the same cost keep their order.
void longest_first(Task* tasks, int64_t count);

// The smallest number of equal parts of each task that keeps 9 of 10 threads busy, or the best of
// those up to `most`. The tasks are in the order of longest_first.
int fewest_parts(const Task* tasks, int64_t count, int most, int threads);

}  // namespace bfa
