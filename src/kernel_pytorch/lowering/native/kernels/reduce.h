// Sum, mean and maximum along the last dimension, in float32.
#pragma once

#include "kernels/table.h"
#include "kernels/whole_rows.h"

namespace {

using kernel_pytorch::RowTask;
using kernel_pytorch::format::Reduction;

inline void reduce(const RowTask& task, Reduction reduction, int64_t begin, int64_t end, float* scratch) {
  const int64_t count = row_length(task.in);
  for (int64_t row = begin; row < end; ++row) {
    read_row_at(task.in, row, scratch);
    float result = reduction == Reduction::kMaximum ? row_max(scratch, count) : row_sum(scratch, count);
    if (reduction == Reduction::kMean) result /= static_cast<float>(count);
    write_whole_row(row_address(task.out, row), &result, task.out.dtype, 1, 1);
  }
}

}  // namespace
