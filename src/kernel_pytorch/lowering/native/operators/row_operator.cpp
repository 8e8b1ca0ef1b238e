#include "operators/row_operator.h"

namespace kernel_pytorch {

bool RowOperator::resolve_rows(int64_t scratch_rows, Reason& reason) {
  const View& in = inputs[0];
  if (in.rank < 1 || !is_float(in.dtype) || !is_float(outputs[0].dtype)) {
    return reason.set("%s takes floating-point tensors of at least one dimension", name);
  }
  const int64_t count = columns();
  if (count < 1 || count > (int64_t{1} << 32)) {
    return reason.set("%s has rows of %lld elements", name, static_cast<long long>(count));
  }
  const int64_t elements = in.numel();
  schedule.split_rows(elements / count, elements, max_workers);
  schedule.scratch_bytes = static_cast<size_t>(count * scratch_rows) * sizeof(float);
  return true;
}

bool RowOperator::output_matches(Reason& reason) const {
  return same_shape(inputs[0], outputs[0]) || reason.set("the output of %s has another shape than its input", name);
}

bool RowOperator::is_per_column(size_t input, Reason& reason) const {
  const View& view = inputs[input];
  if (!has_input[input] || (view.rank == 1 && view.dims[0] == columns() && is_float(view.dtype))) return true;
  return reason.set("the weight or bias of %s does not fit rows of %lld elements", name,
                    static_cast<long long>(columns()));
}

double RowOperator::cost() const { return static_cast<double>(schedule.tasks) * static_cast<double>(columns()); }

}  // namespace kernel_pytorch
