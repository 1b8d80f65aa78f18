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
          is_per_sequence_(traits_of(problem.form).is_shared && problem.has_form_gradient() &&
                           problem.batch > 1 && problem.grad_form[0].batch == 0),
          begins_(is_per_sequence_ ? problem.batch + 1 : 0),
          sums_(is_per_sequence_ ? elements() : 0) {
        if (is_per_sequence_)
            std::memset(sums_.data(), 0, begins_.data()[problem.batch] * sizeof(Real));
    }

    bool is_per_sequence() const { return is_per_sequence_; }

    FormTensor of_sequence(int64_t b) const {
        const int64_t begin = begins_.data()[b], n = (begins_.data()[b + 1] - begin);
        const int64_t rows = n / problem_.heads;
        return {{reinterpret_cast<char*>(sums_.data() + begin), 0, rows * int64_t(sizeof(Real)),
                 int64_t(sizeof(Real))},
                rows};
    }

    void add_up() const {
        if (!is_per_sequence_) return;
        for (int64_t b = 0; b < problem_.batch; ++b) {
            const Backward one = bfa::of_sequence(problem_, b);
            for (int64_t h = 0; h < problem_.heads; ++h) {
                const Real* own = of_sequence(b).template at<Real>(0, h);
                Real* sum = one.grad_form[0].template at<Real>(0, h);
                for (int64_t x = 0; x < one.grad_form[0].rows; ++x) sum[x] += own[x];
            }
        }
    }

private:
    int64_t elements() const {
        begins_.data()[0] = 0;
        for (int64_t b = 0; b < problem_.batch; ++b)
            begins_.data()[b + 1] =
                begins_.data()[b] +
                problem_.heads * bfa::of_sequence(problem_, b).grad_form[0].rows;
        return begins_.data()[problem_.batch];
    }

    const Backward& problem_;
    const bool is_per_sequence_;
    const Buffer<int64_t> begins_;
    const Buffer<Real> sums_;
};

}  // namespace bfa::BFA_KERNELS
