// Any chain of pointwise steps in one pass: a chunk of each operand is in the cache while all steps run on it.
#pragma once

#include <math.h>

#include "kernels/rows.h"
#include "kernels/table.h"

namespace {

using kernel_pytorch::kChunk;
using kernel_pytorch::PointwiseLoop;

// Chunks are whole vectors: what is past the end of a row is computed and not written.
template <typename Function>
inline void each(float* to, const float* a, int64_t count, Function function) {
  for (int64_t n = 0; n < count; n += kLanes) store(to + n, function(load(a + n)));
}

template <typename Function>
inline void each(float* to, const float* a, const float* b, int64_t count, Function function) {
  for (int64_t n = 0; n < count; n += kLanes) store(to + n, function(load(a + n), load(b + n)));
}

inline void run_step(int64_t step, float* to, const float* a, const float* b, int64_t count) {
  namespace format = kernel_pytorch::format;
  switch (step) {
    case format::kCopy:
      return each(to, a, count, [](Vec x) { return x; });
    case format::kAddStep:
      return each(to, a, b, count, [](Vec x, Vec y) { return x + y; });
    case format::kSubtract:
      return each(to, a, b, count, [](Vec x, Vec y) { return x - y; });
    case format::kMultiplyStep:
      return each(to, a, b, count, [](Vec x, Vec y) { return x * y; });
    case format::kDivide:
      return each(to, a, b, count, [](Vec x, Vec y) { return x / y; });
    case format::kMaximumStep:  // NaN of either side stays
      return each(to, a, b, count, [](Vec x, Vec y) { return select((x > y) | (x != x), x, y); });
    case format::kMinimum:
      return each(to, a, b, count, [](Vec x, Vec y) { return select((x < y) | (x != x), x, y); });
    case format::kPower:
      for (int64_t n = 0; n < count; ++n) to[n] = powf(a[n], b[n]);
      return;
    case format::kNegate:
      return each(to, a, count, [](Vec x) { return -x; });
    case format::kAbsolute:
      return each(to, a, count, [](Vec x) { return absolute(x); });
    case format::kExp:
      return each(to, a, count, [](Vec x) { return exp(x); });
    case format::kLog:
      for (int64_t n = 0; n < count; ++n) to[n] = logf(a[n]);
      return;
    case format::kSqrt:
      return each(to, a, count, [](Vec x) { return square_root(x); });
    case format::kRsqrt:
      return each(to, a, count, [](Vec x) { return 1.0f / square_root(x); });
    case format::kReciprocal:
      return each(to, a, count, [](Vec x) { return 1.0f / x; });
    case format::kSigmoid:
      return each(to, a, count, [](Vec x) { return sigmoid(x); });
    case format::kTanh:
      return each(to, a, count, [](Vec x) { return tanh(x); });
    case format::kErf:
      return each(to, a, count, [](Vec x) { return erf(x); });
    case format::kSilu:
      return each(to, a, count, [](Vec x) { return silu(x); });
    case format::kGelu:
      return each(to, a, count, [](Vec x) { return gelu(x); });
    case format::kGeluTanh:
      return each(to, a, count, [](Vec x) { return gelu_tanh(x); });
    case format::kRelu:
      return each(to, a, count, [](Vec x) { return select(x <= 0.0f, Vec{}, x); });
    case format::kSin:
      for (int64_t n = 0; n < count; ++n) to[n] = sinf(a[n]);
      return;
    case format::kCos:
      for (int64_t n = 0; n < count; ++n) to[n] = cosf(a[n]);
      return;
    default:
      return;
  }
}

inline void pointwise(const PointwiseLoop& loop, int64_t begin, int64_t end, float* scratch) {
  namespace format = kernel_pytorch::format;
  const int inner = loop.rank - 1;
  const int64_t width = loop.dims[inner], chunks = (width + kChunk - 1) / kChunk;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t start = task % chunks * kChunk;
    const int64_t count = width - start < kChunk ? width - start : kChunk;
    int64_t in_at[format::kRegisters] = {}, out_at[format::kRegisters] = {};
    int64_t row = task / chunks;
    for (int d = inner - 1; d >= 0; --d) {
      const int64_t index = row % loop.dims[d];
      row /= loop.dims[d];
      for (int n = 0; n < loop.inputs; ++n) in_at[n] += index * loop.in_strides[n][d];
      for (int n = 0; n < loop.outputs; ++n) out_at[n] += index * loop.out_strides[n][d];
    }
    for (int n = 0; n < loop.inputs; ++n) {
      const int64_t stride = loop.in_strides[n][inner];
      const int64_t at = (in_at[n] + start * stride) * static_cast<int64_t>(kernel_pytorch::size_of(loop.in_dtype[n]));
      read_row(scratch + n * kChunk, loop.in[n] + at, loop.in_dtype[n], stride, count);
    }
    for (int64_t s = 0; s < loop.step_count; ++s) {
      const int64_t* const step = loop.steps + 4 * s;
      float* const to = scratch + step[1] * kChunk;
      if (step[0] == format::kImmediate) {
        const Vec value = splat(loop.immediates[step[2]]);
        for (int64_t n = 0; n < count; n += kLanes) store(to + n, value);
      } else {
        run_step(step[0], to, scratch + step[2] * kChunk, scratch + step[3] * kChunk, count);
      }
    }
    for (int n = 0; n < loop.outputs; ++n) {
      const int64_t stride = loop.out_strides[n][inner];
      const int64_t at = (out_at[n] + start * stride) * static_cast<int64_t>(kernel_pytorch::size_of(loop.out_dtype[n]));
      write_row(loop.out[n] + at, scratch + loop.out_registers[n] * kChunk, loop.out_dtype[n], stride, count);
    }
  }
}

}  // namespace
