// The Python module `_C`: addresses, strides and sizes in, kernels on raw pointers out. What the
// tensors behind the addresses may be is checked in Python before; only NaN is looked for here.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <stdexcept>
#include <string>

#include "cpu/dispatch.h"
#include "cpu/scratch.h"
#include "sequences.h"

namespace py = pybind11;

namespace bfa {
namespace {

// address, then the batch, head and sequence strides in elements
using Tensor = std::array<int64_t, 4>;
using Sizes = std::array<int64_t, 8>;

View view(const Tensor& tensor, int64_t item_bytes) {
    return {reinterpret_cast<char*>(tensor[0]), tensor[1] * item_bytes, tensor[2] * item_bytes,
            tensor[3] * item_bytes};
}

View view(const std::optional<Tensor>& tensor, int64_t item_bytes) {
    return tensor ? view(*tensor, item_bytes) : View();
}

Element element_of(const std::string& dtype) {
    if (dtype == "float64") return Element::float64;
    if (dtype == "float32") return Element::float32;
    if (dtype == "bfloat16") return Element::bfloat16;
    if (dtype == "float16") return Element::float16;
    throw std::invalid_argument("dtype is " + dtype +
                                "; it may be float64, float32, bfloat16 or float16");
}

Form form_of(const std::string& form) {
    if (form == "none") return Form::none;
    if (form == "linear") return Form::linear;
    if (form == "distance") return Form::distance;
    if (form == "cumulative") return Form::cumulative;
    if (form == "log1p_square") return Form::log1p_square;
    throw std::invalid_argument("form is " + form +
                                "; it may be none, linear, distance, cumulative or log1p_square");
}

struct ItemBytes {
    int64_t element, real, terms;

