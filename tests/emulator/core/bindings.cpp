// The emulator's core as a Python module.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "machine.h"
#include "tensor_map.h"

namespace py = pybind11;

namespace ptx {
namespace {

// Operands are passed as tuples, whose first entry is their kind.
Operand operand_of(const py::handle& given) {
    const auto tuple = py::cast<py::tuple>(given);
    const auto tag = py::cast<std::string>(tuple[0]);
    Operand o;
    const auto take_elements = [&](size_t from) {
        for (const auto& element : py::cast<py::sequence>(tuple[from]))
            o.elements.push_back(operand_of(element));
    };
    if (tag == "register") {
        o.kind = Operand::Kind::kRegister;
        o.number = py::cast<uint16_t>(tuple[1]);
        o.offset = py::cast<uint32_t>(tuple[2]);
        o.width = py::cast<uint16_t>(tuple[3]);
        o.negated = py::cast<bool>(tuple[4]);
    } else if (tag == "integer" || tag == "shared" || tag == "parameter" || tag == "target") {
        o.kind = tag == "integer"     ? Operand::Kind::kInteger
                 : tag == "shared"    ? Operand::Kind::kShared
                 : tag == "parameter" ? Operand::Kind::kParameter
                                      : Operand::Kind::kTarget;
        o.value = static_cast<int64_t>(py::cast<uint64_t>(tuple[1]));
    } else if (tag == "real") {
        o.kind = Operand::Kind::kReal;
        o.real = py::cast<double>(tuple[1]);
    } else if (tag == "special") {
        o.kind = Operand::Kind::kSpecial;
        o.special = py::cast<std::string>(tuple[1]);
    } else if (tag == "vector" || tag == "pair" || tag == "targets") {
        o.kind = tag == "vector" ? Operand::Kind::kVector
                 : tag == "pair" ? Operand::Kind::kPair
                                 : Operand::Kind::kTargets;
        take_elements(1);
    } else if (tag == "address") {
        o.kind = Operand::Kind::kAddress;
        take_elements(1);
        o.value = py::cast<int64_t>(tuple[2]);
    } else {
        o.kind = Operand::Kind::kSink;
    }
    return o;
}

void add_instruction(Program& program, std::vector<std::string> opcode, const py::object& guard,
                     const py::sequence& operands, int line) {
    Instruction i;
    i.opcode = std::move(opcode);
    if (!guard.is_none()) i.guard = operand_of(guard);
    for (const auto& one : operands) i.operands.push_back(operand_of(one));
    i.line = line;
    program.add(std::move(i));
}

Dim dim_of(const std::array<uint32_t, 3>& d) { return {d[0], d[1], d[2]}; }

using Row = std::array<uint64_t, 4>;

std::vector<Row> run(const Program& program, std::array<uint32_t, 3> grid,
                     std::array<uint32_t, 3> block, std::array<uint32_t, 3> cluster,
                     const std::vector<std::tuple<uint64_t, uint64_t, bool>>& memory,
                     const py::bytes& parameters, uint32_t shared_bytes, uint64_t seed,
                     uint64_t approximation_seed, std::optional<uint32_t> resident) {
    GlobalMemory global;
    for (auto [base, size, writable] : memory) global.add(base, size, writable);
    const auto given = std::string(parameters);
    std::vector<uint8_t> bytes(given.begin(), given.end());
    global.finish(program.global_granule_shift);
    Launch launch{program,
                  dim_of(grid),
                  dim_of(block),
                  dim_of(cluster),
                  global,
                  std::move(bytes),
                  shared_bytes,
                  seed,
                  approximation_seed,
                  resident,
                  std::vector<Count>(program.code.size())};
    {
        py::gil_scoped_release release;
        launch.run();
    }
    std::vector<Row> counts;
    for (const Count& c : launch.counts)
        counts.push_back({c.warps, c.lanes, c.shared_waves, c.sectors});
    return counts;
}

// Dimensions are in the order of PTX; enumerated fields have the numbers of tensormap.replace.
py::bytes tensor_map(uint64_t address, int element, const std::vector<uint32_t>& dims,
                     const std::vector<uint64_t>& strides, const std::vector<uint32_t>& box,
                     const std::vector<uint32_t>& element_strides, int swizzle, int fill) {
    TensorMap map;
    map.address = address;
    map.rank_less_one = static_cast<uint8_t>(dims.size() - 1);
    map.element = static_cast<uint8_t>(element);
    map.swizzle = static_cast<uint8_t>(swizzle);
    map.fill = static_cast<uint8_t>(fill);
    if (dims.empty() || dims.size() > kMaxRank || strides.size() + 1 != dims.size() ||
        box.size() != dims.size() || element_strides.size() != dims.size()) {
        throw py::value_error(
            "a tensor map has 1 to 5 dimensions, and a box and strides of as many");
    }
    std::copy(dims.begin(), dims.end(), map.dims.begin());
    std::copy(strides.begin(), strides.end(), map.strides.begin());
    std::copy(box.begin(), box.end(), map.box.begin());
    std::copy(element_strides.begin(), element_strides.end(), map.element_strides.begin());
    if (const std::string refusal = map.refusal(); !refusal.empty()) throw py::value_error(refusal);
    return py::bytes(reinterpret_cast<const char*>(&map), sizeof map);
}

}  // namespace
}  // namespace ptx

PYBIND11_MODULE(_core, m) {
    using namespace ptx;
    py::class_<Program>(m, "Program")
        .def(py::init<>())
        .def_readwrite("register_bytes", &Program::register_bytes)
        .def_readwrite("register_count", &Program::register_count)
        .def_readwrite("local_bytes", &Program::local_bytes)
        .def_readwrite("static_shared_bytes", &Program::static_shared_bytes)
        .def_readwrite("thread_registers", &Program::thread_registers)
        .def_readwrite("granule_shift", &Program::granule_shift)
        .def("add", add_instruction)
        .def("finish", &Program::finish);
    m.def("run", run);
    m.def("tensor_map", tensor_map);

    PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> violation;
    violation.call_once_and_store_result(
        [&] { return py::object(py::exception<Fault>(m, "Violation")); });
    py::register_exception_translator([](std::exception_ptr thrown) {
        try {
            if (thrown) std::rethrow_exception(thrown);
        } catch (const Fault& f) {
            const auto arguments = py::make_tuple(f.kind, f.message, f.instruction, f.block, f.warp,
                                                  f.lane, f.address);
            PyErr_SetObject(violation.get_stored().ptr(), arguments.ptr());
        }
    });
}
