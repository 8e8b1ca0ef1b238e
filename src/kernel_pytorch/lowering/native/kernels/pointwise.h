// A chain of pointwise steps in one pass over memory: all steps run on a chunk of each operand while it is in L1.
#pragma once

#include <math.h>

#include "kernels/table.h"
#include "kernels/whole_rows.h"

namespace {

using kernel_pytorch::kPointwiseChunk;
using kernel_pytorch::kPointwiseTile;
using kernel_pytorch::PointwiseLoop;
using kernel_pytorch::format::kRegisters;
using kernel_pytorch::format::Step;

// Chunks are whole vectors: elements past the end of a row are computed and not written.
template <typename Function>
inline void each(float* to, const float* a, int64_t count, Function function) {
  for (int64_t n = 0; n < count; n += kLanes) store(to + n, function(load(a + n)));
}

template <typename Function>
inline void each(float* to, const float* a, const float* b, int64_t count, Function function) {
  for (int64_t n = 0; n < count; n += kLanes) store(to + n, function(load(a + n), load(b + n)));
}

inline void run_step(Step step, float* to, const float* a, const float* b, int64_t count) {
  switch (step) {
    case Step::kCopy:
      return each(to, a, count, [](Vec x) { return x; });
    case Step::kAdd:
      return each(to, a, b, count, [](Vec x, Vec y) { return x + y; });
    case Step::kSubtract:
      return each(to, a, b, count, [](Vec x, Vec y) { return x - y; });
    case Step::kMultiply:
      return each(to, a, b, count, [](Vec x, Vec y) { return x * y; });
    case Step::kDivide:
      return each(to, a, b, count, [](Vec x, Vec y) { return x / y; });
    case Step::kMaximum:  // NaN of either operand propagates
      return each(to, a, b, count, [](Vec x, Vec y) { return select((x > y) | (x != x), x, y); });
    case Step::kMinimum:
      return each(to, a, b, count, [](Vec x, Vec y) { return select((x < y) | (x != x), x, y); });
    case Step::kPower:
      for (int64_t n = 0; n < count; ++n) to[n] = powf(a[n], b[n]);
      return;
    case Step::kNegate:
      return each(to, a, count, [](Vec x) { return -x; });
    case Step::kAbsolute:
      return each(to, a, count, [](Vec x) { return absolute(x); });
    case Step::kExp:
      return each(to, a, count, [](Vec x) { return exp(x); });
    case Step::kLog:
      for (int64_t n = 0; n < count; ++n) to[n] = logf(a[n]);
      return;
    case Step::kSqrt:
      return each(to, a, count, [](Vec x) { return square_root(x); });
    case Step::kRsqrt:
      return each(to, a, count, [](Vec x) { return 1.0f / square_root(x); });
    case Step::kReciprocal:
      return each(to, a, count, [](Vec x) { return 1.0f / x; });
    case Step::kSigmoid:
      return each(to, a, count, [](Vec x) { return sigmoid(x); });
    case Step::kTanh:
      return each(to, a, count, [](Vec x) { return tanh(x); });
    case Step::kErf:
      return each(to, a, count, [](Vec x) { return erf(x); });
    case Step::kSilu:
      return each(to, a, count, [](Vec x) { return silu(x); });
    case Step::kGelu:
      return each(to, a, count, [](Vec x) { return gelu(x); });
    case Step::kGeluTanh:
      return each(to, a, count, [](Vec x) { return gelu_tanh(x); });
    case Step::kRelu:
      return each(to, a, count, [](Vec x) { return select(x <= 0.0f, Vec{}, x); });
    case Step::kSin:
      for (int64_t n = 0; n < count; ++n) to[n] = sinf(a[n]);
      return;
    case Step::kCos:
      for (int64_t n = 0; n < count; ++n) to[n] = cosf(a[n]);
      return;
    case Step::kImmediate:  // handled by pointwise()
    case Step::kCount:
      return;
  }
}

KP_NOT_INLINED void run_steps(const PointwiseLoop& loop, int64_t count, float* scratch) {
  for (int64_t s = 0; s < loop.step_count; ++s) {
    const int64_t* const step = loop.steps + 4 * s;
    float* const to = scratch + step[1] * kPointwiseChunk;
    if (static_cast<Step>(step[0]) == Step::kImmediate) {
      const Vec value = splat(loop.immediates[step[2]]);
      for (int64_t n = 0; n < count; n += kLanes) store(to + n, value);
    } else {
      run_step(static_cast<Step>(step[0]), to, scratch + step[2] * kPointwiseChunk, scratch + step[3] * kPointwiseChunk,
               count);
    }
  }
}

// Advances the offset of every operand, in elements, by an index along one dimension.
struct PointwiseOffsets {
  int64_t in[kRegisters] = {}, out[kRegisters] = {};
  void move(const PointwiseLoop& loop, int d, int64_t index) {
    for (int n = 0; n < loop.inputs; ++n) in[n] += index * loop.in_strides[n][d];
    for (int n = 0; n < loop.outputs; ++n) out[n] += index * loop.out_strides[n][d];
  }
};

// Reads a tile as rows of kPointwiseTile elements, whichever of its two dimensions is contiguous in memory.
inline void read_tile(float* to, const char* from, DType dtype, int64_t row_stride, int64_t stride, int64_t rows,
                      int64_t columns) {
  const int64_t bytes = static_cast<int64_t>(size_of(dtype));
  if (stride == 1 || row_stride != 1) {
    for (int64_t r = 0; r < rows; ++r) {
      read_whole_row(to + r * kPointwiseTile, from + r * row_stride * bytes, dtype, stride, columns);
    }
    return;
  }
  read_transposed(to, kPointwiseTile, from, dtype, stride, rows, columns);
}

inline void pointwise_tile(const PointwiseLoop& loop, int64_t task, float* scratch) {
  const int inner = loop.rank - 1, across = loop.across;
  const int64_t wide = (loop.dims[inner] + kPointwiseTile - 1) / kPointwiseTile;
  const int64_t tall = (loop.dims[across] + kPointwiseTile - 1) / kPointwiseTile;
  // Neighbouring tasks read neighbouring memory, and write whole cache lines.
  const int64_t row = task % tall * kPointwiseTile, column = task / tall % wide * kPointwiseTile;
  const int64_t columns = loop.dims[inner] - column < kPointwiseTile ? loop.dims[inner] - column : kPointwiseTile;
  const int64_t rows = loop.dims[across] - row < kPointwiseTile ? loop.dims[across] - row : kPointwiseTile;
  PointwiseOffsets at;
  at.move(loop, inner, column);
  at.move(loop, across, row);
  int64_t outer = task / wide / tall;
  for (int d = inner - 1; d >= 0; --d) {
    if (d == across) continue;
    at.move(loop, d, outer % loop.dims[d]);
    outer /= loop.dims[d];
  }
  for (int n = 0; n < loop.inputs; ++n) {
    const int64_t first = at.in[n] * static_cast<int64_t>(size_of(loop.in_dtype[n]));
    read_tile(scratch + n * kPointwiseChunk, loop.in[n] + first, loop.in_dtype[n], loop.in_strides[n][across],
              loop.in_strides[n][inner], rows, columns);
  }
  run_steps(loop, rows * kPointwiseTile, scratch);
  for (int n = 0; n < loop.outputs; ++n) {
    const int64_t bytes = static_cast<int64_t>(size_of(loop.out_dtype[n]));
    const float* const from = scratch + loop.out_registers[n] * kPointwiseChunk;
    for (int64_t r = 0; r < rows; ++r) {
      write_whole_row(loop.out[n] + (at.out[n] + r * loop.out_strides[n][across]) * bytes, from + r * kPointwiseTile,
                      loop.out_dtype[n], loop.out_strides[n][inner], columns);
    }
  }
}

inline void pointwise_chunk(const PointwiseLoop& loop, int64_t task, float* scratch) {
  const int inner = loop.rank - 1;
  const int64_t width = loop.dims[inner], chunks = (width + kPointwiseChunk - 1) / kPointwiseChunk;
  const int64_t start = task % chunks * kPointwiseChunk;
  const int64_t count = width - start < kPointwiseChunk ? width - start : kPointwiseChunk;
  PointwiseOffsets at;
  at.move(loop, inner, start);
  int64_t row = task / chunks;
  for (int d = inner - 1; d >= 0; --d) {
    at.move(loop, d, row % loop.dims[d]);
    row /= loop.dims[d];
  }
  for (int n = 0; n < loop.inputs; ++n) {
    const int64_t first = at.in[n] * static_cast<int64_t>(size_of(loop.in_dtype[n]));
    read_whole_row(scratch + n * kPointwiseChunk, loop.in[n] + first, loop.in_dtype[n], loop.in_strides[n][inner],
                   count);
  }
  run_steps(loop, count, scratch);
  for (int n = 0; n < loop.outputs; ++n) {
    const int64_t first = at.out[n] * static_cast<int64_t>(size_of(loop.out_dtype[n]));
    write_whole_row(loop.out[n] + first, scratch + loop.out_registers[n] * kPointwiseChunk, loop.out_dtype[n],
                    loop.out_strides[n][inner], count);
  }
}

inline void pointwise(const PointwiseLoop& loop, int64_t begin, int64_t end, float* scratch) {
  for (int64_t task = begin; task < end; ++task) {
    if (loop.tiled) {
      pointwise_tile(loop, task, scratch);
    } else {
      pointwise_chunk(loop, task, scratch);
    }
  }
}

}  // namespace