    explicit ItemBytes(const Problem& problem)
        : element(problem.element == Element::float64   ? 8
                  : problem.element == Element::float32 ? 4
                                                        : 2),
          real(problem.element == Element::float64 ? 8 : 4),
          terms(problem.form == Form::cumulative || problem.form == Form::log1p_square ? 8 : real) {
    }
};

template <class Real>
void refuse_nan(const Problem& problem, const View& values, int64_t b, int64_t length,
                const char* what) {
    for (int64_t h = 0; h < (values.head ? problem.heads : 1); ++h) {
        const Real* x = values.at<Real>(b, h);
        bool nan = false;
        for (int64_t n = 0; n < length; ++n) nan |= std::isnan(x[n]);
        if (nan) throw std::invalid_argument(std::string("bias: its ") + what + " contain NaN");
    }
}

void refuse_nan(const Problem& problem, const ItemBytes& bytes) {
    if (problem.heads == 0) return;
    const char* what = problem.form == Form::linear     ? "slopes"
                       : problem.form == Form::distance ? "table values"
                                                        : "steps";
    for (int64_t b = 0; b < problem.batch; ++b) {
        const Problem one = of_sequence(problem, b);
        const auto is_new = [&](const View& values) {
            return values.data && (b == 0 || values.batch != 0 || problem.sequences);
        };
        if (is_new(one.terms)) {
            if (bytes.terms == 8) refuse_nan<double>(one, one.terms, b, one.n_terms, what);
            if (bytes.terms == 4) refuse_nan<float>(one, one.terms, b, one.n_terms, what);
        }
        if (is_new(one.gain)) {
            if (bytes.real == 8) refuse_nan<double>(one, one.gain, b, one.n_query, "gains");
            if (bytes.real == 4) refuse_nan<float>(one, one.gain, b, one.n_query, "gains");
        }
    }
}

// At most `threads`, but none for less work than waking it costs, some 10 microseconds.
int worthwhile_threads(const Problem& problem, int threads) {
    constexpr double kMultiplicationsPerThread = 1 << 20;
    double pairs = 0;
    for (int64_t b = 0; b < problem.batch; ++b) {
        const Sequence rows = rows_of(problem, b);
        pairs += double(rows.n_query) * double(std::min(rows.n_key, problem.window));
    }
    const double work = pairs * problem.heads * (problem.head_dim + problem.value_dim);
    return int(std::clamp<double>(work / kMultiplicationsPerThread, 1, threads));
}

void fill(Problem& problem, const std::string& dtype, const std::string& form, const Sizes& sizes,
          int64_t sequences, double scale, bool causal, int64_t window, int threads,
          const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& terms,
          int64_t n_terms, const std::optional<Tensor>& gain,
          const std::optional<Tensor>& first_key, const std::optional<Tensor>& end_key) {
    problem.element = element_of(dtype);
    problem.form = form_of(form);
    problem.batch = sizes[0], problem.heads = sizes[1], problem.kv_heads = sizes[2];
    problem.n_query = sizes[3], problem.n_key = sizes[4];
    problem.head_dim = sizes[5], problem.value_dim = sizes[6], problem.shift = sizes[7];
    problem.sequences = reinterpret_cast<const Sequence*>(sequences);
    problem.scale = scale, problem.causal = causal, problem.window = window;
    problem.n_terms = n_terms;
    problem.threads = worthwhile_threads(problem, threads);
    const ItemBytes bytes(problem);
    problem.q = view(q, bytes.element), problem.k = view(k, bytes.element),
    problem.v = view(v, bytes.element);
    problem.terms = view(terms, bytes.terms), problem.gain = view(gain, bytes.real);
    problem.first_key = view(first_key, sizeof(int32_t));
    problem.end_key = view(end_key, sizeof(int32_t));
    refuse_nan(problem, bytes);
}

void forward(const std::string& dtype, const std::string& form, const Sizes& sizes,
             int64_t sequences, double scale, bool causal, int64_t window, int threads,
             const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& terms,
             int64_t n_terms, const std::optional<Tensor>& gain,
             const std::optional<Tensor>& first_key, const std::optional<Tensor>& end_key,
             const Tensor& o, const Tensor& lse) {
    Forward problem;
    fill(problem, dtype, form, sizes, sequences, scale, causal, window, threads, q, k, v, terms,
         n_terms, gain, first_key, end_key);
    const ItemBytes bytes(problem);
    problem.o = view(o, bytes.element), problem.lse = view(lse, bytes.real);
    py::gil_scoped_release release;
    active_instruction_set().forward(problem);
}

void backward(const std::string& dtype, const std::string& form, const Sizes& sizes,
              int64_t sequences, double scale, bool causal, int64_t window, int threads,
              const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& terms,
              int64_t n_terms, const std::optional<Tensor>& gain,
              const std::optional<Tensor>& first_key, const std::optional<Tensor>& end_key,
              const Tensor& o, const Tensor& lse, const Tensor& grad_o, const Tensor& grad_lse,
              const Tensor& grad_q, const Tensor& grad_k, const Tensor& grad_v,
              const std::optional<Tensor>& grad_terms, const std::optional<Tensor>& grad_gain) {
    Backward problem;
    fill(problem, dtype, form, sizes, sequences, scale, causal, window, threads, q, k, v, terms,
         n_terms, gain, first_key, end_key);
    const ItemBytes bytes(problem);
    problem.o = view(o, bytes.element), problem.lse = view(lse, bytes.real);
    problem.grad_o = view(grad_o, bytes.element), problem.grad_lse = view(grad_lse, bytes.real);
    problem.grad_q = view(grad_q, bytes.element);
    problem.grad_k = view(grad_k, bytes.element), problem.grad_v = view(grad_v, bytes.element);
    problem.grad_terms = view(grad_terms, bytes.terms),
    problem.grad_gain = view(grad_gain, bytes.real);
    py::gil_scoped_release release;
    active_instruction_set().backward(problem);
}

void trim(const std::string& dtype, const std::string& form, const Sizes& sizes, int64_t sequences,
          double scale, bool causal, int64_t window, int threads, const Tensor& q, const Tensor& k,
          const Tensor& v, const std::optional<Tensor>& terms, int64_t n_terms,
          const std::optional<Tensor>& gain, const std::optional<Tensor>& first_key,
          const std::optional<Tensor>& end_key, const Tensor& near, const Tensor& cut, double share,
          int64_t reach, bool from_end) {
    Trim problem;
    fill(problem, dtype, form, sizes, sequences, scale, causal, window, threads, q, k, v, terms,
         n_terms, gain, first_key, end_key);
    problem.near = view(near, ItemBytes(problem).real), problem.cut = view(cut, sizeof(int32_t));
    problem.share = share, problem.reach = reach, problem.from_end = from_end;
    py::gil_scoped_release release;
    active_instruction_set().trim(problem);
}

Decode decode_problem(const std::string& dtype, const std::string& form,
                      const std::array<int64_t, 7>& sizes, double scale, int64_t window,
                      int threads, const std::array<int64_t, 2>& pages, int64_t lengths,
                      int64_t block_table) {
    Decode problem{};
    problem.element = element_of(dtype), problem.form = form_of(form);
    problem.batch = sizes[0], problem.heads = sizes[1], problem.kv_heads = sizes[2];
    problem.n_query = sizes[3], problem.n_terms = sizes[4];
    problem.head_dim = sizes[5], problem.value_dim = sizes[6];
    problem.scale = scale, problem.window = window, problem.threads = threads;
    problem.page_size = pages[0], problem.columns = pages[1];
    problem.lengths = reinterpret_cast<const int64_t*>(lengths);
    problem.block_table = reinterpret_cast<const int32_t*>(block_table);
    return problem;
}

// lengths and block_table are addresses; bounds are centres, extents, lowest and highest.
void decode(const std::string& dtype, const std::string& form, const std::array<int64_t, 7>& sizes,
            double scale, int64_t window, double tolerance, int threads,
            const std::array<int64_t, 2>& pages, int64_t lengths, int64_t block_table,
            const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& terms,
            const std::optional<Tensor>& gain, const std::array<std::optional<Tensor>, 4>& bounds,
            const Tensor& o, const Tensor& lse) {
    Decode problem =
        decode_problem(dtype, form, sizes, scale, window, threads, pages, lengths, block_table);
    problem.tolerance = tolerance;
    const int64_t element = element_bytes(problem.element);
    const int64_t real = std::max<int64_t>(element, sizeof(float));
    const bool sums = problem.form == Form::cumulative || problem.form == Form::log1p_square;
    problem.q = view(q, element), problem.k = view(k, element), problem.v = view(v, element);
    problem.terms = view(terms, sums ? sizeof(double) : real), problem.gain = view(gain, real);
    problem.centres = view(bounds[0], element), problem.extents = view(bounds[1], real);
    problem.lowest = view(bounds[2], sums ? sizeof(double) : real);
    problem.highest = view(bounds[3], sums ? sizeof(double) : real);
    problem.o = view(o, element), problem.lse = view(lse, real);
    py::gil_scoped_release release;
    active_instruction_set().decode(problem);
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
    m.doc() = "Attention kernels for CPUs; called through biased_flash_attn.cpu";
    m.def("forward", &bfa::forward);
    m.def("backward", &bfa::backward);
    m.def("trim", &bfa::trim);
    m.def("decode", &bfa::decode);
    m.def("instruction_sets", &bfa::supported_instruction_sets,
          "Built and supported here, slowest first");
    m.def(
        "instruction_set", [] { return std::string(bfa::active_instruction_set().name); },
        "The one in use");
    m.def("use_instruction_set", &bfa::use_instruction_set);
    m.def("release_memory", &bfa::release_scratch,
          "Gives back to the system what calls leave to the next");
}
