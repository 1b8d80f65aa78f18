// The instructions of Hopper that C++ has no words for, except matrix products (wgmma.cuh).
#pragma once

#include "params.h"

namespace bfa::cuda {

__device__ inline uint32_t shared_address(const void* x) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(x));
}

// An mbarrier: a phase ends when all expected arrivals and all expected bytes have arrived.
class Barrier {
public:
    __device__ void init(int arrivals) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(arrivals)
                     : "memory");
    }
    __device__ void arrive() {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
    }
    // Arrives, and lets the phase expect the bytes of copies as well.
    __device__ void arrive_expecting(int bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()),
                     "r"(bytes)
                     : "memory");
    }
    // Waits for the end of the phase of this parity; phases are counted from 0.
    __device__ void wait(uint32_t parity) {
        uint32_t is_over = 0;
        while (!is_over) {
            asm volatile(
                "{\n"
                ".reg .pred p;\n"
                "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                "selp.u32 %0, 1, 0, p;\n"
                "}"
                : "=r"(is_over)
                : "r"(address()), "r"(parity)
                : "memory");
        }
    }
    __device__ uint32_t address() const { return shared_address(&state_); }

private:
    uint64_t state_;
};

// Makes initialized mbarriers visible to the units that copy.
__device__ inline void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Orders writes of this thread to shared memory before later reads by matrix products and copies.
__device__ inline void fence_async_proxy() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Copies a box of a tensor to shared memory. The barrier receives its bytes, which include zeros
// for elements outside the tensor.
__device__ inline void copy_box(void* to, const TensorMap& map, Barrier& barrier, int channel,
                                int row, int head, int entry) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(to)),
        "l"(&map), "r"(barrier.address()), "r"(channel), "r"(row), "r"(head), "r"(entry)
        : "memory");
}

// Copies from shared to global memory; add_floats adds to what is there. Addresses are multiples of
// 16 bytes. A thread waits for its own copies that it has committed.
__device__ inline void store_bytes(void* to, const void* from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                 "r"(shared_address(from)), "r"(bytes)
                 : "memory");
}

__device__ inline void add_floats(void* to, const void* from, int bytes) {
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
        "r"(shared_address(from)), "r"(bytes)
        : "memory");
}

__device__ inline void commit_copies() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

__device__ inline void wait_until_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

__device__ inline void wait_until_written() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Orders accesses of this thread to global memory before its later copies.
__device__ inline void fence_copies() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Numbers by which blocks wait for each other.
__device__ inline int32_t load_acquire(const int32_t* x) {
    int32_t value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(x) : "memory");
    return value;
}

__device__ inline void store_release(int32_t* x, int32_t value) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(x), "r"(value) : "memory");
}

// Barriers of some of the block's warps. Number 0 is that of __syncthreads().
__device__ inline void barrier_sync(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

__device__ inline void barrier_arrive(int number, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Sets the registers of each thread of a warp group, which all of its warps must do together.
template <int kRegisters>
__device__ void release_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ void claim_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// threadIdx.x. Registers are scarce: the compiler is not to keep what follows from it.
__device__ inline uint32_t thread_again() {
    uint32_t thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

__device__ inline float exp2_approximate(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// log2(x), accurate to 2^-22 for x >= 1.
__device__ inline float log2_approximate(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// x within [-largest, largest], or NaN.
__device__ inline float limited(float x, float largest) {
    float y;
    asm("min.NaN.xorsign.abs.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(largest));
    return y;
}

}  // namespace bfa::cuda
