// The common part of RMSNorm and LayerNorm: (x, -weight, -bias) -> y along the last dimension; floats: eps.
#pragma once

#include "operators/row_operator.h"

namespace kernel_pytorch {

class Norm : public RowOperator {
 public:
  bool resolve(Reason& reason) override {
    const View& in = inputs[0];
    const bool by_columns = in.rank >= 2 && in.strides[in.rank - 1] > 1 && in.strides[in.rank - 2] == 1;
    task_.rows_at_once = by_columns ? kNormRows : 1;
    if (!resolve_rows(task_.rows_at_once + 2, reason) || !output_matches(reason)) return false;
    for (size_t n = 1; n < op->inputs.size(); ++n) {
      if (!is_per_column(n, reason)) return false;
    }
    return true;
  }

  void start() override {
    task_.in = inputs[0];
    task_.out = outputs[0];
    task_.weight = has_input[1] ? &inputs[1] : nullptr;
    task_.bias = has_input[2] ? &inputs[2] : nullptr;
    task_.eps = static_cast<float>(op->floats[0]);
  }

  void run(int64_t begin, int64_t end, char* scratch) const override {
    kernels->norm(task_, begin, end, reinterpret_cast<float*>(scratch));
  }

 protected:
  explicit Norm(bool subtract_mean) { task_.subtract_mean = subtract_mean; }

  // Whether the op has x, optional parameters and an eps that is not negative.
  bool check_norm(size_t input_count, Reason& reason) const {
    const bool good = has_operands(input_count, 1, 1) && has_one_float() && op->floats[0] >= 0 && op->ints.empty();
    return good || wrong_operands(reason);
  }

 private:
  NormTask task_ = {};
};

}  // namespace kernel_pytorch
