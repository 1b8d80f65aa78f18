// The Python module `_C`. Python passes addresses, strides and sizes by name, and the kernels run
// on raw pointers. Python has validated the tensors behind the addresses, except for NaN and
// infinities.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "append.h"
#include "cpu/dispatch.h"
#include "cpu/scratch.h"
#include "sequences.h"

namespace py = pybind11;

namespace bfa {
namespace {

Element element_of(const std::string& dtype) {
    if (dtype == "float64") return Element::float64;
    if (dtype == "float32") return Element::float32;
    if (dtype == "bfloat16") return Element::bfloat16;
    if (dtype == "float16") return Element::float16;
    throw std::invalid_argument("dtype is " + dtype +
                                "; it may be float64, float32, bfloat16 or float16");
}

// The named arguments from Python. finish() raises unless all of them were read, so that a
// misspelled name on either side is an error.
class Fields {
public:
    explicit Fields(const py::dict& values) : values_(values) {}

    template <class T>
    T take(const char* name) {
        return py::cast<T>(find(name));
    }

    template <class T>
    void take(const char* name, T& field) {
        field = take<T>(name);
    }

    template <class T>
    const T* take_address(const char* name) {
        return reinterpret_cast<const T*>(take<intptr_t>(name));
    }

    // Reads a tuple (address, batch stride, head stride, row stride), in elements, or None.
    View take_view(const char* name, int64_t item_bytes) {
        const py::handle x = find(name);
        return x.is_none() ? View() : view_of(x, item_bytes);
    }

    // Reads a list of such tuples, each extended by the number of rows, the channel stride, the
    // element type and the number of channels.
    void take_form_tensors(const char* name, FormTensor* tensors) {
        const py::handle given = find(name);
        const Py_ssize_t count = PyList_Size(given.ptr());
        if (count < 0) throw py::error_already_set();
        if (count > kMaxFormTensors) throw std::invalid_argument("too many tensors of a form");
        for (Py_ssize_t n = 0; n < count; ++n) {
            const py::handle x = PyList_GET_ITEM(given.ptr(), n);
            const Element element = element_of(py::cast<std::string>(item(x, 6)));
            const int64_t bytes = element_bytes(element);
            tensors[n] = {view_of(x, bytes), number(x, 4), number(x, 5) * bytes, element,
                          number(x, 7)};
        }
    }

    void finish() const {
        if (taken_ != values_.size()) throw py::type_error("unknown fields were passed");
    }

private:
    py::handle find(const char* name) {
        PyObject* value = PyDict_GetItemWithError(values_.ptr(), interned(name));
        if (!value) throw py::type_error(std::string("missing: ") + name);
        ++taken_;
        return value;
    }

    static py::handle item(py::handle tuple, Py_ssize_t n) {
        PyObject* x = PyTuple_GetItem(tuple.ptr(), n);
        if (!x) throw py::error_already_set();
        return x;
    }

    static int64_t number(py::handle tuple, Py_ssize_t n) {
        const int64_t x = PyLong_AsLongLong(item(tuple, n).ptr());
        if (x == -1 && PyErr_Occurred()) throw py::error_already_set();
        return x;
    }

    static View view_of(py::handle x, int64_t item_bytes) {
        return {reinterpret_cast<char*>(number(x, 0)), number(x, 1) * item_bytes,
                number(x, 2) * item_bytes, number(x, 3) * item_bytes};
    }

    // Names are literals; each is converted to a Python string once.
    static PyObject* interned(const char* name) {
        static std::unordered_map<const char*, PyObject*> strings;
        PyObject*& string = strings[name];
        if (!string) string = PyUnicode_InternFromString(name);
        return string;
    }

