// The Python module `_C`. Python passes a problem's fields by name, and the kernels run on raw
// pointers. Python has validated the tensors, except for NaN and infinities.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "append.h"
#include "cpu/dispatch.h"
#include "cpu/scratch.h"
#include "fields.h"
#include "sequences.h"

namespace bfa {
namespace {

template <class Real>
void refuse_undefined(const Problem& problem, const FormTensor& tensor, int64_t b,
                      const TensorTraits& traits) {
    for (int64_t h = 0; h < (tensor.head_stride ? problem.heads : 1); ++h) {
        const Real* x = tensor.at<Real>(b, h);
        bool nan = false, infinite = false;
        for (int64_t n = 0; n < tensor.rows; ++n) {
            nan |= std::isnan(x[n]);
            infinite |= x[n] == std::numeric_limits<Real>::infinity();
        }
        const std::string values = std::string("bias: its ") + traits.name;
        if (nan) throw std::invalid_argument(values + " contain NaN");
        if (infinite && traits.refused == Refused::nan_and_infinity)
            throw std::invalid_argument(values +
                                        " contain inf; they must be finite, or -inf to hide keys");
    }
}

void refuse_undefined(const Problem& problem) {
    if (problem.heads == 0) return;
    for (int64_t b = 0; b < problem.batch; ++b) {
        const Problem one = sequence_problem(problem, b);
        for (int n = 0; n < kMaxFormTensors; ++n) {
            const FormTensor& tensor = one.form_tensors[n];
            const TensorTraits& traits = problem.form->tensors[n];
            const bool is_new = b == 0 || tensor.batch_stride != 0 || problem.sequences;
            if (!tensor.data || traits.refused == Refused::nothing || !is_new) continue;
            tensor.element == Element::float64 ? refuse_undefined<double>(one, tensor, b, traits)
                                               : refuse_undefined<float>(one, tensor, b, traits);
        }
    }
}

// The number of threads to use, at most `threads`: each must have more work than it costs to wake
// it, about 10 microseconds.
int worthwhile_threads(const Problem& problem, int threads) {
    constexpr double kMultiplicationsPerThread = 1 << 20;
    double pairs = 0;
    for (int64_t b = 0; b < problem.batch; ++b) {
        const Sequence rows = sequence_at(problem, b);
        pairs += double(rows.n_query) * double(std::min(rows.n_key, problem.window));
    }
    const double work = pairs * problem.heads * (problem.head_dim + problem.value_dim);
    return int(std::clamp<double>(work / kMultiplicationsPerThread, 1, threads));
}

// Reads what the fields of Python's Problem say; see problem.py.
void read_problem(const Fields& fields, Problem& problem) {
    const Described q = fields.tensor("q"), k = fields.tensor("k"), v = fields.tensor("v");
    problem.element = q.element();
    problem.form = &find_form(fields.get<std::string>("form").c_str());
    problem.batch = q.size(0);
    problem.heads = q.size(1);
    problem.kv_heads = k.size(1);
    problem.n_query = fields.get<int64_t>("n_query");
    problem.n_key = fields.get<int64_t>("n_key");
    problem.shift = fields.get<int64_t>("shift");
    problem.head_dim = q.size(3);
    problem.value_dim = v.size(3);
    problem.scale = fields.get<double>("scale");
    problem.causal = fields.get<bool>("causal");
    problem.window = problem.n_key + problem.shift;
    if (fields.has("window"))
        problem.window = std::min(problem.window, fields.get<int64_t>("window"));
    problem.threads = fields.get<int>("threads");
    problem.q = q.view();
    problem.k = k.view();
    problem.v = v.view();
    fields.form_tensors("form_tensors", problem.form_tensors);
    if (fields.has("rows")) {
        const Described rows = fields.tensor("rows");
        problem.sequences = rows.data<const Sequence>();
        problem.batch = rows.size(0);
    }
    if (fields.has("plan")) {  // (2, B, H, tiles)
        const Described plan = fields.tensor("plan");
        problem.first_key = problem.end_key = plan.view(1);
        problem.end_key.data += plan.stride(0);
    }
}

// The same, for a kernel that evaluates the form over rows of q and k.
void read_rows_problem(const Fields& fields, Problem& problem) {
    read_problem(fields, problem);
    problem.threads = worthwhile_threads(problem, problem.threads);
    refuse_undefined(problem);
}

void forward(const py::dict& values) {
    const Fields fields(values);
    Forward problem;
    read_rows_problem(fields, problem);
    problem.o = fields.view("o");
    problem.lse = fields.view("lse");
    problem.pivot = fields.view("pivot");
    problem.log_sum = fields.view("log_sum");
    py::gil_scoped_release release;
    active_instruction_set().kernels(problem.element).forward(problem);
}

void backward(const py::dict& values) {
    const Fields fields(values);
    Backward problem;
    read_rows_problem(fields, problem);
    problem.o = fields.view("o");
    problem.pivot = fields.view("pivot");
    problem.log_sum = fields.view("log_sum");
    problem.grad_o = fields.view("grad_o");
    problem.grad_lse = fields.view("grad_lse");
    problem.grad_q = fields.view("grad_q");
    problem.grad_k = fields.view("grad_k");
    problem.grad_v = fields.view("grad_v");
    fields.form_tensors("grad_form", problem.grad_form);
    py::gil_scoped_release release;
    active_instruction_set().kernels(problem.element).backward(problem);
}

void trim(const py::dict& values) {
    const Fields fields(values);
    Trim problem;
    read_rows_problem(fields, problem);
    problem.near = fields.view("near");
    problem.cut = fields.view("cut");
    problem.fraction = fields.get<double>("fraction");
    problem.reach = fields.get<int64_t>("reach");
    problem.from_end = fields.get<bool>("from_end");
    py::gil_scoped_release release;
    active_instruction_set().kernels(problem.element).trim(problem);
}

void decode(const py::dict& values) {
    const Fields fields(values);
    Decode problem;
    read_problem(fields, problem);
    const Described table = fields.tensor("block_table");
    problem.tolerance = fields.get<double>("tolerance");
    problem.page_size = fields.tensor("k").size(2);
    problem.columns = table.size(1);
    problem.lengths = fields.tensor("lengths").data<const int64_t>();
    problem.block_table = table.data<const int32_t>();
    problem.centres = fields.view("centres");
    problem.extents = fields.view("extents");
    problem.lowest = fields.view("lowest");
    problem.highest = fields.view("highest");
    problem.table_lowest = fields.view("table_lowest");
    problem.table_highest = fields.view("table_highest");
    problem.o = fields.view("o");
    problem.lse = fields.view("lse");
    py::gil_scoped_release release;
    active_instruction_set().kernels(problem.element).decode(problem);
}

void append(const py::dict& values) {
    const Fields fields(values);
    const Described pages = fields.tensor("pages"), rows = fields.tensor("rows"),
                    table = fields.tensor("block_table");
    Append problem;
    problem.batch = rows.size(0);
    problem.heads = rows.size(1);
    problem.tokens = rows.size(2);
    problem.row_bytes = rows.size(3) * rows.bytes();
    problem.page_size = pages.size(2);
    problem.columns = table.size(1);
    problem.lengths = fields.tensor("lengths").data<const int64_t>();
    problem.block_table = table.data<const int32_t>();
    problem.rows = rows.view();
    problem.pages = pages.view();
    append_rows(problem);
}

py::dict built_constants() {
    py::dict numbers;
#define BFA_CONSTANT(name) numbers[#name] = constants::name;
    BFA_EACH_CONSTANT(BFA_CONSTANT)
#undef BFA_CONSTANT
    return numbers;
}

std::vector<std::string> supported_instruction_sets() {
    std::vector<std::string> names;
    for (const auto& set : instruction_sets())
        if (set.supported) names.push_back(set.name);
    return names;
}

}  // namespace
}  // namespace bfa

PYBIND11_MODULE(_C, m) {
    m.doc() = "Attention kernels for CPUs; called through biased_flash_attn.backends.cpu";
    m.def("forward", &bfa::forward);
    m.def("backward", &bfa::backward);
    m.def("trim", &bfa::trim);
    m.def("decode", &bfa::decode);
    m.def("append", &bfa::append);
    m.def("constants", &bfa::built_constants,
          "Returns the constants of shared_constants.py at build time.");
    m.def("instruction_sets", &bfa::supported_instruction_sets,
          "Returns the instruction sets that were built and run on this processor, slowest first.");
    m.def(
        "instruction_set", [] { return std::string(bfa::active_instruction_set().name); },
        "Returns the instruction set in use.");
    m.def("use_instruction_set", &bfa::use_instruction_set, "Selects an instruction set by name.");
    m.def("release_memory", &bfa::release_scratch, "Returns cached scratch memory to the system.");
}
