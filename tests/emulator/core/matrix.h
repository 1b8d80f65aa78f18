// Element types and products of the matrix units of all generations.
#pragma once

#include <string>
#include <vector>

#include "machine.h"

namespace ptx {

enum class Element { kHalf, kBfloat, kTf32, kE4M3, kE5M2, kSigned8, kUnsigned8, kUnknown };

Element element_of(const std::string& type);
int bytes_of(Element e);
// The value of an element from its bits.
float value_of(Element e, uint32_t bits);

// Rows of values; `depth` is the dimension that is summed over.
struct Matrix {
    int rows, depth;
    std::vector<float> values;

    Matrix(int rows, int depth)
        : rows(rows), depth(depth), values(static_cast<size_t>(rows * depth)) {}
    float& at(int row, int k) { return values[static_cast<size_t>(row * depth + k)]; }
    float at(int row, int k) const { return values[static_cast<size_t>(row * depth + k)]; }
};

// sum_k a[i, k] b[j, k] for all i and j, [a.rows][b.rows], before rounding.
std::vector<double> product(const Matrix& a, const Matrix& b);

// The position of element e of register r of a lane in a fragment of 8-row groups, with
// `per_register` elements per register.
struct Place {
    int row, column;
};
Place place_in_a(int lane, int r, int e, int per_register);
Place place_in_b(int lane, int r, int e, int per_register);  // row: a column of the product

// Elements of an A or B fragment in the registers of a warp.
void load_fragment_a(const Warp& w, const std::vector<Operand>& registers, Element e, Matrix& out,
                     int first_row);
void load_fragment_b(const Warp& w, const std::vector<Operand>& registers, Element e, Matrix& out);

// The type of sums: f32, f16 (two per register) or s32.
enum class Sum { kFloat, kHalf, kInteger, kUnknown };
Sum sum_of(const std::string& type);

// Adds `tile` (16 rows from first_row, `columns` columns of a row-major array) to the sums c, or to
// 0 if c is null, and writes them to the registers d.
void accumulate(Warp& w, const std::vector<Operand>& d, const std::vector<Operand>* c, Sum sum,
                const std::vector<double>& tile, int first_row, int columns);

// The matrix in shared memory that a descriptor refers to, [rows][depth]; `transposed` if rows
// instead of the depth are contiguous.
struct Descriptor {
    uint32_t start, leading, stride;
    int swizzle;  // bytes of a row of the pattern, or 0
    int base_offset;
};
Matrix load_described(const Warp& w, const Descriptor& d, int rows, int depth, Element e,
                      bool transposed);
// Records the read.
void record_described(const Warp& w, const Descriptor& d, int rows, int depth, Element e,
                      bool transposed, const Access& access);

}  // namespace ptx
