// Norms, softmax and reductions, one row at a time in float32.
#pragma once

#include "kernels/rows.h"
#include "kernels/table.h"

namespace {

using kernel_pytorch::RowOp;
using kernel_pytorch::View;

inline float row_sum(const float* x, int64_t count) {
  Vec a = {}, b = {};
  int64_t n = 0;
  for (; n + 2 * kLanes <= count; n += 2 * kLanes) a += load(x + n), b += load(x + n + kLanes);
  float total = sum(a + b);
  for (; n < count; ++n) total += x[n];
  return total;
}

inline float row_squares(const float* x, int64_t count, float mean) {
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

inline float row_maximum(const float* x, int64_t count) {
  float found = -__builtin_inff();
  int64_t n = 0;
  if (count >= kLanes) {
    Vec most = load(x);
    for (n = kLanes; n + kLanes <= count; n += kLanes) {
      const Vec own = load(x + n);
      most = select((own > most) | (own != own), own, most);  // NaN wins, as it does in torch
    }
    found = largest(most);
  }
  for (; n < count; ++n) found = x[n] > found || x[n] != x[n] ? x[n] : found;
  return found;
}

inline void norm_row(const RowOp& op, float* x, int64_t count, const float* weight, const float* bias) {
  const float mean = op.code == kernel_pytorch::format::kLayerNorm ? row_sum(x, count) / static_cast<float>(count) : 0.0f;
  const float square = row_squares(x, count, mean) / static_cast<float>(count);
  const float scale = 1.0f / __builtin_sqrtf(square + op.eps);
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

inline void softmax_row(float* x, int64_t count) {
  const float most = row_maximum(x, count);
  Vec total = {};
  int64_t n = 0;
  for (; n + kLanes <= count; n += kLanes) {
    const Vec e = exp(load(x + n) - most);
    total += e;
    store(x + n, e);
  }
  float sum_of_all = sum(total);
  for (; n < count; ++n) {
    x[n] = exp(splat(x[n] - most))[0];
    sum_of_all += x[n];
  }
  const float inverse = 1.0f / sum_of_all;
  for (n = 0; n + kLanes <= count; n += kLanes) store(x + n, load(x + n) * inverse);
  for (; n < count; ++n) x[n] *= inverse;
}

// Where row number `row` begins, in elements.
inline int64_t row_offset(const View& view, int64_t row) {
  int64_t offset = 0;
  for (int d = view.rank - 2; d >= 0; --d) {
    offset += row % view.dims[d] * view.strides[d];
    row /= view.dims[d];
  }
  return offset;
}

// Scratch holds three rows: the row itself, the weights, the bias.
inline void row_op(const RowOp& op, int64_t begin, int64_t end, float* scratch) {
  namespace format = kernel_pytorch::format;
  const int64_t count = op.in.dims[op.in.rank - 1];
  float* const x = scratch;
  const float *weight = nullptr, *bias = nullptr;
  if (op.weight) {
    read_row(scratch + count, op.weight->data, op.weight->dtype, op.weight->strides[0], count);
    weight = scratch + count;
  }
  if (op.bias) {
    read_row(scratch + 2 * count, op.bias->data, op.bias->dtype, op.bias->strides[0], count);
    bias = scratch + 2 * count;
  }
  const int64_t in_bytes = static_cast<int64_t>(kernel_pytorch::size_of(op.in.dtype));
  const int64_t out_bytes = static_cast<int64_t>(kernel_pytorch::size_of(op.out.dtype));
  for (int64_t row = begin; row < end; ++row) {
    read_row(x, op.in.data + row_offset(op.in, row) * in_bytes, op.in.dtype, op.in.strides[op.in.rank - 1], count);
    char* const out = op.out.data + row_offset(op.out, row) * out_bytes;
    if (op.code == format::kReduce) {
      float found = op.reduction == format::kMaximum ? row_maximum(x, count) : row_sum(x, count);
      if (op.reduction == format::kMean) found /= static_cast<float>(count);
      write_row(out, &found, op.out.dtype, 1, 1);
      continue;
    }
    if (op.code == format::kSoftmax) {
      softmax_row(x, count);
    } else {
      norm_row(op, x, count, weight, bias);
    }
    write_row(out, x, op.out.dtype, op.out.strides[op.out.rank - 1], count);
  }
}

}  // namespace
