// The backward pass, divided into tasks for the threads.
//
// A task is one key/value head or, where whole heads would leave threads idle, one of a few
// interleaved partitions of its key tiles. For each key tile it iterates over the blocks of queries
// that attend to the tile. grad_k and grad_v of the tile are accumulated in place, grad_q of the
// whole head in a private buffer.
#include <omp.h>

#include "backward_head.h"
#include "schedule.h"
#include "select_form.h"
#include "subnormals.h"

namespace bfa::BFA_KERNELS {
namespace {

// The key/value heads in the order of their cost, and the number of partitions of each.
struct Schedule {
    explicit Schedule(const Backward& problem)
        : heads(problem.batch * problem.kv_heads), order(heads) {
        const int64_t group = problem.heads / problem.kv_heads;
        for (int64_t b = 0; b < problem.batch; ++b) {
            const Backward sequence = sequence_problem(problem, b);
            Visibility visible(sequence);
            for (int64_t kv_head = 0; kv_head < problem.kv_heads; ++kv_head) {
                double pairs = 0;
                for (int64_t member = 0; member < group; ++member) {
                    visible.begin_head(b, kv_head * group + member);
                    pairs += visible.pairs({0, sequence.n_query});
                }
                const int64_t head = b * problem.kv_heads + kv_head;
                order.data()[head] = {pairs, head};
            }
        }
        longest_first(order.data(), heads);
        partitions = fewest_parts(order.data(), heads,
                                  int(std::min<int64_t>(problem.threads, tile_count(problem))),
                                  problem.threads);
    }

    const int64_t heads;
    const Buffer<Task> order;
    int partitions;
};

template <class Arithmetic, class Bias>
void run_backward(const Backward& problem) {
    using Head = BackwardHead<Arithmetic, Bias>;
    using Real = typename Arithmetic::Real;
    const Schedule schedule(problem);
    const int partitions = schedule.partitions;
    const int64_t tasks = schedule.heads * partitions;
    const int threads = int(std::min<int64_t>(problem.threads, tasks));
    const PartitionedBackward shared{problem, partitions};
    const ThreadWorkspaces<Head, PartitionedBackward> workspaces(shared, threads);
    const Buffer<int64_t> rows_before(problem.batch + 1);
    rows_before.data()[0] = 0;
    for (int64_t b = 0; b < problem.batch; ++b)
        rows_before.data()[b + 1] = rows_before.data()[b] + HeadQueries<Arithmetic>::padded(
                                                                sequence_at(problem, b).n_query);
    OrderedSum<Real> grad_query_sums(problem.batch * problem.heads,
                                     rows_before.data()[problem.batch] * problem.heads *
                                         round_up(problem.head_dim, kLanes<Real>),
                                     partitions);
    Arena counting(nullptr);
    OrderedSum<Real> form_sums(
        problem.batch * problem.heads,
        problem.batch * problem.heads * Head(counting, shared).form_sum_elements(), partitions);
    const PackedTableGradient<Real> tables(problem);
#pragma omp parallel num_threads(threads)
    {
        [[maybe_unused]] const FlushSubnormals flush_subnormals;
        Head head = workspaces.make(omp_get_thread_num());
#pragma omp for schedule(monotonic : dynamic, 1)
        for (int64_t task = 0; task < tasks; ++task) {
            const int64_t kv_head = schedule.order.data()[task / partitions].id;
            const int64_t b = kv_head / problem.kv_heads;
            head.run(b, kv_head % problem.kv_heads, int(task % partitions), rows_before.data()[b],
                     grad_query_sums, form_sums, tables);
        }
    }
    tables.add_up();
}

}  // namespace

void backward(const Backward& problem) {
    if (problem.batch == 0) return;
    select_tile_bias<BFA_ARITHMETIC>(problem, [&](auto bias) {
        run_backward<BFA_ARITHMETIC, typename decltype(bias)::type>(problem);
    });
}

}  // namespace bfa::BFA_KERNELS
