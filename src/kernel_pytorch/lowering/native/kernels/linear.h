// y = x w^T + bias in float32, with weights packed ahead of time into panels of 32 outputs, [panel][input][32].
//
// A panel is read once for a block of rows. Accumulators for a few rows and all outputs of the panel stay in registers
// over all inputs; each element of x is broadcast, so x needs no packing.
#pragma once

#include "kernels/rows.h"
#include "kernels/table.h"

namespace {

using kernel_pytorch::LinearTask;
using kernel_pytorch::format::kPanel;

#if defined(KP_TARGET_AVX512)
constexpr int kLinearVectors = 2, kLinearRows = 12;  // 24 accumulators in 32 registers
#elif defined(KP_TARGET_AVX2)
constexpr int kLinearVectors = 2, kLinearRows = 6;  // 12 accumulators in 16 registers
#else
constexpr int kLinearVectors = 4, kLinearRows = 6;  // 24 accumulators in NEON's 32 registers
#endif

// Multiplies rows of x with kLinearVectors vectors of a panel, into y[row][32].
template <int Rows>
inline void linear_tile(const float* const* x, int64_t inputs, const float* panel, float* y) {
  Vec acc[Rows][kLinearVectors];
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < kLinearVectors; ++v) acc[r][v] = Vec{};
  }
  for (int64_t k = 0; k < inputs; ++k) {
    Vec own[kLinearVectors];
    for (int v = 0; v < kLinearVectors; ++v) own[v] = load(panel + k * kPanel + v * kLanes);
    for (int r = 0; r < Rows; ++r) {
      const Vec factor = splat(x[r][k]);
      for (int v = 0; v < kLinearVectors; ++v) acc[r][v] += factor * own[v];
    }
  }
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < kLinearVectors; ++v) store(y + r * kPanel + v * kLanes, acc[r][v]);
  }
}

// Converts weights to float32. Scales of int8 are applied to the accumulators instead.
inline void to_float(const char* from, DType dtype, float* to, int64_t count) { read_row(to, from, dtype, 1, count); }

inline void linear(const LinearTask& task) {
  float y[kLinearRows * kPanel];
  const int64_t columns = task.outputs - task.panel * kPanel;
  const int64_t count = columns < kPanel ? columns : kPanel;
  const float* const panel = task.weights;
  for (int64_t row = 0; row < task.rows;) {
    const int64_t left = task.rows - row;
    const int64_t rows = left >= kLinearRows ? kLinearRows : left >= 4 ? 4 : 1;
    for (int column = 0; column < kPanel; column += kLinearVectors * kLanes) {
      if (rows == kLinearRows) {
        linear_tile<kLinearRows>(task.x + row, task.inputs, panel + column, y + column);
      } else if (rows == 4) {
        linear_tile<4>(task.x + row, task.inputs, panel + column, y + column);
      } else {
        linear_tile<1>(task.x + row, task.inputs, panel + column, y + column);
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      float* const own = y + r * kPanel;
      if (task.scales) {
        for (int64_t n = 0; n < count; ++n) own[n] *= task.scales[task.panel * kPanel + n];
      }
      if (task.bias) {
        for (int64_t n = 0; n < count; ++n) own[n] += task.bias[task.panel * kPanel + n];
      }
      __builtin_memcpy(task.y[row + r] + task.panel * kPanel, own, static_cast<size_t>(count) * sizeof(float));
    }
    row += rows;
  }
}

}  // namespace
