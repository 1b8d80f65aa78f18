#include "schedule.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <vector>

namespace bfa {

void longest_first(Task* tasks, int64_t count) {
    std::stable_sort(tasks, tasks + count,
                     [](const Task& a, const Task& b) { return a.cost > b.cost; });
}

// Returns the time at which the last thread finishes.
static double makespan(const Task* tasks, int64_t count, int parts, int threads) {
    using Times = std::vector<double>;
    std::priority_queue<double, Times, std::greater<double>> free_at(std::greater<double>(),
                                                                     Times(threads, 0.0));
    double last = 0;
    for (int64_t part = 0; part < count * parts; ++part) {
        const double done = free_at.top() + tasks[part / parts].cost / parts;
        free_at.pop(), free_at.push(done);
        last = std::max(last, done);
    }
    return last;
}

int fewest_parts(const Task* tasks, int64_t count, int max_parts, int threads) {
    double total = 0;
    for (int64_t x = 0; x < count; ++x) total += tasks[x].cost;
    int best = 1;
    double best_use = 0;
    for (int parts = 1; parts <= max_parts && best_use < 0.9; ++parts) {
        const double use = total / (threads * makespan(tasks, count, parts, threads));
        if (use > best_use) best = parts, best_use = use;
    }
    return best;
}

}  // namespace bfa