    const py::dict& values_;
    size_t taken_ = 0;
};

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

// Reads the arguments that all kernels have, including decoding.
void take_operands(Fields& fields, Problem& problem) {
    problem.element = element_of(fields.take<std::string>("element"));
    problem.form = &find_form(fields.take<std::string>("form").c_str());
    fields.take("batch", problem.batch);
    fields.take("heads", problem.heads);
    fields.take("kv_heads", problem.kv_heads);
    fields.take("n_query", problem.n_query);
    fields.take("head_dim", problem.head_dim);
    fields.take("value_dim", problem.value_dim);
    fields.take("scale", problem.scale);
    fields.take("window", problem.window);
    fields.take("threads", problem.threads);
    const int64_t element = element_bytes(problem.element);
    problem.q = fields.take_view("q", element);
    problem.k = fields.take_view("k", element);
    problem.v = fields.take_view("v", element);
    fields.take_form_tensors("form_tensors", problem.form_tensors);
}

void take_problem(Fields& fields, Problem& problem) {
    take_operands(fields, problem);
    fields.take("n_key", problem.n_key);
    fields.take("shift", problem.shift);
    fields.take("causal", problem.causal);
    problem.sequences = fields.take_address<Sequence>("sequences");
    problem.first_key = fields.take_view("first_key", sizeof(int32_t));
    problem.end_key = fields.take_view("end_key", sizeof(int32_t));
    problem.threads = worthwhile_threads(problem, problem.threads);
    refuse_undefined(problem);
}

void forward(const py::dict& values) {
    Fields fields(values);
    Forward problem;
    take_problem(fields, problem);
    problem.o = fields.take_view("o", element_bytes(problem.element));
    problem.lse = fields.take_view("lse", real_bytes(problem.element));
    fields.finish();
    py::gil_scoped_release release;
    active_instruction_set().kernels(problem.element).forward(problem);
}

void backward(const py::dict& values) {
    Fields fields(values);
    Backward problem;
    take_problem(fields, problem);
    const int64_t element = element_bytes(problem.element), real = real_bytes(problem.element);
    problem.o = fields.take_view("o", element);
    problem.lse = fields.take_view("lse", real);
    problem.grad_o = fields.take_view("grad_o", element);
    problem.grad_lse = fields.take_view("grad_lse", real);
    problem.grad_q = fields.take_view("grad_q", element);
    problem.grad_k = fields.take_view("grad_k", element);
    problem.grad_v = fields.take_view("grad_v", element);
    fields.take_form_tensors("grad_form", problem.grad_form);
    fields.finish();
    py::gil_scoped_release release;
    active_instruction_set().kernels(problem.element).backward(problem);
}

void trim(const py::dict& values) {
    Fields fields(values);
    Trim problem;
    take_problem(fields, problem);
    problem.near = fields.take_view("near", real_bytes(problem.element));
    problem.cut = fields.take_view("cut", sizeof(int32_t));
    fields.take("fraction", problem.fraction);
    fields.take("reach", problem.reach);
    fields.take("from_end", problem.from_end);
    fields.finish();
    py::gil_scoped_release release;
    active_instruction_set().kernels(problem.element).trim(problem);
}

void decode(const py::dict& values) {
    Fields fields(values);
    Decode problem;
    take_operands(fields, problem);
    fields.take("tolerance", problem.tolerance);
    fields.take("page_size", problem.page_size);
    fields.take("columns", problem.columns);
    problem.lengths = fields.take_address<int64_t>("lengths");
    problem.block_table = fields.take_address<int32_t>("block_table");
    const int64_t element = element_bytes(problem.element), real = real_bytes(problem.element);
    problem.centres = fields.take_view("centres", element);
    problem.extents = fields.take_view("extents", real);
    int64_t bound = real;  // bounds are as precise as what they bound
    for (const FormTensor& x : problem.form_tensors)
        bound = std::max(bound, element_bytes(x.element));
    problem.lowest = fields.take_view("lowest", bound);
    problem.highest = fields.take_view("highest", bound);
    problem.table_lowest = fields.take_view("table_lowest", real);
    problem.table_highest = fields.take_view("table_highest", real);
    problem.o = fields.take_view("o", element);
    problem.lse = fields.take_view("lse", real);
    fields.finish();
    py::gil_scoped_release release;
    active_instruction_set().kernels(problem.element).decode(problem);
}

void append(const py::dict& values) {
    Fields fields(values);
    Append problem;
    const int64_t item_bytes = fields.take<int64_t>("item_bytes");
    fields.take("batch", problem.batch);
    fields.take("heads", problem.heads);
    fields.take("tokens", problem.tokens);
    problem.row_bytes = fields.take<int64_t>("channels") * item_bytes;
    fields.take("page_size", problem.page_size);
    fields.take("columns", problem.columns);
    problem.lengths = fields.take_address<int64_t>("lengths");
    problem.block_table = fields.take_address<int32_t>("block_table");
    problem.rows = fields.take_view("rows", item_bytes);
    problem.pages = fields.take_view("pages", item_bytes);
    fields.finish();
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
