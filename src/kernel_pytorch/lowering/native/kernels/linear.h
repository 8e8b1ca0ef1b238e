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
template <typename Format, int Rows>
inline void linear_tile(const float* const* x, int64_t inputs, const typename Format::Element* panel, float* y) {
  Vec acc[Rows][kLinearVectors];
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < kLinearVectors; ++v) acc[r][v] = Vec{};
  }
  for (int64_t k = 0; k < inputs; ++k) {
    Vec own[kLinearVectors];
    for (int v = 0; v < kLinearVectors; ++v) own[v] = Format::vector(panel + k * kPanel + v * kLanes);
    for (int r = 0; r < Rows; ++r) {
      const Vec factor = splat(x[r][k]);
      for (int v = 0; v < kLinearVectors; ++v) acc[r][v] += factor * own[v];
    }
  }
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < kLinearVectors; ++v) store(y + r * kPanel + v * kLanes, acc[r][v]);
  }
}

template <typename Format>
inline void linear_panel(const LinearTask& task, const typename Format::Element* panel) {
  float y[kLinearRows * kPanel];
  const int64_t columns = task.outputs - task.panel * kPanel;
  const int64_t count = columns < kPanel ? columns : kPanel;
  for (int64_t row = 0; row < task.rows;) {
    const int64_t left = task.rows - row;
    const int64_t rows = left >= kLinearRows ? kLinearRows : left >= 4 ? 4 : 1;
    for (int column = 0; column < kPanel; column += kLinearVectors * kLanes) {
      if (rows == kLinearRows) {
        linear_tile<Format, kLinearRows>(task.x + row, task.inputs, panel + column, y + column);
      } else if (rows == 4) {
        linear_tile<Format, 4>(task.x + row, task.inputs, panel + column, y + column);
      } else {
        linear_tile<Format, 1>(task.x + row, task.inputs, panel + column, y + column);
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

// Few rows convert weights in registers, as decoding is bound by reading them. Many rows convert a panel once, into
// scratch. Scales of int8 are applied to the accumulators in both.
inline void linear(const LinearTask& task, float* scratch) {
  if (task.dtype == DType::kFloat32) return linear_panel<Float32>(task, reinterpret_cast<const float*>(task.weights));
  if (task.rows > 4) {
    read_row(scratch, task.weights, task.dtype, 1, task.inputs * kPanel);
    return linear_panel<Float32>(task, scratch);
  }
  if (task.dtype == DType::kInt8) return linear_panel<Int8>(task, reinterpret_cast<const int8_t*>(task.weights));
  const uint16_t* const halves = reinterpret_cast<const uint16_t*>(task.weights);
  if (task.dtype == DType::kFloat16) return linear_panel<Float16>(task, halves);
  return linear_panel<BFloat16>(task, halves);
}

}  // namespace
