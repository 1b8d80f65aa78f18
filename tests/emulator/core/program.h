// A kernel, as passed by the parser and as executed.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "numbers.h"

namespace ptx {

class Warp;
struct Instruction;

struct Operand {
    enum class Kind {
        kNone,
        kSink,       // `_`: the result is discarded
        kRegister,   // `offset` in the register file, `width` bits
        kInteger,    // `value` is the bits of an immediate
        kReal,       // `real`, of the instruction's type
        kSpecial,    // `special`
        kShared,     // an address of a shared variable: `value` within the block's shared memory
        kParameter,  // an address of a kernel parameter: `value` within the parameters
        kVector,     // `elements`
        kPair,       // a|b
        kAddress,    // elements[0] + value
        kTarget,     // `value` is an index of an instruction
        kTargets,    // `elements`
    };
    Kind kind = Kind::kNone;
    uint32_t offset = 0;
    uint16_t width = 0;
    uint16_t number = 0;   // of a register, dense
    bool negated = false;  // of a predicate
    int64_t value = 0;
    double real = 0;
    std::string special;
    std::vector<Operand> elements;
};

// The next instruction of the lanes that execute an instruction.
enum class Next { kFollowing, kAgain };

using Execute = Next (*)(Warp&, const Instruction&);

struct Instruction {
    std::vector<std::string> opcode;  // between the dots
    Operand guard;
    std::vector<Operand> operands;
    int line = 0;  // of the PTX text

    Execute execute = nullptr;
    bool is_branch = false, is_exit = false;
    bool is_uniform = false;  // a branch taken by all lanes or none
    // All living lanes of the warp must execute it together.
    bool is_aligned = false;
    bool is_visible = false;  // to other warps: the scheduler may interrupt here
    bool is_product = false;  // wgmma.mma_async
    // Uninitialized operands are no fault, but make the result uninitialized.
    bool passes_unknown = false;
    bool uses_wgmma_registers = false;
    // The modifiers; each decoder documents its use of `setting`.
    bool flush = false, saturate = false;
    Rounding rounding = Rounding::kNearest;
    std::array<int64_t, 6> setting{};
    std::vector<uint16_t> registers;  // those it reads or writes

    const Operand& operator[](size_t i) const { return operands[i]; }
    size_t size() const { return operands.size(); }
    std::string name() const;
};

// Reads the modifiers of an opcode one by one; remaining ones are unsupported.
class Modifiers {
public:
    explicit Modifiers(const std::vector<std::string>& parts)
        : rest_(parts.begin() + 1, parts.end()) {}

    bool take(const std::string& name);
    // Takes the first of these modifiers that is present, or returns "".
    std::string take_any(std::initializer_list<const char*> names);
    // Drops modifiers that are hints, scopes or defaults.
    void skip_hints();
    // Takes the last remaining modifier as a type.
    std::string type();
    std::string front() const { return rest_.empty() ? "" : rest_.front(); }
    std::string pop_front();
    bool has(const std::string& name) const;
    bool empty() const { return rest_.empty(); }

private:
    std::vector<std::string> rest_;
};

using Decoder = Execute (*)(Modifiers&, Instruction&);
using Decoders = std::map<std::string, Decoder>;

struct Program {
    std::string name;
    std::vector<Instruction> code;
    uint32_t register_bytes = 0;
    uint32_t register_count = 0;
    uint32_t local_bytes = 0;
    uint32_t static_shared_bytes = 0;
    uint32_t thread_registers = 0;  // that hardware gives a thread at first; 0 if not determined
    int granule_shift = 4;          // log2 of the smallest access to shared memory, in bytes
    int global_granule_shift = 4;   // the same of writes to global memory

    void add(Instruction instruction);
    // Called after the last instruction: finds the registers that asynchronous products use, and
    // those that no instruction writes.
    void finish();

    // Compilers use these if the value is irrelevant, as for an ignored half of a register.
    std::vector<Operand> never_written;

private:
    void find_never_written();
    void find_smallest_store();
};

// All decoders, by the first part of the opcode.
const Decoders& decoders();
void add_arithmetic(Decoders&);
void add_extremes(Decoders&);
void add_bitwise(Decoders&);
void add_conversions(Decoders&);
void add_approximations(Decoders&);
void add_memory(Decoders&);
void add_atomics(Decoders&);
void add_control(Decoders&);
void add_barriers(Decoders&);
void add_warp_exchanges(Decoders&);
void add_async_copies(Decoders&);
void add_bulk_copies(Decoders&);
void add_tensor_map_updates(Decoders&);
void add_clusters(Decoders&);
void add_matrix_loads(Decoders&);
void add_mma(Decoders&);
void add_wgmma(Decoders&);
void add_tcgen05(Decoders&);

// Calls f with a value of the C++ type for a PTX type, or returns nullptr.
template <class F>
Execute for_integer(const std::string& type, F f) {
    if (type == "u8" || type == "b8") return f(uint8_t{});
    if (type == "s8") return f(int8_t{});
    if (type == "u16" || type == "b16") return f(uint16_t{});
    if (type == "s16") return f(int16_t{});
    if (type == "u32" || type == "b32") return f(uint32_t{});
    if (type == "s32") return f(int32_t{});
    if (type == "u64" || type == "b64") return f(uint64_t{});
    if (type == "s64") return f(int64_t{});
    return nullptr;
}

// The second argument of f is the number of elements in a register.
template <class F>
Execute for_float(const std::string& type, F f) {
    using One = std::integral_constant<int, 1>;
    using Two = std::integral_constant<int, 2>;
    if (type == "f32") return f(float{}, One{});
    if (type == "f64") return f(double{}, One{});
    if (type == "f16") return f(Half{}, One{});
    if (type == "bf16") return f(Bfloat{}, One{});
    if (type == "f32x2") return f(float{}, Two{});
    if (type == "f16x2") return f(Half{}, Two{});
    if (type == "bf16x2") return f(Bfloat{}, Two{});
    return nullptr;
}

// Bytes of a PTX type; 0 if it is not a type.
int bytes_of(const std::string& type);

}  // namespace ptx
