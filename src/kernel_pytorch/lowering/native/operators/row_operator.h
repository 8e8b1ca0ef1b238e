// The common part of operators along the last dimension of their first input: norms, softmax and reductions.
#pragma once

#include "core/operator.h"

namespace kernel_pytorch {

class RowOperator : public Operator {
 public:
  double cost() const override;

 protected:
  // Validates the first input, splits its rows into tasks and reserves scratch for `scratch_rows` rows of float32.
  bool resolve_rows(int64_t scratch_rows, Reason& reason);

  // Validates that the output has the shape of the first input.
  bool output_matches(Reason& reason) const;

  // Validates an optional input of one element per column.
  bool is_per_column(size_t input, Reason& reason) const;

  int64_t columns() const { return inputs[0].dims[inputs[0].rank - 1]; }
};

}  // namespace kernel_pytorch
