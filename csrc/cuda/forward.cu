// Forward: o_i = sum_j exp(s_ij - lse_i) v_j and lse_i = log sum_j exp(s_ij).
//
// A thread block computes 128 or 192 queries of a head, 64 in each of its warp groups, and then
// takes the next ones: the last ones of all heads first or, with a plan, those with the most keys.
// One more group copies tiles of keys and values to shared memory, where all others read them:
//
//     for each key tile, the last one first:
//         s = bias / scale + q k^T
//         o = o + p v                     # p and v of the previous tile
//         p = online softmax of s         # while o is computed, and the other groups' products
//         o = rescaled o
#include "forms/cumulative.cuh"
#include "forms/distance.cuh"
#include "forms/linear.cuh"
#include "forms/none.cuh"
#include "forms/relative_queries.cuh"
#include "logits.cuh"
#include "output.cuh"
#include "tiles.cuh"
#include "warp_matrices.cuh"

namespace bfa::cuda {

template <class Tile>
struct Shared {
    using Element = typename Tile::Element;
    using Place = Stage<Tile::kStages>;
    // The outputs replace the queries.
    static constexpr int kPanels = maximum(Tile::kHeadDim, Tile::kValueDim) / kPanel;

    alignas(1024) Element queries[kPanels][Tile::kRows][kPanel];
    alignas(1024) Panels<Element, Tile::kHeadDim, Tile::kKeys> keys[Tile::kStages];
    alignas(1024) Panels<Element, Tile::kValueDim, Tile::kKeys> values[Tile::kStages];
    alignas(128) float numbers[Tile::kStages][Tile::kNumbers];  // see forms/form.cuh
    Mailbox for_groups[Tile::kGroups];                          // with the queries of each group
    Mailbox for_numbers;
    Barrier own_values;  // the last tile of values, before rows of other sequences are cleared
    Ring<Tile::kStages> key_ring, value_ring;

    __device__ void init(bool has_numbers) {
        constexpr int kWarps = Tile::kRows / 16;  // that compute
        for (Mailbox& group : for_groups) group.init(kGroupThreads / 32);
        for_numbers.init(1);
        own_values.init(1);
        key_ring.init(has_numbers ? 2 : 1, kWarps);
        value_ring.init(1, kWarps);
        fence_barrier_init();
    }
};

// Calls f with the queries of a program.
template <class Tile, class Function>
__device__ void with_block(const ForwardParams& params, int rank, Function f) {
    const Program program(params.problem, params.problem.heads, rank, params.programs);
    const Head head(params.problem, program.b, program.h);
    const Block block{params.problem, params.bias, head, program.block * Tile::kRows, Tile::kRows};
    f(block);
}

// The first warp of the producer group: distributes the work, and copies its tensors.
template <class Tile, class Form>
class Producer {
    static constexpr bool kHasNumbers = kStaged<Form, Tile::kKeys> > 0;

public:
    __device__ Producer(const ForwardParams& params, Shared<Tile>& shared, int lane)
        : params_(params), shared_(shared), lane_(lane), leads_(lane == 0) {}

    __device__ void run() {
        for (int rank = blockIdx.x; rank < params_.programs; rank = next_rank()) {
            with_block<Tile>(params_, rank, [&](const Block& block) {
                // A sequence may be shorter than others.
                if (block.first < block.head.n_query) produce(block, rank);
            });
        }
        if (!leads_) return;
        if (kHasNumbers) shared_.for_numbers.send(Mailbox::kNoMore, round_);
        for (Mailbox& group : shared_.for_groups) group.send(Mailbox::kNoMore, round_);
    }

private:
    __device__ int next_rank() const {
        if (!params_.tickets) return params_.programs;
        int ticket = 0;
        if (leads_) ticket = atomicAdd(params_.tickets, 1);
        return int(gridDim.x) + __shfl_sync(~0u, ticket, 0);
    }
    __device__ void produce(const Block& block, int rank) {
        const KeyTiles<Tile::kKeys> tiles(block);
        const int count = tiles.count;
        if (leads_ && kHasNumbers) shared_.for_numbers.send(rank, round_);
        // The first keys do not wait until the outputs of earlier queries have been stored.
        if (count > 0) copy_keys(block.head, tiles.first_key(count - 1));
        if (leads_) send_queries(block, rank, count > 0);
        round_.advance();
        // Keys are needed before the values of the previous tile.
        for (int n = count - 1; n >= 0; --n) {
            if (n > 0) copy_keys(block.head, tiles.first_key(n - 1));
            copy_values(block.head, tiles.first_key(n));
        }
    }
    __device__ void copy_keys(const Head& head, int j) {
        if (leads_) {
            auto& keys = shared_.keys[key_stage_.index];
            shared_.key_ring.wait_until_empty(key_stage_);
            Barrier& full = shared_.key_ring.full(key_stage_);
            full.arrive_expecting(sizeof(keys));
            copy_rows<Tile::kKeys>(keys, params_.k, full, head.first_key + j, head.kv_head,
                                   head.entry);
        }
        key_stage_.advance();
    }
    __device__ void send_queries(const Block& block, int rank, bool has_keys) {
        constexpr int kPanels = Tile::kHeadDim / kPanel;
        const Head& head = block.head;
        const int bytes = has_keys ? kPanels * kGroupRows * kRowBytes : 0;
        for (int group = 0; group < Tile::kGroups; ++group) {
            Barrier& full = shared_.for_groups[group].send(rank, round_, bytes);
            const int first = group * kGroupRows;
            for (int panel = 0; has_keys && panel < kPanels; ++panel) {
                copy_box(shared_.queries[panel][first], params_.q, full, panel * kPanel,
                         head.first_query + block.first + first, head.h, head.entry);
            }
        }
    }
    // The whole warp calls this.
    __device__ void copy_values(const Head& head, int j) {
        const auto stage = value_stage_;
        value_stage_.advance();
        auto& values = shared_.values[stage.index];
        // Rows after the end of a sequence may contain NaN, which a weight of 0 does not remove.
        const bool has_others = params_.problem.sequences && j + Tile::kKeys > head.n_key;
        if (leads_) {
            shared_.value_ring.wait_until_empty(stage);
            Barrier& full = has_others ? shared_.own_values : shared_.value_ring.full(stage);
            full.arrive_expecting(sizeof(values));
            copy_rows<Tile::kKeys>(values, params_.v, full, head.first_key + j, head.kv_head,
                                   head.entry);
        }
        __syncwarp();
        if (!has_others) return;
        shared_.own_values.wait(parity_);
        parity_ ^= 1;
        clear_rows(values, head.n_key - j, lane_);
        fence_async_proxy();
        __syncwarp();
        if (leads_) shared_.value_ring.full(stage).arrive();
    }

