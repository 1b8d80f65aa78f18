#include "dispatch.h"

#include <stdexcept>

namespace bfa {

#define BFA_DECLARE(build)                                                \
    namespace build {                                                     \
    void forward(const Forward&);                                         \
    void backward(const Backward&);                                       \
    void trim(const Trim&);                                               \
    void decode(const Decode&);                                           \
    static constexpr Kernels kernels = {forward, backward, trim, decode}; \
    }

BFA_DECLARE(portable_float64)
BFA_DECLARE(portable_float32)
#ifdef BFA_X86
BFA_DECLARE(avx2_float64)
BFA_DECLARE(avx2_float32)
BFA_DECLARE(avx512_float32)
BFA_DECLARE(avx512_bfloat16)

static bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("bmi2");
}
static bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd") &&
           __builtin_cpu_supports("avx512vl");
}
static bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
#endif
#undef BFA_DECLARE

const Kernels& InstructionSet::kernels(Element element) const {
    switch (element) {
        case Element::float64: return float64;
        case Element::bfloat16: return bfloat16;
        default: return float32;
    }
}

const std::vector<InstructionSet>& instruction_sets() {
    static const std::vector<InstructionSet> sets = {
        {"portable", true, portable_float64::kernels, portable_float32::kernels,
         portable_float32::kernels},
#ifdef BFA_X86
        {"avx2", has_avx2(), avx2_float64::kernels, avx2_float32::kernels, avx2_float32::kernels},
        {"avx512", has_avx512(), avx2_float64::kernels, avx512_float32::kernels,
         avx512_float32::kernels},
        {"avx512_bf16", has_avx512_bf16(), avx2_float64::kernels, avx512_float32::kernels,
         avx512_bfloat16::kernels},
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
