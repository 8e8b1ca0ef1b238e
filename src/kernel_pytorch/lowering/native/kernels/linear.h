// y = x w^T + bias in float32, with weights packed ahead of time into panels of 32 outputs, [panel][input][32].
//
// A panel is read once for a block of rows. Accumulators for a few rows and all outputs of the panel stay in registers
// over all inputs; each element of x is broadcast, so x needs no packing.
#pragma once

#include "kernels/table.h"
#include "kernels/whole_rows.h"

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

constexpr int64_t kLinearDepth = 2048;  // inputs at a time: a panel of so many stays in L2 for all rows of a task
constexpr int64_t kLinearPrefetchBytes = 2048;

// Multiplies `depth` inputs of rows of x with kLinearVectors vectors of a panel, and adds to y[row][32] unless `first`.
// One row waits for memory and prefetches for itself; of many, each tile asks for a part of what comes next.
template <typename Format, int Rows>
inline void linear_tile(const float* const* x, int64_t from, int64_t depth, const typename Format::Element* panel,
                        float* y, int64_t tile, int64_t mask) {
  constexpr int64_t kElements = 64 / static_cast<int64_t>(sizeof(typename Format::Element));  // of a cache line
  const int64_t ahead =
      Rows == 1 ? kLinearPrefetchBytes / static_cast<int64_t>(sizeof(typename Format::Element)) : depth * kPanel;
  Vec acc[Rows][kLinearVectors];
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < kLinearVectors; ++v) acc[r][v] = from == 0 ? Vec{} : load(y + r * kPanel + v * kLanes);
  }
  const float* own_x[Rows];
  for (int r = 0; r < Rows; ++r) own_x[r] = x[r] + from;
  for (int64_t k = 0; k < depth; ++k) {
    if (Rows == 1 || (k & mask) == (tile & mask)) {
      for (int64_t n = 0; n < kLinearVectors * kLanes; n += kElements) {
        __builtin_prefetch(panel + k * kPanel + ahead + n);
      }
    }
    Vec own[kLinearVectors];
    for (int v = 0; v < kLinearVectors; ++v) own[v] = Format::vector(panel + k * kPanel + v * kLanes);
    for (int r = 0; r < Rows; ++r) {
      const Vec factor = splat(own_x[r][k]);
      for (int v = 0; v < kLinearVectors; ++v) acc[r][v] += factor * own[v];
    }
  }
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < kLinearVectors; ++v) store(y + r * kPanel + v * kLanes, acc[r][v]);
  }
}

// Scales, biases and writes a row of 32 sums.
inline void write_linear_row(const LinearTask& task, int64_t row, float* sums) {
  const int64_t first = task.panel * kPanel, columns = task.outputs - first;
  const int64_t count = columns < kPanel ? columns : kPanel;
  if (task.scales) {
    for (int64_t n = 0; n < count; ++n) sums[n] *= task.scales[first + n];
  }
  if (task.bias) {
    for (int64_t n = 0; n < count; ++n) sums[n] += task.bias[first + n];
  }
  __builtin_memcpy(task.y[row] + first, sums, static_cast<size_t>(count) * sizeof(float));
}

template <typename Format>
inline void linear_panel(const LinearTask& task, const typename Format::Element* panel) {
  float y[kernel_pytorch::kMaxLinearRows * kPanel];
  const int64_t y_rows = task.inputs > kLinearDepth ? 1 : 0;  // sums of all rows are kept only if inputs are blocked
  const int64_t mask = prefetch_mask(task.rows / kLinearRows);
  for (int64_t from = 0; from < task.inputs; from += kLinearDepth) {
    const int64_t left = task.inputs - from, depth = left < kLinearDepth ? left : kLinearDepth;
    for (int64_t row = 0, tile = 0; row < task.rows; ++tile) {
      const int64_t waiting = task.rows - row;
      const int64_t rows = waiting >= kLinearRows ? kLinearRows : waiting >= 4 ? 4 : 1;
      float* const own = y + y_rows * row * kPanel;
      for (int column = 0; column < kPanel; column += kLinearVectors * kLanes) {
        const auto* const weights = panel + from * kPanel + column;
        if (rows == kLinearRows) {
          linear_tile<Format, kLinearRows>(task.x + row, from, depth, weights, own + column, tile, mask);
        } else if (rows == 4) {
          linear_tile<Format, 4>(task.x + row, from, depth, weights, own + column, tile, mask);
        } else {
          linear_tile<Format, 1>(task.x + row, from, depth, weights, own + column, tile, mask);
        }
      }
      for (int64_t r = 0; depth == left && r < rows; ++r) write_linear_row(task, row + r, own + r * kPanel);
      row += rows;
    }
  }
}

// Few rows convert weights in registers, as decoding is bound by reading them. Many rows convert a panel once, into
// scratch. Scales of int8 are applied to the accumulators in both.
inline void linear(const LinearTask& task, float* scratch) {
  if (task.dtype == DType::kFloat32) return linear_panel<Float32>(task, reinterpret_cast<const float*>(task.weights));
  if (task.rows > 4) {
    read_whole_row(scratch, task.weights, task.dtype, 1, task.inputs * kPanel);
    return linear_panel<Float32>(task, scratch);
  }
  if (task.dtype == DType::kInt8) return linear_panel<Int8>(task, reinterpret_cast<const int8_t*>(task.weights));
  const uint16_t* const halves = reinterpret_cast<const uint16_t*>(task.weights);
  if (task.dtype == DType::kFloat16) return linear_panel<Float16>(task, halves);
  return linear_panel<BFloat16>(task, halves);
}

}  // namespace
