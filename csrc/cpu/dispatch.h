// The instruction sets that this library was built for, and the one in use.
#pragma once

#include <string>
#include <vector>

#include "../decode_problem.h"

namespace bfa {

// The kernels of one instruction set and one kind of arithmetic.
struct Kernels {
    void (*forward)(const Forward&);
    void (*backward)(const Backward&);
    void (*trim)(const Trim&);
    void (*decode)(const Decode&);
};

struct InstructionSet {
    const char* name;
    bool supported;  // by this processor
    Kernels float64, float32, bfloat16;

    const Kernels& kernels(Element element) const;
};

// Returns the instruction sets of this build, slowest first.
const std::vector<InstructionSet>& instruction_sets();

const InstructionSet& active_instruction_set();

// Throws std::invalid_argument when `name` was not built or this processor lacks it.
void use_instruction_set(const std::string& name);

}  // namespace bfa
