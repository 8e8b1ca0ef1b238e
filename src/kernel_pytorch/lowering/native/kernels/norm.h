// RMSNorm and LayerNorm of one row at a time, in float32.
#pragma once

#include "kernels/table.h"
#include "kernels/whole_rows.h"

namespace {

using kernel_pytorch::NormTask;

inline float sum_of_squares(const float* x, int64_t count, float mean) {
  Vec a = {}, b = {};
  int64_t n = 0;
  for (; n + 2 * kLanes <= count; n += 2 * kLanes) {
    const Vec p = load(x + n) - mean, r = load(x + n + kLanes) - mean;
    a += p * p, b += r * r;
  }
  float total = sum(a + b);
  for (; n < count; ++n) total += (x[n] - mean) * (x[n] - mean);
  return total;
}

inline void norm_row(const NormTask& task, float* x, int64_t count, const float* weight, const float* bias) {
  const float mean = task.subtract_mean ? row_sum(x, count) / static_cast<float>(count) : 0.0f;
  const float variance = sum_of_squares(x, count, mean) / static_cast<float>(count);
  const float scale = 1.0f / __builtin_sqrtf(variance + task.eps);
  int64_t n = 0;
  for (; n + kLanes <= count; n += kLanes) {
    Vec y = (load(x + n) - mean) * scale;
    if (weight) y = y * load(weight + n);
    if (bias) y = y + load(bias + n);
    store(x + n, y);
  }
  for (; n < count; ++n) {
    float y = (x[n] - mean) * scale;
    if (weight) y = y * weight[n];
    if (bias) y = y + bias[n];
    x[n] = y;
  }
}

// Scratch holds rows of x, weight and bias in float32.
inline void norm(const NormTask& task, int64_t begin, int64_t end, float* scratch) {
  const int64_t count = row_length(task.in);
  float* const weight = task.weight ? scratch : nullptr;
  float* const bias = task.bias ? scratch + count : nullptr;
  float* const x = scratch + 2 * count;
  if (weight) read_whole_row(weight, task.weight->data, task.weight->dtype, task.weight->strides[0], count);
  if (bias) read_whole_row(bias, task.bias->data, task.bias->dtype, task.bias->strides[0], count);
  for (int64_t row = begin; row < end;) {
    int64_t rows = 1;
    if (task.rows_at_once > 1) {
      const int64_t height = task.in.dims[task.in.rank - 2], left = height - row % height;
      rows = left < end - row ? left : end - row;
      rows = rows < task.rows_at_once ? rows : task.rows_at_once;
      read_transposed(x, count, row_address(task.in, row), task.in.dtype, task.in.strides[task.in.rank - 1], rows,
                      count);
    } else {
      read_row_at(task.in, row, x);
    }
    for (int64_t r = 0; r < rows; ++r, ++row) {
      norm_row(task, x + r * count, count, weight, bias);
      write_row_at(task.out, row, x + r * count);
    }
  }
}

}  // namespace
