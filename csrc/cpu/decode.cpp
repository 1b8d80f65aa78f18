// Attention of a few new queries to a paged cache.
//
// The query heads that share a key head are rows of one block, so that keys and values are read
// once. Pass 1 adds the nearest keys of each block and selects the other tiles that cannot be
// skipped. Pass 2 divides these into parts, and all threads compute the softmax of each part. Pass
// 3 merges the parts of each block, always in the same order.
#include <omp.h>

#include "buffer.h"
#include "decode_block.h"
#include "subnormals.h"

namespace bfa::BFA_KERNELS {
namespace {

// Tiles per part at least, which amortizes merging it; and parts per thread, which balances the
// load.
constexpr int64_t kMinTiles = 8, kPartsPerThread = 16;
// Waking a thread and waiting for it costs as much as reading this many bytes.
constexpr int64_t kBytesPerThread = 256 << 10;

int worthwhile_threads(int64_t bytes, int threads) {
    return int(std::clamp<int64_t>(bytes / kBytesPerThread, 1, threads));
}

int worthwhile_threads(const Decode& p) {
    int64_t pairs = 0;
    for (int64_t b = 0; b < p.batch; ++b) pairs += std::min(p.lengths[b], p.window) * p.n_query;
    const int64_t bytes =
        pairs * p.kv_heads * (p.head_dim + p.value_dim) * element_bytes(p.element);
    return worthwhile_threads(bytes, p.threads);
}

// The blocks of queries; every key head of every sequence has the same number of them.
class Blocks {
public:
    explicit Blocks(const Decode& p)
        : p_(p),
          queries_(block_queries(p)),
          blocks_per_head_((p.n_query + queries_ - 1) / queries_),
          count_(p.batch * p.kv_heads * blocks_per_head_) {}

    int64_t count() const { return count_; }

    RowBlock operator[](int64_t block) const {
        const int64_t head = block / blocks_per_head_, first = block % blocks_per_head_ * queries_;
        return {p_, head / p_.kv_heads, head % p_.kv_heads,
                Range{first, std::min(first + queries_, p_.n_query)}};
    }

private:
    const Decode& p_;
    const int64_t queries_, blocks_per_head_, count_;
};

// The tiles [begin, end) of the list of a block.
struct Part {
    int64_t block, begin, end;
};

template <class Arithmetic>
class Softmaxes {
    using State = SoftmaxRows<Arithmetic>;

public:
    Softmaxes(int64_t count, int64_t rows, int64_t columns)
        : rows_(rows),
          columns_(columns),
          bytes_(bytes_of(rows, columns)),
          memory_(count * bytes_ + kAlignment) {}

    State operator[](int64_t n) const {
        const uintptr_t base = uintptr_t(memory_.data()) + kAlignment - 1;
        Arena arena(reinterpret_cast<char*>(base / kAlignment * kAlignment) + n * bytes_);
        return State::take(arena, rows_, columns_);
    }

    int64_t bytes() const { return bytes_; }  // per element

private:
    static constexpr int64_t kAlignment = 64;

    static int64_t bytes_of(int64_t rows, int64_t columns) {
        Arena counting(nullptr);
        State::take(counting, rows, columns);
        return counting.used();
    }

    const int64_t rows_, columns_, bytes_;
    const Buffer<char> memory_;
};

template <class Arithmetic>
class Decoding {
    using Block = DecodeBlock<Arithmetic>;
    using Real = typename Arithmetic::Real;
    using State = SoftmaxRows<Arithmetic>;

public:
    explicit Decoding(const Decode& problem)
        : p_(problem),
          threads_(worthwhile_threads(problem)),
          blocks_(problem),
          workspaces_(problem, threads_),
          near_(blocks_.count(), block_rows(problem), Block::columns(problem)),
          lists_(blocks_.count() + 1),
          counts_(blocks_.count()) {}

