// The named arguments of a kernel, as Python passes them: numbers, names, and tensors described by
// address, element type, shape and strides.
#pragma once

#include <pybind11/pybind11.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <unordered_map>

#include "problem.h"

namespace bfa {

namespace py = pybind11;

// int64 and int32 are not elements that kernels compute with.
struct DType {
    const char* name;
    int64_t bytes;
    Element element = Element::float64;
};
constexpr DType kDTypes[] = {
    {"float32", 4, Element::float32},
    {"bfloat16", 2, Element::bfloat16},
    {"float16", 2, Element::float16},
    {"float64", 8, Element::float64},
    {"int64", 8},
    {"int32", 4},
};

inline const DType& find_dtype(const char* name) {
    for (const DType& dtype : kDTypes)
        if (std::strcmp(name, dtype.name) == 0) return dtype;
    throw std::invalid_argument(std::string("dtype is ") + name);
}

// A tuple (address, dtype, shape, strides in elements).
class Described {
public:
    explicit Described(py::handle x)
        : data_(reinterpret_cast<char*>(number(x, 0))),
          dtype_(find_dtype(PyUnicode_AsUTF8(item(x, 1).ptr()))),
          shape_(item(x, 2)),
          strides_(item(x, 3)),
          dims_(PyTuple_Size(shape_.ptr())) {}

    template <class T = char>
    T* data() const {
        return reinterpret_cast<T*>(data_);
    }
    int64_t bytes() const { return dtype_.bytes; }
    Element element() const { return dtype_.element; }

    // Dimensions that do not exist have size 1.
    int64_t size(Py_ssize_t n) const { return n < dims_ ? number(shape_, n) : 1; }
    int64_t stride(Py_ssize_t n) const { return n < dims_ ? number(strides_, n) * bytes() : 0; }

    // Dimensions n, n + 1, ... as a (batch, heads, sequence, ...) tensor; a batch entry or a head
    // broadcasts if it is the only one.
    View view(Py_ssize_t n = 0) const {
        return {data_, size(n) == 1 ? 0 : stride(n), size(n + 1) == 1 ? 0 : stride(n + 1),
                n + 2 < dims_ ? stride(n + 2) : bytes()};
    }
    FormTensor form_tensor() const { return {view(), size(2), stride(3), element(), size(3)}; }

private:
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

    char* data_;
    const DType& dtype_;
    py::handle shape_, strides_;
    Py_ssize_t dims_;
};

class Fields {
public:
    explicit Fields(const py::dict& values) : values_(values) {}

    // An argument may be left out if it would be None.
    bool has(const char* name) const {
        PyObject* value = PyDict_GetItemWithError(values_.ptr(), interned(name));
        return value && value != Py_None;
    }
    template <class T>
    T get(const char* name) const {
        return py::cast<T>(find(name));
    }
    Described tensor(const char* name) const { return Described(find(name)); }
    // Of a tensor, or without an address if there is none.
    View view(const char* name) const { return has(name) ? tensor(name).view() : View(); }
    // Of a list of tensors.
    void form_tensors(const char* name, FormTensor* tensors) const {
        const py::handle given = find(name);
        const Py_ssize_t count = PyList_Size(given.ptr());
        if (count < 0) throw py::error_already_set();
        if (count > kMaxFormTensors) throw std::invalid_argument("too many tensors of a form");
        for (Py_ssize_t n = 0; n < count; ++n)
            tensors[n] = Described(PyList_GET_ITEM(given.ptr(), n)).form_tensor();
    }

private:
    py::handle find(const char* name) const {
        PyObject* value = PyDict_GetItemWithError(values_.ptr(), interned(name));
        if (!value) throw py::type_error(std::string("missing: ") + name);
        return value;
    }

    // Names are literals; each is converted to a Python string once.
    static PyObject* interned(const char* name) {
        static std::unordered_map<const char*, PyObject*> strings;
        PyObject*& string = strings[name];
        if (!string) string = PyUnicode_InternFromString(name);
        return string;
    }

    const py::dict& values_;
};

}  // namespace bfa
