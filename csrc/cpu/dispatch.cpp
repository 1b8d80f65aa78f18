#include "dispatch.h"

#include <stdexcept>

namespace bfa {

#define BFA_DECLARE(isa)            \
    namespace isa {                 \
    void forward(const Forward&);   \
    void backward(const Backward&); \
    void trim(const Trim&);         \
    void decode(const Decode&);     \
    }

BFA_DECLARE(portable)
#ifdef BFA_HAVE_AVX2
BFA_DECLARE(avx2)
#endif
#ifdef BFA_HAVE_AVX512
BFA_DECLARE(avx512)
#endif
#ifdef BFA_HAVE_AVX512_BF16
BFA_DECLARE(avx512_bf16)
#endif
#undef BFA_DECLARE

#ifdef BFA_HAVE_AVX2
static bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("bmi2");
}
#endif
#if defined(BFA_HAVE_AVX512) || defined(BFA_HAVE_AVX512_BF16)
static bool has_avx512() {
    return __builtin_cpu_supports("fma") && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512vl");
}
#endif

const std::vector<InstructionSet>& instruction_sets() {
    static const std::vector<InstructionSet> sets = {
        {"portable", true, portable::forward, portable::backward, portable::trim, portable::decode},
#ifdef BFA_HAVE_AVX2
        {"avx2", has_avx2(), avx2::forward, avx2::backward, avx2::trim, avx2::decode},
#endif
#ifdef BFA_HAVE_AVX512
        {"avx512", has_avx512(), avx512::forward, avx512::backward, avx512::trim, avx512::decode},
#endif
#ifdef BFA_HAVE_AVX512_BF16
        {"avx512_bf16", has_avx512() && __builtin_cpu_supports("avx512bf16"), avx512_bf16::forward,
         avx512_bf16::backward, avx512_bf16::trim, avx512_bf16::decode},
#endif
    };
    return sets;
}

static const InstructionSet*& active() {
    static const InstructionSet* set = [] {
        const InstructionSet* best = nullptr;
        for (const auto& candidate : instruction_sets())
            if (candidate.supported) best = &candidate;
        return best;
    }();
    return set;
}

const InstructionSet& active_instruction_set() { return *active(); }

void use_instruction_set(const std::string& name) {
    std::string choices;
    for (const auto& candidate : instruction_sets()) {
        if (!candidate.supported) continue;
        if (name == candidate.name) {
            active() = &candidate;
            return;
        }
        choices += std::string(choices.empty() ? "" : ", ") + candidate.name;
    }
    throw std::invalid_argument("instruction set '" + name + "' cannot run here; choose from " +
                                choices);
}

}  // namespace bfa
