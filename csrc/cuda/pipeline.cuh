// Tiles in shared memory, on their way from the warp that copies them to the groups that use them.
#pragma once

#include "ptx.cuh"

namespace bfa::cuda {

// A place in a ring of kStages stages, and the parity of the round.
template <int kStages>
struct Stage {
    int index = 0;
    uint32_t parity = 0;

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

// Hands the numbers of programs to the warps that compute them, and with a number possibly copies.
struct Mailbox {
    static constexpr int kNoMore = -1;

    Ring<1> ring;
    int number;

    // readers: arrivals after which the next number may be sent.
    __device__ void init(int readers) { ring.init(1, readers); }
    // bytes: those that are copied with the number; the copies arrive at the returned barrier.
    __device__ Barrier& send(int next, Stage<1> round, int bytes = 0) {
        ring.wait_until_empty(round);
        number = next;
        ring.full(round).arrive_expecting(bytes);
        return ring.full(round);
    }
    __device__ int receive(Stage<1> round) {
        ring.wait_until_full(round);
        return number;
    }
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