    void run() {
        lists_.data()[0] = 0;
        for (int64_t n = 0; n < blocks_.count(); ++n) {
            const Range tiles = blocks_[n].tiles(p_);
            lists_.data()[n + 1] = lists_.data()[n] + tiles.end - tiles.begin;
        }
        const Buffer<int32_t> tiles(lists_.data()[blocks_.count()]);
        for_each(blocks_.count(), threads_, [&](Block& block, int64_t n) {
            const RowBlock rows = blocks_[n];
            block.begin(rows);
            near_[n].clear(rows.rows);
            counts_.data()[n] = block.add_near(near_[n], tiles.data() + lists_.data()[n]);
        });

        int64_t total = 0;
        for (int64_t n = 0; n < blocks_.count(); ++n) total += counts_.data()[n];
        const int64_t tiles_per_part =
            std::max(kMinTiles, total / (threads_ * kPartsPerThread) + 1);
        const auto parts_of = [&](int64_t n) {
            return (counts_.data()[n] + tiles_per_part - 1) / tiles_per_part;
        };
        int64_t count = 0;
        const Buffer<int64_t> firsts(blocks_.count());  // the first part of each block
        for (int64_t n = 0; n < blocks_.count(); ++n)
            firsts.data()[n] = count, count += parts_of(n);
        const Buffer<Part> parts(count);
        const Softmaxes<Arithmetic> far(count, block_rows(p_), Block::columns(p_));
        Part* next = parts.data();
        for (int64_t n = 0; n < blocks_.count(); ++n)
            for (int64_t x = 0; x < parts_of(n); ++x, ++next)
                *next = {n, counts_.data()[n] * x / parts_of(n),
                         counts_.data()[n] * (x + 1) / parts_of(n)};
        for_each(count, threads_, [&](Block& block, int64_t n) {
            const Part part = parts.data()[n];
            const RowBlock rows = blocks_[part.block];
            const int32_t* list = tiles.data() + lists_.data()[part.block];
            block.begin(rows);
            far[n].clear(rows.rows);
            // Starts with the nearest tile, whose logits are usually the largest.
            for (int64_t x = part.end - 1; x >= part.begin; --x)
                block.add_tile(far[n], list[x],
                               x > part.begin ? block.prefetch_of(list[x - 1]) : Prefetch());
        });

        const int threads = worthwhile_threads((count + blocks_.count()) * near_.bytes(), threads_);
        for_each(blocks_.count(), threads, [&](Block&, int64_t n) {
            const RowBlock rows = blocks_[n];
            const int64_t first = firsts.data()[n];
            for (int r = 0; r < rows.rows; ++r) {
                for (int64_t x = 0; x < parts_of(n); ++x) merge(near_[n], far[first + x], r);
                near_[n].write_output(r, p_.element, p_.value_dim,
                                      p_.o.at(rows.b, rows.head(r), rows.query(r)));
                p_.lse.at<Real>(rows.b, rows.head(r))[rows.query(r)] = Real(near_[n].lse(r));
            }
        });
    }

private:
    template <class Function>
    void for_each(int64_t count, int threads, Function function) {
#pragma omp parallel num_threads(threads)
        {
            [[maybe_unused]] const FlushSubnormals flush_subnormals;
            Block block = workspaces_.make(omp_get_thread_num());
#pragma omp for schedule(dynamic, 1)
            for (int64_t n = 0; n < count; ++n) function(block, n);
        }
    }

    // Merges a row of `other` into the same row of `state`.
    static void merge(const State& state, const State& other, int row) {
        const Real pivot = std::max(state.pivots[row], other.pivots[row]);
        if (pivot == -State::kInfinity) return;
        state.move_pivot(row, pivot);
        other.move_pivot(row, pivot);
        for (int64_t c = 0; c < state.columns; ++c)
            state.outputs[row * state.columns + c] += other.outputs[row * state.columns + c];
        for (int c = 0; c < State::kLane; ++c)
            state.sums[row * State::kLane + c] += other.sums[row * State::kLane + c];
    }

    const Decode& p_;
    const int threads_;
    const Blocks blocks_;
    const ThreadWorkspaces<Block, Decode> workspaces_;
    const Softmaxes<Arithmetic> near_;
    const Buffer<int64_t> lists_, counts_;  // the start and length of each block's list of tiles
};

}  // namespace

void decode(const Decode& problem) {
    if (problem.batch == 0 || problem.n_query == 0) return;
    Decoding<BFA_ARITHMETIC>(problem).run();
}

}  // namespace bfa::BFA_KERNELS