    const ForwardParams& params_;
    Shared<Tile>& shared_;
    const int lane_;
    const bool leads_;
    typename Shared<Tile>::Place key_stage_, value_stage_;
    Stage<1> round_;       // of the mailboxes
    uint32_t parity_ = 0;  // of `own_values`
};

// The second warp of the producer group: provides the form's numbers of each tile with its keys.
template <class Tile, class Form>
__device__ void stage_numbers(const ForwardParams& params, Shared<Tile>& shared, int lane) {
    typename Shared<Tile>::Place stage;
    shared.for_numbers.for_each(lane, [&] {
        with_block<Tile>(params, shared.for_numbers.rank(), [&](const Block& block) {
            const KeyTiles<Tile::kKeys> tiles(block);
            for (int n = tiles.count - 1; n >= 0; --n, stage.advance()) {
                const int j = tiles.first_key(n);
                float* numbers = shared.numbers[stage.index];
                shared.key_ring.wait_until_empty(stage);
                if constexpr (Form::kStarts) {
                    Form::template stage_start<Tile::kKeys>(block, j, numbers, lane);
                } else {
                    Form::template stage<Tile::kKeys>(block, j, numbers, lane);
                }
                __syncwarp();
                if (lane == 0) shared.key_ring.full(stage).arrive();
            }
        });
    });
}

// A warp group that computes its queries of every block.
template <class Tile, class Form>
class Consumer {
    using Element = typename Tile::Element;
    static constexpr int kKeys = Tile::kKeys;
    // Shared memory limits heads of 128 channels: products, copies and biases would need more than
    // its bandwidth. So products read these first channels of q from registers; more do not fit.
    static constexpr int kKept =
        Tile::kHeadDim == 128 && kKeys == 128 && !WarpQueries<Form, Element>::kExists ? 80 : 0;
    // Fragments of these channels.
    using Kept = uint32_t[maximum(1, kKept / 4)];
    static_assert(!WarpQueries<Form, Element>::kExists || Tile::kRows == kPlanQueries);

public:
    __device__ Consumer(const ForwardParams& params, Shared<Tile>& shared, Place place)
        : params_(params),
          shared_(shared),
          place_(place),
          leads_warp_(place.thread % 32 == 0),
          turns_(place.group) {}

