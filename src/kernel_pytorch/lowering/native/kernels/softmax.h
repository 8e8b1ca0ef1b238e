// Softmax along the last dimension, in float32.
#pragma once

#include "kernels/table.h"
#include "kernels/whole_rows.h"

namespace {

using kernel_pytorch::RowTask;

inline void softmax_row(float* x, int64_t count) {
  const float max = row_max(x, count);
  Vec partial = {};
  int64_t n = 0;
  for (; n + kLanes <= count; n += kLanes) {
    const Vec e = exp(load(x + n) - max);
    partial += e;
    store(x + n, e);
  }
  float total = sum(partial);
  for (; n < count; ++n) {
    x[n] = exp(splat(x[n] - max))[0];
    total += x[n];
  }
  const float inverse = 1.0f / total;
  for (n = 0; n + kLanes <= count; n += kLanes) store(x + n, load(x + n) * inverse);
  for (; n < count; ++n) x[n] *= inverse;
}

inline void softmax(const RowTask& task, int64_t begin, int64_t end, float* scratch) {
  for (int64_t row = begin; row < end; ++row) {
    read_row_at(task.in, row, scratch);
    softmax_row(scratch, row_length(task.in));
    write_row_at(task.out, row, scratch);
  }
}

}  // namespace
