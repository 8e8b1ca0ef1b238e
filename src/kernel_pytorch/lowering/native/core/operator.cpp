#include "core/operator.h"

#include <algorithm>
#include <cmath>

namespace kernel_pytorch {

void Schedule::split_rows(int64_t rows, int64_t elements, int64_t max_workers) {
  tasks = rows;
  workers = elements > kParallelElements ? max_workers : 1;
  tasks_per_claim = std::max<int64_t>(rows / (workers * 4), 1);
}

bool Operator::has_operands(size_t input_count, size_t required, size_t output_count) const {
  if (op->inputs.size() != input_count || op->outputs.size() != output_count) return false;
  return std::all_of(op->inputs.begin(), op->inputs.begin() + static_cast<int64_t>(required),
                     [](uint32_t value) { return value != format::kNone; });
}

bool Operator::has_one_float() const { return op->floats.size() == 1 && std::isfinite(op->floats[0]); }

bool same_shape(const View& a, const View& b) {
  return a.rank == b.rank && std::equal(a.dims, a.dims + a.rank, b.dims);
}

}  // namespace kernel_pytorch
