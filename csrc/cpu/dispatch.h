// Which instruction sets the kernels were built for, and which of them runs.
#pragma once

#include <string>
#include <vector>

#include "../decode_problem.h"

namespace bfa {

struct InstructionSet {
    const char* name;
    bool supported;  // by this processor
    void (*forward)(const Forward&);
    void (*backward)(const Backward&);
    void (*trim)(const Trim&);
    void (*decode)(const Decode&);
};

// Everything this build contains, slowest first.
const std::vector<InstructionSet>& instruction_sets();

const InstructionSet& active_instruction_set();

// Throws std::invalid_argument when `name` was not built or this processor lacks it.
void use_instruction_set(const std::string& name);

}  // namespace bfa