    __device__ void run() {
        Mailbox& mailbox = shared_.for_groups[place_.group];
        mailbox.for_each(place_.thread % 32, [&] {
            with_block<Tile>(params_, mailbox.rank(), [&](const Block& block) { attend(block); });
            // The next queries are copied to where outputs were written.
            fence_async_proxy();
        });
        turns_.finish();
    }

private:
    __device__ void attend(const Block& block) {
        const KeyTiles<kKeys> tiles(block);
        Logits<Element, kKeys, Form, Form::kStarts> logits(block, place_);
        Softmax softmax;
        float s[kKeys / 2], o[Tile::kValueDim / 2], rescale[2];
        uint32_t p[kKeys / 4];
        Kept q = {};
#pragma unroll
        for (float& x : o) x = 0;

        const auto wait_for_keys = [&](auto stage) { shared_.key_ring.wait_until_full(stage); };
        const auto start = [&](int n) {
            if constexpr (Form::kStarts)
                logits.start(s, shared_.numbers[stage_.index], tiles.first_key(n));
        };
        const auto add_to_softmax = [&](int n) {
            logits.complete(s, shared_.numbers[stage_.index], tiles.first_key(n));
            __syncwarp();
            if (leads_warp_) shared_.key_ring.release(stage_);
            softmax.add(s, logits.multiplier, rescale);
            // The compiler would move the wait for o ahead of the softmax, but not of a loop.
            if (n > 0) wait_for_keys(stage_.following());
        };
        if (tiles.count > 0) {
            if constexpr (kKept > 0) {
                load_fragments(q, shared_.queries, place_.first_row_of_warp(), place_.thread % 32);
            }
            wait_for_keys(stage_);
            start(tiles.count - 1);
            turns_.wait();
            multiply_keys(s, q);
            turns_.pass();
            wait_products<0>(s);
            add_to_softmax(tiles.count - 1);
            round_to<Element>(p, s);
#pragma unroll 1
            for (int n = tiles.count - 2; n >= 0; --n) {
                const auto previous = stage_;
                stage_.advance();
                start(n);
                turns_.wait();
                multiply_keys(s, q);
                multiply_values(o, p, previous);
                turns_.pass();
                wait_products<1>(s);
                add_to_softmax(n);
                wait_products<0>(o, p);
                if (leads_warp_) shared_.value_ring.release(previous);
                multiply(o, rescale);
                round_to<Element>(p, s);
            }
            multiply_values(o, p, stage_);
            wait_products<0>(o, p);
            if (leads_warp_) shared_.value_ring.release(stage_);
            stage_.advance();
        }
        softmax.finish();
        store(block, softmax, o);
    }
    __device__ void multiply_keys(float (&s)[kKeys / 2], Kept& q) {
        const uint64_t keys = describe(shared_.keys[stage_.index]);
        if constexpr (kKept > 0) {
            fence_products(s, q);
            multiply_rows<Element, kKeys>(s, q, keys, Form::kStarts);
        } else {
            fence_products(s);
        }
        multiply_rows<Element, kKeys, Tile::kHeadDim, Tile::kRows, kKeys, kKept>(
            s, describe(shared_.queries[0][place_.group * kGroupRows]), keys,
            Form::kStarts || kKept > 0);
        commit_products();
    }
    __device__ void multiply_values(float (&o)[Tile::kValueDim / 2], uint32_t (&p)[kKeys / 4],
                                    typename Shared<Tile>::Place stage) {
        shared_.value_ring.wait_until_full(stage);
        fence_products(p, o);
        multiply_columns<Element, Tile::kValueDim, kKeys>(
            o, p, describe(shared_.values[stage.index], kKeys * kRowBytes), true);
        commit_products();
    }
    __device__ void store(const Block& block, const Softmax& softmax,
                          float (&o)[Tile::kValueDim / 2]) {
        const Place place{place_.group, int(thread_again()) % kGroupThreads};
        const float inverses[2] = {softmax.inverse(0), softmax.inverse(1)};
        multiply(o, inverses);
        const Head& head = block.head;
        const int first = head.first_query + block.first, count = head.n_query - block.first;
        store_rows(shared_.queries, o, {params_.o, head.b, head.h, first, count, params_.value_dim},
                   place);
        store_numbers(params_.lse.at(head.b, head.h, first), place, count,
                      [&](int r) { return softmax.lse(r); });
        store_numbers(params_.pivot.at(head.b, head.h, first), place, count,
                      [&](int r) { return softmax.pivot[r]; });
        store_numbers(params_.log_sum.at(head.b, head.h, first), place, count,
                      [&](int r) { return softmax.log_sum(r); });
    }

    const ForwardParams& params_;
    Shared<Tile>& shared_;
    const Place place_;
    const bool leads_warp_;
    Turns<Tile::kGroups> turns_;
    typename Shared<Tile>::Place stage_;
};

template <class Tile, class Form, int kSharedBytes>
__global__ void __launch_bounds__((1 + Tile::kGroups) * kGroupThreads, 1)
    attn_fwd_kernel(const __grid_constant__ ForwardParams params) {
    extern __shared__ __align__(1024) unsigned char memory[];
    static_assert(sizeof(Shared<Tile>) <= kSharedBytes);
    constexpr bool kHasNumbers = kStaged<Form, Tile::kKeys> > 0;
    static_assert(kStaged<Form, Tile::kKeys> <= Tile::kNumbers);
    auto& shared = *reinterpret_cast<Shared<Tile>*>(memory);

    if (threadIdx.x == 0) shared.init(kHasNumbers);
    __syncthreads();

    const int warp = __shfl_sync(~0u, int(threadIdx.x) / 32, 0), group = warp / 4;
    const int lane = int(threadIdx.x) % 32;
    if (group > 0) {
        claim_registers<kConsumerRegisters<Tile::kGroups>>();
        Consumer<Tile, Form>(params, shared, {group - 1, int(threadIdx.x) % kGroupThreads}).run();
        return;
    }
    release_registers<kProducerRegisters<Tile::kGroups>>();
    if (warp == 0) Producer<Tile, Form>(params, shared, lane).run();
    if constexpr (kHasNumbers) {
        if (warp == 1) stage_numbers<Tile, Form>(params, shared, lane);
    }
}

}  // namespace bfa::cuda
