// y = x w^T + bias in float32, with the weights packed ahead of time: panels of 32 outputs, [panel][input][32].
//
// One panel is read once for a block of rows. A tile of rows x two vectors stays in registers over all inputs; a
// number of x is read for all its outputs at once, and is never rearranged.
#pragma once

#include "kernels/rows.h"
#include "kernels/table.h"

namespace {

using kernel_pytorch::kPanel;
using kernel_pytorch::LinearTask;

#if defined(KP_TARGET_AVX512)
constexpr int kLinearVectors = 2, kLinearRows = 12;  // 24 sums in 32 registers
#elif defined(KP_TARGET_AVX2)
constexpr int kLinearVectors = 2, kLinearRows = 6;  // 12 sums in 16 registers
#else
constexpr int kLinearVectors = 4, kLinearRows = 6;  // 24 sums in NEON's 32 registers
#endif

// Rows of x times part of a panel, into y[row][32].
template <int Rows>
inline void linear_tile(const float* const* x, int64_t inputs, const float* panel, float* y) {
  Vec sums[Rows][kLinearVectors];
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < kLinearVectors; ++v) sums[r][v] = Vec{};
  }
  for (int64_t k = 0; k < inputs; ++k) {
    Vec own[kLinearVectors];
    for (int v = 0; v < kLinearVectors; ++v) own[v] = load(panel + k * kPanel + v * kLanes);
    for (int r = 0; r < Rows; ++r) {
      const Vec factor = splat(x[r][k]);
      for (int v = 0; v < kLinearVectors; ++v) sums[r][v] += factor * own[v];
    }
  }
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < kLinearVectors; ++v) store(y + r * kPanel + v * kLanes, sums[r][v]);
  }
}

// Narrow weights as float32; those of int8 without their scales, which are applied to the sums.
inline void unpack(const char* from, DType dtype, float* to, int64_t count) { read_row(to, from, dtype, 1, count); }

inline void linear(const LinearTask& task) {
  float y[kLinearRows * kPanel];
  const int64_t columns = task.outputs - task.panel * kPanel;
  const int64_t count = columns < kPanel ? columns : kPanel;
  const float* const panel = task.weights;
  for (int64_t row = 0; row < task.rows;) {
    const int64_t left = task.rows - row;
    const int64_t rows = left >= kLinearRows ? kLinearRows : left >= 4 ? 4 : 1;
    for (int part = 0; part < kPanel; part += kLinearVectors * kLanes) {
      if (rows == kLinearRows) {
        linear_tile<kLinearRows>(task.x + row, task.inputs, panel + part, y + part);
      } else if (rows == 4) {
        linear_tile<4>(task.x + row, task.inputs, panel + part, y + part);
      } else {
        linear_tile<1>(task.x + row, task.inputs, panel + part, y + part);
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
