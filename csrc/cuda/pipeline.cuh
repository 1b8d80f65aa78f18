// Tiles in shared memory, on their way from the warp that copies them to the groups that use them.
#pragma once

#include "ptx.cuh"

namespace bfa::cuda {

// A place in a ring of kStages stages, and the parity of the round.
template <int kStages>
struct Stage {
    int index = 0;
    uint32_t parity = 0;

    // That of tile n.
    static __device__ Stage of(int n) {
        Stage stage;
        stage.index = n % kStages, stage.parity = n / kStages & 1;
        return stage;
    }
    __device__ void advance() {
        index = index + 1 == kStages ? 0 : index + 1;
        parity ^= index == 0;
    }
    __device__ Stage following() const {
        Stage next = *this;
        next.advance();
        return next;
    }
};

// Hands tiles from a producer to consumers, in the order of stages.
template <int kStages>
class Ring {
public:
    using Place = Stage<kStages>;

    // producers: arrivals that fill a stage; consumers: arrivals that empty it.
    __device__ void init(int producers, int consumers) {
        for (int n = 0; n < kStages; ++n) full_[n].init(producers), empty_[n].init(consumers);
    }
    // For the producer: waits until the stage is empty. The phase before the first one of a new
    // barrier counts as over.
    __device__ void wait_until_empty(Place stage) { empty_[stage.index].wait(stage.parity ^ 1); }
    __device__ Barrier& full(Place stage) { return full_[stage.index]; }
    // For a consumer.
    __device__ void wait_until_full(Place stage) { full_[stage.index].wait(stage.parity); }
    // For one thread of a consumer that has finished reading the stage.
    __device__ void release(Place stage) { empty_[stage.index].arrive(); }

private:
    Barrier full_[kStages], empty_[kStages];
};

// Hands the ranks of programs to the warps that compute them, and with each possibly copies.
class Mailbox {
public:
    static constexpr int kNoMore = -1;

    // readers: the warps that call for_each.
    __device__ void init(int readers) { ring_.init(1, readers); }
    // For the producer. bytes: of copies that arrive at the returned barrier.
    __device__ Barrier& send(int rank, Stage<1> round, int bytes = 0) {
        ring_.wait_until_empty(round);
        rank_ = rank;
        ring_.full(round).arrive_expecting(bytes);
        return ring_.full(round);
    }
    // Calls f for each rank until there are no more.
    template <class Function>
    __device__ void for_each(int lane, Function f) {
        for (Stage<1> round;; round.advance()) {
            ring_.wait_until_full(round);
            if (rank() == kNoMore) return;
            f();
            __syncwarp();
            if (lane == 0) ring_.release(round);
        }
    }
    // The one that f is called for. From one lane, so that the compiler knows that all have it.
    __device__ int rank() const { return __shfl_sync(~0u, rank_, 0); }

private:
    Ring<1> ring_;
    int rank_;
};

// Warp groups that take turns in issuing matrix products, so that the softmax of one coincides with
// the products of the others. Each passes the turn as often as it waits for it, and the last one,
// which passes the first turn, has passed one more at the end.
template <int kGroups>
class Turns {
public:
    __device__ explicit Turns(int group) : group_(group) {
        if (group_ == kGroups - 1) pass();
    }
    __device__ void wait() { barrier_sync(1 + group_, 2 * 128); }
    __device__ void pass() { barrier_arrive(1 + (group_ + 1) % kGroups, 2 * 128); }
    // Accepts the turn that nobody takes any more.
    __device__ void finish() {
        if (group_ == 0) wait();
    }

private:
    int group_;
};

}  // namespace bfa::cuda
