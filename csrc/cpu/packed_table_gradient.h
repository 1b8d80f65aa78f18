// The gradient of a distance table that several sequences share. Each sequence accumulates a
// private gradient with one entry per distance that occurs in it; these are added in the order of
// the sequences, so that the result is deterministic.
#pragma once

#include <cstring>

#include "../sequences.h"
#include "buffer.h"

namespace bfa::BFA_KERNELS {

template <class Real>
class PackedTableGradient {
public:
    explicit PackedTableGradient(const Backward& problem)
        : problem_(problem),
          table_(shared_tensor(*problem.form)),
          is_per_sequence_(table_ >= 0 && problem.has_form_gradient() && problem.batch > 1 &&
                           problem.grad_form[table_].batch_stride == 0),
          begins_(is_per_sequence_ ? problem.batch + 1 : 0),
          sums_(is_per_sequence_ ? elements() : 0) {
        if (is_per_sequence_)
            std::memset(sums_.data(), 0, begins_.data()[problem.batch] * sizeof(Real));
    }

    // Directs the gradient of the table in the problem of sequence b to that of the sequence.
    void redirect(int64_t b, Problem& sequence) const {
        if (is_per_sequence_) sequence.grad_form[table_] = private_gradient(b);
    }

    void add_up() const {
        if (!is_per_sequence_) return;
        for (int64_t b = 0; b < problem_.batch; ++b) {
            const FormTensor gradient = sequence_problem(problem_, b).grad_form[table_];
            for (int64_t h = 0; h < problem_.heads; ++h) {
                const Real* own = private_gradient(b).template at<Real>(0, h);
                Real* sum = gradient.at<Real>(0, h);
                for (int64_t x = 0; x < gradient.rows; ++x) sum[x] += own[x];
            }
        }
    }

private:
    // Returns the index of the form's tensor that sequences share, or -1.
    static int shared_tensor(const FormTraits& form) {
        for (int n = 0; n < kMaxFormTensors; ++n)
            if (form.tensors[n].is_shared) return n;
        return -1;
    }

    FormTensor private_gradient(int64_t b) const {
        const int64_t begin = begins_.data()[b], n = (begins_.data()[b + 1] - begin);
        const int64_t rows = n / problem_.heads;
        return {{reinterpret_cast<char*>(sums_.data() + begin), 0, rows * int64_t(sizeof(Real)),
                 int64_t(sizeof(Real))},
                rows};
    }

    int64_t elements() const {
        begins_.data()[0] = 0;
        for (int64_t b = 0; b < problem_.batch; ++b)
            begins_.data()[b + 1] =
                begins_.data()[b] +
                problem_.heads * sequence_problem(problem_, b).grad_form[table_].rows;
        return begins_.data()[problem_.batch];
    }

    const Backward& problem_;
    const int table_;
    const bool is_per_sequence_;
    const Buffer<int64_t> begins_;
    const Buffer<Real> sums_;
};

}  // namespace bfa::BFA_KERNELS
