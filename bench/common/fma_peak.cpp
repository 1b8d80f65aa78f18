// Prints the rate of fused multiply-adds of all cores of this machine, in GFLOP/s, for chains in
// registers without memory accesses. Usage: fma_peak THREADS
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX2__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif
typedef float Vector __attribute__((vector_size(kBytes)));

int main(int, char** argv) {
    constexpr int kChains = 12, kSteps = 1 << 22;
    const int threads = std::atoi(argv[1]);
    double best = 0;
    for (int repeat = 0; repeat < 20; ++repeat) {
        const auto start = std::chrono::steady_clock::now();
#pragma omp parallel num_threads(threads)
        {
            Vector sum[kChains] = {}, factor = Vector{} + 0.5f;
            for (int step = 0; step < kSteps; ++step)
#pragma GCC unroll 12
                for (int chain = 0; chain < kChains; ++chain) {
                    sum[chain] = sum[chain] * factor + factor;
                    asm volatile("" : "+v"(sum[chain]));  // prevents the removal of steps
                }
        }
        const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
        const double flops = 2.0 * threads * kSteps * kChains * (kBytes / sizeof(float));
        best = std::max(best, flops / seconds.count());
    }
    std::printf("%.1f\n", best / 1e9);
}
